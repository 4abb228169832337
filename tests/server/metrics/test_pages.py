"""server/metrics/pages.py: requests that wait at the same time share a /metrics page."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator

import pytest

from server.metrics.pages import GAP_RATIO, PAGE_GAP_S, SLICE_S, MetricsPages

OLD_OPEN = "application/openmetrics-text; version=0.0.1"
OPEN = "application/openmetrics-text; version=1.0.0"


class Counter:
    """Counts the pages that it makes."""

    def __init__(self) -> None:
        self.accepts: list[str] = []

    def pieces(self, accept: str) -> tuple[Iterator[bytes], str]:
        self.accepts.append(accept)
        return iter((b"page ", b"%d" % len(self.accepts))), "text/plain"


class SlowPages:
    """Pages whose generation takes time on the event loop."""

    def __init__(self, num_pieces: int, piece_s: float) -> None:
        self.num_pieces, self.piece_s = num_pieces, piece_s
        self.times_s: list[tuple[float, float]] = []
        """Begin and end of each page."""

    def pieces(self, accept: str) -> tuple[Iterator[bytes], str]:
        return self._slow_pieces(), "text/plain"

    def _slow_pieces(self) -> Iterator[bytes]:
        begun_s = time.monotonic()
        for _ in range(self.num_pieces):
            time.sleep(self.piece_s)
            yield b"piece"
        self.times_s.append((begun_s, time.monotonic()))


async def test_waiting_requests_share_a_metrics_page() -> None:
    counter = Counter()
    pages = MetricsPages(counter.pieces)

    found = await asyncio.gather(*(pages.get(accept) for accept in ["", "*/*", OPEN] * 50))

    assert len(set(found)) == 2
    assert len(counter.accepts) == 2


async def test_a_metrics_page_is_newer_than_its_request_and_pages_have_a_minimum_interval() -> None:
    counter = Counter()
    pages = MetricsPages(counter.pieces)
    loop = asyncio.get_running_loop()

    first = await pages.get("")
    begun_s = loop.time()
    second, third = await pages.get(""), await pages.get("")

    assert [first[0], second[0], third[0]] == [b"page 1", b"page 2", b"page 3"]
    assert loop.time() - begun_s >= 1.9 * PAGE_GAP_S


async def test_pages_of_all_formats_take_a_fifth_of_the_event_loop() -> None:
    slow = SlowPages(1, 0.02)
    pages = MetricsPages(slow.pieces)

    await asyncio.gather(*map(pages.get, ["", OPEN, OLD_OPEN]))

    gaps_s = [begun_s - ended_s for (_, ended_s), (begun_s, _) in itertools.pairwise(slow.times_s)]
    assert len(gaps_s) == 2
    assert min(gaps_s) >= GAP_RATIO * slow.piece_s


async def test_other_tasks_run_while_a_page_is_generated() -> None:
    slow = SlowPages(10, 2 * SLICE_S)
    pages = MetricsPages(slow.pieces)
    page = asyncio.ensure_future(pages.get(""))
    num_turns = 0
    while not page.done():
        await asyncio.sleep(0)
        num_turns += 1

    assert num_turns >= slow.num_pieces


async def test_a_page_that_fails_does_not_prevent_the_next_page() -> None:
    fails = True

    def pieces(accept: str) -> tuple[Iterator[bytes], str]:
        if fails:
            raise OSError("no memory")
        return iter([b"page"]), "text/plain"

    pages = MetricsPages(pieces)
    with pytest.raises(OSError, match="no memory"):
        await pages.get("")
    fails = False

    assert await pages.get("") == (b"page", "text/plain")


async def test_a_client_that_leaves_does_not_take_the_page_of_another() -> None:
    pages = MetricsPages(Counter().pieces)
    await pages.get("")
    leaving, staying = (asyncio.ensure_future(pages.get("")) for _ in range(2))
    await asyncio.sleep(0)

    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving

    assert (await staying)[0] == b"page 2"

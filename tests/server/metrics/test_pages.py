"""server/metrics/pages.py: requests that wait at the same time share a /metrics page."""

import asyncio
import contextlib

from server.metrics.pages import PAGE_GAP_S, MetricsPages, Page

OPEN = "application/openmetrics-text; version=1.0.0"


class Counter:
    """Counts the pages that it makes."""

    def __init__(self) -> None:
        self.accepts: list[str] = []

    def page(self, accept: str) -> Page:
        self.accepts.append(accept)
        return b"page %d" % len(self.accepts), "text/plain"


async def test_waiting_requests_share_a_metrics_page() -> None:
    counter = Counter()
    pages = MetricsPages(counter.page)

    found = await asyncio.gather(*(pages.get(accept) for accept in ["", "*/*", OPEN] * 50))

    assert len(set(found)) == 2
    assert len(counter.accepts) == 2


async def test_a_metrics_page_is_newer_than_its_request_and_pages_have_a_minimum_interval() -> None:
    counter = Counter()
    pages = MetricsPages(counter.page)
    loop = asyncio.get_running_loop()

    first = await pages.get("")
    begun_s = loop.time()
    second, third = await pages.get(""), await pages.get("")

    assert [first[0], second[0], third[0]] == [b"page 1", b"page 2", b"page 3"]
    assert loop.time() - begun_s >= 1.9 * PAGE_GAP_S


async def test_a_client_that_leaves_does_not_take_the_page_of_another() -> None:
    pages = MetricsPages(Counter().page)
    await pages.get("")
    leaving, staying = (asyncio.ensure_future(pages.get("")) for _ in range(2))
    await asyncio.sleep(0)

    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving

    assert (await staying)[0] == b"page 2"

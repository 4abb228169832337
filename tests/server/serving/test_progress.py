"""Start-up progress as text and as a bar, and its rate limit."""

import pytest
from http_rig import in_memory

from engine.transport.messages import LATER, Progress
from server.serving.progress import INTERVAL_S, ProgressReporter, bar, describe


@pytest.mark.parametrize(
    ("left_s", "words"), [(12.4, "12 s"), (200.0, "3 min"), (7000.0, "1.9 h"), (0.2, "1 s")]
)
def test_what_is_left_is_told_in_the_unit_that_fits(left_s: float, words: str) -> None:
    text = describe(Progress(0, "warmup", 12, 97, left_s))

    assert text == f"warmup, 12 of 97, about {words} left"


def test_a_bar_is_as_full_as_the_work_is_done() -> None:
    half = Progress(0, "load", 8 * 10**9, 16 * 10**9)
    assert bar(half) == f"[{'#' * 12}{'-' * 12}] load, 8.00 of 16.00 GB"
    assert bar(Progress(0, "warmup", 5, 5)).startswith(f"[{'#' * 24}]")
    assert bar(Progress(0, "load", 0, 0)) == "load"


def test_a_line_is_written_now_and_then_and_only_if_it_says_something_new() -> None:
    reporter = ProgressReporter(100.0)
    steps = [
        (100.1, 1),
        (100.0 + INTERVAL_S, 2),
        (100.1 + INTERVAL_S, 3),
        (101.0 + 2 * INTERVAL_S, 2),
        (102.0 + 2 * INTERVAL_S, 4),
    ]

    lines = [reporter.line(Progress(0, "warmup", done, 9), now_s) for now_s, done in steps]

    assert [line is not None for line in lines] == [False, True, False, False, True]
    assert reporter.line(None, 1000.0) is None


@pytest.mark.parametrize(("done", "told"), [(3, {"done": 3, "total": 9}), (9, None)])
async def test_a_ready_server_says_what_it_still_prepares(done: int, told: object) -> None:
    async with in_memory() as rig:
        rig.client.progress = Progress(0, LATER, done, 9)

        answer = await rig.http.get("/ready")

    assert answer.status_code == 200
    assert answer.json().get("warmup") == told

"""Start-up progress as text and as a bar."""

import pytest
from http_rig import in_memory

from engine.transport.messages import BACKGROUND_WARMUP, Progress
from server.serving.progress import bar, describe


@pytest.mark.parametrize(
    ("left_s", "words"), [(12.4, "12 s"), (200.0, "3 min"), (7000.0, "1.9 h"), (0.2, "1 s")]
)
def test_the_remaining_time_is_shown_in_a_suitable_unit(left_s: float, words: str) -> None:
    text = describe(Progress(0, "warmup", 12, 97, left_s))

    assert text == f"warming up, 12 of 97, about {words} left"


def test_a_bar_is_as_full_as_the_work_is_done() -> None:
    half = Progress(0, "load", 8 * 2**30, 16 * 2**30)
    assert bar(half) == f"[{'#' * 12}{'-' * 12}] loading the weights, 8.00 GiB of 16.00 GiB"
    assert bar(Progress(0, "warmup", 5, 5)).startswith(f"[{'#' * 24}]")
    assert bar(Progress(0, "load", 0, 0)) == "loading the weights"


def test_a_step_without_a_count_is_shown_by_name() -> None:
    progress = Progress(0, "compiling kernels, 12 s", 0, 0)

    assert bar(progress) == describe(progress) == progress.text == "compiling kernels, 12 s"


@pytest.mark.parametrize(("done", "told"), [(3, {"done": 3, "total": 9}), (9, None)])
async def test_a_ready_server_reports_its_remaining_warmup(done: int, told: object) -> None:
    async with in_memory() as rig:
        rig.client.progress = Progress(0, BACKGROUND_WARMUP, done, 9)

        answer = await rig.http.get("/ready")

    assert answer.status_code == 200
    assert answer.json().get("warmup") == told

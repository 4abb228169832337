"""CoreWait with simulated thread counters: which steps are logged, and how often."""

import itertools
from pathlib import Path

import pytest

from hpu.profiling import core_wait
from hpu.profiling.core_wait import CoreWait, run_delays


class Threads:
    """Folder with simulated kernel files, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 100.0
        (root / "proc").mkdir()
        (root / "proc/loadavg").write_text("27.04 9.00 4.00 3/112 21919\n")

    def set_delay(self, thread: int, seconds: float) -> None:
        folder = self.root / f"proc/self/task/{thread}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"5000000 {int(seconds * 1e9)} 17\n")

    def step(self, waits: CoreWait, step_s: float, **delays: float) -> None:
        waits.begin()
        self.now_s += step_s
        for name, seconds in delays.items():
            self.set_delay(int(name.removeprefix("t")), seconds)
        waits.end()


@pytest.fixture
def threads(tmp_path: Path) -> Threads:
    threads = Threads(tmp_path)
    threads.set_delay(1, 50.0)
    threads.set_delay(2, 70.0)
    return threads


@pytest.fixture
def waits(threads: Threads) -> CoreWait:
    return CoreWait(root=threads.root, clock=lambda: threads.now_s)


def test_a_step_that_waited_for_a_core_is_logged_with_the_load(
    threads: Threads, waits: CoreWait, caplog: pytest.LogCaptureFixture
) -> None:
    threads.step(waits, 3.1, t1=50.2, t2=72.4)

    (text,) = caplog.messages
    assert text.startswith(
        "A step took 3.1 s, of which its threads waited 2.4 s for a core: the load average is 27.0,"
    )
    assert text.endswith("cores may be used (1 such steps so far)")


@pytest.mark.parametrize(
    ("step_s", "delay_s"), [(1.9, 1.9), (3.0, 1.4)], ids=["short", "mostly on a core"]
)
def test_a_short_step_and_a_step_that_computed_for_half_of_its_time_are_not_logged(
    threads: Threads,
    waits: CoreWait,
    caplog: pytest.LogCaptureFixture,
    step_s: float,
    delay_s: float,
) -> None:
    threads.step(waits, step_s, t2=70.0 + delay_s)

    assert not caplog.messages


def test_steps_that_wait_are_logged_once_a_minute(
    threads: Threads, waits: CoreWait, caplog: pytest.LogCaptureFixture
) -> None:
    for num_steps in range(1, 23):
        threads.step(waits, 3.0, t2=70.0 + 2.9 * num_steps)

    counts = [text.partition("(")[2] for text in caplog.messages]
    assert counts == ["1 such steps so far)", "21 such steps so far)"]


def test_the_wait_of_a_thread_that_starts_within_the_step_is_counted(
    threads: Threads, waits: CoreWait, caplog: pytest.LogCaptureFixture
) -> None:
    threads.step(waits, 4.0, t3=3.0)

    assert "4.0 s, of which its threads waited 3.0 s" in caplog.text


def test_wait_times_are_not_read_in_every_short_step(
    threads: Threads, waits: CoreWait, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = itertools.count()

    def count(root: Path) -> dict[str, float]:
        next(reads)
        return run_delays(root)

    monkeypatch.setattr(core_wait, "run_delays", count)

    for _ in range(100):
        threads.step(waits, 0.025)

    assert next(reads) == 3


def test_a_kernel_without_wait_times_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    waits = CoreWait(root=tmp_path, clock=lambda: now_s[0])

    waits.begin()
    now_s[0] = 9.0
    waits.end()

    assert not caplog.messages


def test_wait_times_of_this_process_are_read() -> None:
    assert all(delay >= 0 for delay in run_delays().values())

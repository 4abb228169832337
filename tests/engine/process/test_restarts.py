"""Limits on process restarts, and the wait before each restart."""

import os
import time
from pathlib import Path

import pytest

from engine.process.restarts import MAX_WAIT_S, STABLE_S, RestartLimit, mark_ready


@pytest.fixture
def ready_file(tmp_path: Path) -> Path:
    return tmp_path / "ready"


def test_waits_double_up_to_a_limit_and_restarts_are_limited(ready_file: Path) -> None:
    limit = RestartLimit(ready_file, 9)
    waits = []
    for _ in range(10):
        mark_ready(ready_file)
        waits.append(limit.wait_s())

    assert waits == [0, 0.5, 1, 2, 4, 8, 16, MAX_WAIT_S, MAX_WAIT_S, None]


def test_a_long_lived_process_resets_the_restart_count(ready_file: Path) -> None:
    limit = RestartLimit(ready_file, 2)
    for _ in range(6):
        mark_ready(ready_file)
        limit.wait_s()
        mark_ready(ready_file)
        then = time.monotonic() - STABLE_S - 1
        os.utime(ready_file, (then, then))

        assert limit.wait_s() == 0


def test_a_failed_first_start_is_not_repeated_and_a_later_start_is(ready_file: Path) -> None:
    limit = RestartLimit(ready_file, 3, max_wait_s=0)
    assert limit.wait_s() is None

    mark_ready(ready_file)
    assert limit.wait_s() == 0
    # A process that was killed during its restart is started again; a process with an invalid
    # setting is not.
    assert limit.wait_s() == 0
    assert limit.wait_s(is_misconfigured=True) is None


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_jump_of_the_wall_clock_does_not_reset_the_restart_count(
    ready_file: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    limit = RestartLimit(ready_file, 2)
    mark_ready(ready_file)
    wall_clock = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() + step_s)

    limit.wait_s()
    mark_ready(ready_file)
    limit.wait_s()

    assert limit.in_a_row == 2

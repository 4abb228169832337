"""Limits on process restarts, and the wait before each restart."""

import time

import pytest

from engine.process.restarts import MAX_WAIT_S, STABLE_S, RestartLimit, mark_ready


def test_waits_double_up_to_a_limit_and_restarts_are_limited() -> None:
    limit = RestartLimit(9)
    waits = []
    for _ in range(10):
        mark_ready(limit.ready_fd)
        waits.append(limit.wait_s())

    assert waits == [0, 0.5, 1, 2, 4, 8, 16, MAX_WAIT_S, MAX_WAIT_S, None]


def test_a_long_lived_process_resets_the_restart_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = RestartLimit(2)
    clock, skipped_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + skipped_s)
    for _ in range(6):
        mark_ready(limit.ready_fd)
        limit.wait_s()
        mark_ready(limit.ready_fd)
        skipped_s += STABLE_S + 1
        # A ready process that reports again is not younger.
        mark_ready(limit.ready_fd)

        assert limit.wait_s() == 0


def test_a_failed_first_start_is_not_repeated_and_a_later_start_is() -> None:
    limit = RestartLimit(3, max_wait_s=0)
    assert limit.wait_s() is None

    mark_ready(limit.ready_fd)
    assert limit.wait_s() == 0
    # A process that was killed during its restart is started again.
    assert limit.wait_s() == 0


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_jump_of_the_wall_clock_does_not_reset_the_restart_count(
    monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    limit = RestartLimit(2)
    mark_ready(limit.ready_fd)
    wall_clock = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() + step_s)

    limit.wait_s()
    mark_ready(limit.ready_fd)
    limit.wait_s()

    assert limit.in_a_row == 2

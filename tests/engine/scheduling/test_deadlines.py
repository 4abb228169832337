"""engine/scheduling/deadlines.py: finds the next deadline without scanning all requests."""

import time

from delays import machine_s

from engine.scheduling.deadlines import MIN_COMPACTION, Deadlines


def test_passed_deadlines_are_returned_in_order() -> None:
    deadlines = Deadlines()
    for key, deadline_s in [(1, 3.0), (2, 1.0), (3, 2.0), (4, 9.0)]:
        deadlines.add(key, deadline_s, {1, 2, 3, 4}, 4)

    assert deadlines.take_passed(0.5) == []
    assert deadlines.take_passed(3.0) == [2, 3, 1]
    assert len(deadlines) == 1


def test_deadlines_of_ended_requests_are_removed() -> None:
    deadlines = Deadlines()
    for key in range(10_000):
        deadlines.add(key, 1e9 - key, {key}, 1)

    assert len(deadlines) <= MIN_COMPACTION + 2
    assert deadlines.take_passed(1e9)[0] == 9999


def test_ten_thousand_waiting_requests_do_not_slow_a_deadline_check() -> None:
    deadlines = Deadlines()
    keys = set(range(10_000))
    for key in keys:
        deadlines.add(key, 1e9 + key, keys, len(keys))

    start_s = time.thread_time()
    for _ in range(1000):
        assert deadlines.take_passed(0.0) == []

    # Scanning all requests takes at least 0.3 s.
    assert time.thread_time() - start_s < machine_s(0.1)

"""engine/scheduling/waiting_queue.py: the waiting line."""

import time

from slow_model import raw

from config.params.sampling import SamplingParams
from engine.request import ModelLimits, Request
from engine.scheduling.waiting_queue import WaitingQueue
from engine.transport.messages import AddRequest

LIMITS = ModelLimits(100, 100, frozenset())


def make(key: int, rank: tuple[int, int], num_tokens: int = 2) -> Request:
    return Request(
        AddRequest(key, raw([1] * num_tokens), SamplingParams()),
        [],
        seed=0,
        priority_key=rank,
        limits=LIMITS,
        arrived_at=0.0,
    )


def leave_in_order(line: WaitingQueue) -> list[int]:
    keys = []
    while (request := line.peek()) is not None:
        line.remove(request)
        keys.append(request.key)
    return keys


def test_what_is_set_aside_is_passed_and_counted_until_it_is_restored() -> None:
    line = WaitingQueue()
    for key in range(5):
        line.add(make(key, (0, key)))
    for _ in range(2):
        first = line.peek()
        assert first is not None
        line.set_aside(first)
    gone = make(0, (0, 0))
    line.remove(gone)

    second = line.peek()

    assert second is not None and second.key == 2
    assert (len(line), line.num_tokens) == (4, 8)
    line.restore()
    assert leave_in_order(line) == [1, 2, 3, 4]
    assert (len(line), line.num_tokens) == (0, 0)


def test_what_is_set_aside_stays_so_when_the_heap_is_rebuilt() -> None:
    line = WaitingQueue()
    requests = [make(key, (0, key)) for key in range(300)]
    for request in requests:
        line.add(request)
    line.set_aside(requests[0])
    for request in requests[2:]:
        line.remove(request)

    assert len(line) == 2
    assert [line.peek(), len(line._heap) < 300] == [requests[1], True]
    line.restore()
    assert leave_in_order(line) == [0, 1]


def test_who_has_the_smallest_rank_is_first() -> None:
    line = WaitingQueue()
    for key, rank in [(1, (0, 1)), (2, (-5, 2)), (3, (0, 0)), (4, (7, 3))]:
        line.add(make(key, rank))

    assert leave_in_order(line) == [2, 3, 1, 4]


def test_who_comes_back_stands_before_those_who_came_later() -> None:
    line = WaitingQueue()
    old = make(1, (0, 0))
    line.add(old)
    line.add(make(2, (0, 1)))
    line.remove(old)

    line.add(old)

    assert leave_in_order(line) == [1, 2]


def test_leaving_from_the_middle_leaves_nothing_behind() -> None:
    line = WaitingQueue()
    requests = [make(key, (0, key), num_tokens=3) for key in range(1000)]
    for request in requests:
        line.add(request)

    for request in requests[10:]:
        line.remove(request)

    assert (len(line), line.num_tokens) == (10, 30)
    assert len(line._heap) < 200
    assert leave_in_order(line) == list(range(10))


def test_a_long_line_does_not_slow_a_change() -> None:
    line = WaitingQueue()
    requests = [make(key, (0, key)) for key in range(20_000)]
    for request in requests:
        line.add(request)

    start = time.perf_counter()
    for request in requests[::2]:
        line.remove(request)
        line.peek()
    seconds = time.perf_counter() - start

    assert seconds < 1.0, f"10000 changes took {seconds:.2f} s"


def test_the_oldest_is_who_was_added_first_whatever_the_priority() -> None:
    line = WaitingQueue()
    first, urgent = make(1, (5, 0)), make(2, (-5, 1))
    assert line.oldest() is None
    line.add(first)
    line.add(urgent)

    assert line.peek() is urgent
    assert line.oldest() is first
    line.remove(first)
    assert line.oldest() is urgent

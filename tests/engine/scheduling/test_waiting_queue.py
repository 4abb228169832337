"""engine/scheduling/waiting_queue.py: order, removal, and skipped requests."""

import time

from delays import machine_s
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


def test_skipped_requests_are_passed_over_until_unskipped() -> None:
    line = WaitingQueue()
    for key in range(5):
        line.add(make(key, (0, key)))
    for _ in range(2):
        first = line.peek()
        assert first is not None
        line.skip(first)
    gone = make(0, (0, 0))
    line.remove(gone)

    second = line.peek()

    assert second is not None and second.key == 2
    assert (len(line), line.num_tokens) == (4, 8)
    line.unskip()
    assert leave_in_order(line) == [1, 2, 3, 4]
    assert (len(line), line.num_tokens) == (0, 0)


def test_skipped_requests_stay_skipped_when_the_heap_is_rebuilt() -> None:
    line = WaitingQueue()
    requests = [make(key, (0, key)) for key in range(300)]
    for request in requests:
        line.add(request)
    line.skip(requests[0])
    for request in requests[2:]:
        line.remove(request)

    assert len(line) == 2
    assert [line.peek(), len(line._heap) < 300] == [requests[1], True]
    line.unskip()
    assert leave_in_order(line) == [0, 1]


def test_the_request_with_the_smallest_rank_is_first() -> None:
    line = WaitingQueue()
    for key, rank in [(1, (0, 1)), (2, (-5, 2)), (3, (0, 0)), (4, (7, 3))]:
        line.add(make(key, rank))

    assert leave_in_order(line) == [2, 3, 1, 4]


def test_a_returning_request_precedes_later_arrivals() -> None:
    line = WaitingQueue()
    old = make(1, (0, 0))
    line.add(old)
    line.add(make(2, (0, 1)))
    line.remove(old)

    line.add(old)

    assert leave_in_order(line) == [1, 2]


def test_removal_from_the_middle_leaves_no_entry() -> None:
    line = WaitingQueue()
    requests = [make(key, (0, key), num_tokens=3) for key in range(1000)]
    for request in requests:
        line.add(request)

    for request in requests[10:]:
        line.remove(request)

    assert (len(line), line.num_tokens) == (10, 30)
    assert len(line._heap) < 200
    assert leave_in_order(line) == list(range(10))


def test_a_long_queue_does_not_slow_changes() -> None:
    line = WaitingQueue()
    requests = [make(key, (0, key)) for key in range(20_000)]
    for request in requests:
        line.add(request)

    start = time.thread_time()
    for request in requests[::2]:
        line.remove(request)
        line.peek()
    seconds = time.thread_time() - start

    assert seconds < machine_s(1.0), f"10000 changes took {seconds:.2f} s"


def test_oldest_returns_the_first_added_request_at_any_priority() -> None:
    line = WaitingQueue()
    first, urgent = make(1, (5, 0)), make(2, (-5, 1))
    assert line.oldest() is None
    line.add(first)
    line.add(urgent)

    assert line.peek() is urgent
    assert line.oldest() is first
    line.remove(first)
    assert line.oldest() is urgent

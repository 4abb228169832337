"""engine/scheduling/fair_queue.py: tenants take turns by the number of tokens that they were
served."""

import random
import time

from slow_model import raw

from config.params.sampling import SamplingParams
from engine.request import ModelLimits, Request
from engine.scheduling.fair_queue import FairQueue, tenant_label
from engine.scheduling.waiting_queue import WaitingQueue
from engine.transport.messages import AddRequest

LIMITS = ModelLimits(10_000, 100, frozenset())
A, B, C = 11 << 28, 22 << 28, 33 << 28


class Arrivals:
    """Factory of requests, which counts their arrivals."""

    def __init__(self) -> None:
        self.count = 0

    def make(
        self,
        tenant: int,
        *,
        priority: int = 0,
        num_tokens: int = 10,
        max_tokens: int = 10,
        is_continuation: bool = False,
    ) -> Request:
        self.count += 1
        message = AddRequest(
            self.count,
            raw([1] * num_tokens),
            SamplingParams(max_tokens=max_tokens),
            is_continuation=is_continuation,
            tenant=tenant,
        )
        return Request(
            message,
            [],
            seed=0,
            priority_key=(priority, -1 if is_continuation else self.count),
            limits=LIMITS,
            arrived_at=0.0,
        )


def serve(queue: FairQueue, num_output: int = 10) -> Request | None:
    """Start and finish the next request."""
    request = queue.peek()
    if request is not None:
        queue.remove(request)
        queue.start(request, 0)
        request.num_tokens += num_output
        queue.finish(request)
    return request


def test_a_new_tenant_is_served_before_ten_thousand_requests_of_another_tenant() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    for _ in range(10_000):
        queue.add(arrivals.make(A))
    for _ in range(5):
        serve(queue)
    newcomers = [arrivals.make(B) for _ in range(3)]
    for request in newcomers:
        queue.add(request)

    order = [request.tenant for _ in range(8) if (request := serve(queue)) is not None]

    assert order.index(B) <= 1
    assert order.count(B) == 3


def test_fair_shares_are_measured_in_tokens_instead_of_requests() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    for _ in range(200):
        queue.add(arrivals.make(A, num_tokens=90))
        queue.add(arrivals.make(B, num_tokens=10))
    tokens = {A: 0, B: 0}

    for _ in range(120):
        request = serve(queue)
        assert request is not None
        tokens[request.tenant] += request.num_tokens

    assert abs(tokens[A] - tokens[B]) <= 2 * 100
    assert queue.served == {tenant_label(tenant): count for tenant, count in tokens.items()}


def test_output_tokens_are_charged_when_a_request_ends() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    for _ in range(400):
        queue.add(arrivals.make(A, max_tokens=5000))
        queue.add(arrivals.make(B, max_tokens=5000))
    tokens = {A: 0, B: 0}

    for _ in range(200):
        request = queue.peek()
        assert request is not None
        served = serve(queue, num_output=500 if request.tenant == A else 5)
        assert served is not None
        tokens[served.tenant] += served.num_tokens

    assert abs(tokens[A] - tokens[B]) <= 1100


def test_priority_takes_precedence_over_fair_shares() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    for priority in (5, 0, -5):
        for _ in range(2):
            queue.add(arrivals.make(A, priority=priority))
    queue.add(arrivals.make(B))

    order = [
        (request.priority_key[0], request.tenant) for _ in range(7) if (request := serve(queue))
    ]

    assert [priority for priority, _ in order] == [-5, -5, 0, 0, 0, 5, 5]
    assert order[2] == (0, B)


def test_an_idle_tenant_gains_no_credit() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    queue.add(arrivals.make(B))
    serve(queue)
    for _ in range(100):
        queue.add(arrivals.make(A))
    for _ in range(50):
        serve(queue)
    for _ in range(50):
        queue.add(arrivals.make(B))

    order = [request.tenant for _ in range(20) if (request := serve(queue)) is not None]

    assert 9 <= order.count(A) <= 11


def test_requests_of_a_tenant_run_in_arrival_order() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    requests = [arrivals.make(A) for _ in range(50)]
    for request in requests:
        queue.add(request)

    assert [serve(queue) for _ in range(51)] == [*requests, None]


def test_continuations_run_first_for_their_tenant_and_are_charged() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    queue.add(arrivals.make(B))
    queue.add(arrivals.make(A))
    beam = arrivals.make(A, is_continuation=True)
    queue.add(beam)

    first = serve(queue)
    second = serve(queue)

    assert first is beam
    assert second is not None and second.tenant == B
    assert queue.served[tenant_label(A)] == 20


def test_continuations_of_a_tenant_do_not_block_another_tenant() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    for _ in range(1_000):
        queue.add(arrivals.make(A, is_continuation=True))
    for _ in range(5):
        serve(queue)
    queue.add(arrivals.make(B))

    order = [request.tenant for _ in range(3) if (request := serve(queue)) is not None]

    assert B in order


def test_a_preempted_request_runs_first_for_its_tenant_and_is_not_charged_again() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    requests = [arrivals.make(A) for _ in range(3)]
    for request in requests:
        queue.add(request)
    started = queue.peek()
    assert started is requests[0]
    queue.remove(started)
    queue.start(started, 0)
    served = queue.served.copy()

    queue.add(started)

    assert queue.peek() is started
    queue.remove(started)
    queue.start(started, 0)
    assert queue.served == served


def test_requests_that_start_later_have_larger_priority_keys() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    first, second, other = arrivals.make(A), arrivals.make(A), arrivals.make(B)
    for request in (first, second, other):
        queue.add(request)

    started = []
    for _ in range(3):
        request = queue.peek()
        assert request is not None
        queue.remove(request)
        queue.start(request, 0)
        started.append(request)

    assert started == [first, other, second]
    assert [r.priority_key for r in started] == sorted(r.priority_key for r in started)


def test_random_traffic_leaves_no_state() -> None:
    rng = random.Random(3)
    queue, arrivals = FairQueue(by_share=True), Arrivals()
    waiting: list[Request] = []
    for _ in range(5000):
        action = rng.random()
        if action < 0.5:
            request = arrivals.make(rng.randrange(20), priority=rng.choice((-1, 0, 0, 3)))
            waiting.append(request)
            queue.add(request)
        elif action < 0.75 and waiting:
            queue.remove(waiting.pop(rng.randrange(len(waiting))))
        elif (request := queue.peek()) is not None:
            lowest = min(request.priority_key[0] for request in waiting)
            assert request.priority_key[0] == lowest
            waiting.remove(request)
            served = serve(queue)
            assert served is request
        assert len(queue) == len(waiting)
        assert queue.num_tokens == sum(request.num_tokens for request in waiting)
        assert queue.shares is not None
        assert sum(queue.shares.values()) == queue.num_tokens

    for request in waiting:
        queue.remove(request)
    assert (queue.peek(), queue.num_waiting_tenants, queue.shares) == (None, 0, {})


def test_ten_thousand_waiting_requests_do_not_slow_a_change() -> None:
    arrivals = Arrivals()

    def seconds_of(queue: WaitingQueue) -> float:
        start_s = time.thread_time()
        for _ in range(1000):
            request = arrivals.make(C)
            queue.add(request)
            queue.remove(request)
        return time.thread_time() - start_s

    full = FairQueue()
    for number in range(10_000):
        full.add(arrivals.make(number % 100))

    assert seconds_of(full) < 10 * seconds_of(FairQueue()) + 0.05


def test_output_tokens_of_a_running_request_are_charged_before_its_end() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    for tenant, num_tokens in ((A, 10), (B, 500)):
        queue.add(arrivals.make(tenant, num_tokens=num_tokens, max_tokens=5_000))
    serve(queue)
    serve(queue)
    running = arrivals.make(A, max_tokens=5_000)
    queue.add(running)
    queue.remove(running)
    queue.start(running, 0)
    for tenant in (A, B):
        queue.add(arrivals.make(tenant))
    before = queue.peek()

    running.num_tokens += 2_000
    queue.progress(running)

    assert before is not None and before.tenant == A
    after = queue.peek()
    assert after is not None and after.tenant == B
    running.num_tokens += 10
    queue.finish(running)
    assert queue.served[tenant_label(A)] == 10 + 10 + 10 + 2_010

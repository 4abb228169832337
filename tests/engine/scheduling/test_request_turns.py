"""engine/scheduling/request_turns.py: requests with several texts take turns."""

import random

from pooling_core import PoolingRig
from slow_model import raw

from config.params.pooling import PoolingParams
from config.params.sampling import SamplingParams
from engine.scheduling.pooling_scheduler import PoolingScheduler
from engine.transport.messages import AddRequest

FLOOD, OTHER = 1, 1_000
A, B = 11 << 28, 22 << 28


def add(
    rig: PoolingRig, group: int, count: int, *, priority: int = 0, tenant: int = 0, first: int = 0
) -> None:
    """Add texts of a request; the text with index i has the key `group + i`."""
    for key in range(group + first, group + first + count):
        message = AddRequest(
            key,
            raw([20]),
            SamplingParams(),
            priority=priority,
            pooling=PoolingParams(),
            tenant=tenant,
            group=0 if key == group else group,
        )
        rig.send(message)


def done_within(rig: PoolingRig, num_steps: int) -> list[int]:
    """Keys of the texts whose vectors arrive in the next steps, in order of arrival."""
    before = len(rig.vectors)
    for _ in range(num_steps):
        rig.step()
    return list(rig.vectors)[before:]


def test_a_text_of_another_request_starts_in_the_next_step() -> None:
    rig = PoolingRig()
    add(rig, FLOOD, 80)
    done_within(rig, 3)
    add(rig, OTHER, 1)

    # Three steps, because two steps are in flight at a time.
    assert OTHER in done_within(rig, 3)


def test_requests_of_many_texts_have_equal_shares() -> None:
    rig = PoolingRig()
    add(rig, FLOOD, 40)
    add(rig, OTHER, 40)

    done = done_within(rig, 9)

    from_flood = [key for key in done if key < OTHER]
    assert from_flood == list(range(FLOOD, FLOOD + 16))
    assert len(done) == 32


def test_a_request_with_many_texts_progresses_while_others_arrive() -> None:
    rig = PoolingRig()
    add(rig, FLOOD, 20)

    for number in range(80):
        for place in range(4):
            add(rig, OTHER + 4 * number + place, 1)
        rig.step()

    assert sum(key < OTHER for key in rig.vectors) == 20
    assert len(rig.vectors) - 20 >= 280


def test_later_texts_of_a_request_queue_after_its_waiting_texts() -> None:
    rig = PoolingRig()
    add(rig, FLOOD, 10)
    add(rig, OTHER, 10)
    add(rig, FLOOD, 10, first=10)

    rig.run()

    assert [key for key in rig.vectors if key < OTHER] == list(range(FLOOD, FLOOD + 20))
    assert list(rig.vectors).index(OTHER + 9) < 20


def test_priority_takes_precedence_over_turns() -> None:
    rig = PoolingRig(policy="priority")
    add(rig, FLOOD, 10)
    add(rig, OTHER, 8, priority=-1)

    rig.run()

    assert list(rig.vectors)[:8] == list(range(OTHER, OTHER + 8))


def test_requests_of_a_tenant_take_turns_in_its_share() -> None:
    rig = PoolingRig(fair_share=True)
    add(rig, FLOOD, 60, tenant=A)
    add(rig, 2_000, 60, tenant=B)
    done_within(rig, 4)
    add(rig, OTHER, 1, tenant=A)

    assert OTHER in done_within(rig, 3)


def test_texts_that_finish_in_any_order_leave_no_state() -> None:
    chance = random.Random(5)
    rig = PoolingRig(fair_share=True, policy="priority")
    for number in range(40):
        count = chance.choice((1, 1, 2, 12))
        group = 100 * number + 1
        add(rig, group, count, priority=chance.choice((0, 1)), tenant=chance.choice((A, B)))
        if chance.random() < 0.4:
            rig.core.abort(range(group, group + chance.randint(1, count)))
        if chance.random() < 0.5:
            rig.step()

    rig.run()

    scheduler = rig.core._scheduler
    assert isinstance(scheduler, PoolingScheduler)
    assert scheduler._turns._rounds == {}

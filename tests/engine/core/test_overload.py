"""Deadlines, fair shares and a front end that leaves, in a whole engine. The rig's clock advances
by a millisecond at each read, and the rig checks after each step that no block is lost."""

import random

import pytest
from core_rig import CoreRig, CoreSettings

from engine.transport.messages import FRONT_END_SHIFT

SOON_S, LATE_S = 0.02, 1e6
A, B = 3, 4


def is_timeout(rig: CoreRig, key: int) -> bool:
    finish = rig.ledger.requests[key].finish
    return finish is not None and finish.is_timeout


def test_a_deadline_ends_a_waiting_request() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1))
    rig.add(1, [1, 2, 3], max_tokens=50, ignore_eos=True)
    rig.add(2, [4, 5, 6], max_tokens=5, timeout_s=SOON_S)
    rig.add(3, [7, 8, 9], max_tokens=5, timeout_s=LATE_S)

    rig.run()

    assert is_timeout(rig, 2)
    assert rig.error(2) == "it waited to be scheduled"
    assert rig.tokens(2) == []
    rig.check_output(1)
    rig.check_output(3)


def test_a_deadline_ends_a_running_request_and_frees_its_blocks() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=4))
    rig.add(1, [1, 2, 3], max_tokens=50, ignore_eos=True, timeout_s=SOON_S)
    rig.add(2, [4, 5, 6], max_tokens=50, ignore_eos=True)

    rig.run()

    assert is_timeout(rig, 1)
    count = len(rig.tokens(1))
    assert 0 < count < 50
    assert rig.error(1) == f"{count} output tokens were generated"
    assert rig.tokens(1) == rig.expected(1)[0][:count]
    rig.check_output(2)
    assert rig.core.stats().blocks_used == 0


def test_an_engine_without_deadlines_reads_the_clock_less_often() -> None:
    rig, with_deadline = CoreRig(), CoreRig()
    for item, timeout_s in ((rig, 0.0), (with_deadline, LATE_S)):
        item.add(1, [1, 2, 3], max_tokens=20, ignore_eos=True, timeout_s=timeout_s)
        item.run()

    assert rig.now < with_deadline.now


@pytest.mark.parametrize("seed", range(5))
def test_random_deadlines_and_aborts_lose_no_block(seed: int) -> None:
    rng = random.Random(seed)
    rig = CoreRig(CoreSettings(num_blocks=24, max_num_seqs=3, budget=8, fair_share=seed % 2 == 1))
    for key in range(60):
        rig.add(
            key,
            [rng.randrange(50) for _ in range(rng.randrange(1, 20))],
            max_tokens=rng.randrange(1, 20),
            timeout_s=rng.choice((0.0, rng.uniform(0.001, 0.3))),
            tenant=rng.randrange(3),
        )
        for _ in range(rng.randrange(3)):
            rig.step()
        if rng.random() < 0.1:
            rig.abort(rng.randrange(key + 1))

    rig.run()

    ended = [key for key in range(60) if is_timeout(rig, key)]
    assert ended
    for key in set(range(60)) - set(ended):
        rig.check_output(key)


def first_steps(rig: CoreRig, keys: list[int]) -> dict[int, int]:
    """Step of each request's first token."""
    found: dict[int, int] = {}
    while rig.core.has_work:
        rig.step()
        for key in keys:
            if key not in found and rig.tokens(key):
                found[key] = rig.steps
    return found


def flooded(*, fair_share: bool) -> dict[int, int]:
    rig = CoreRig(
        CoreSettings(max_num_seqs=2, num_blocks=64, fair_share=fair_share, max_queue_len=20_000)
    )
    for key in range(300):
        rig.add(key, [key % 50, 1, 2], max_tokens=3, ignore_eos=True, tenant=A)
    for _ in range(20):
        rig.step()
    for key in (1000, 1001):
        rig.add(key, [5, 6, 7], max_tokens=3, ignore_eos=True, tenant=B)
    found = first_steps(rig, [*range(300), 1000, 1001])
    for key in found:
        rig.check_output(key)
    return found


def test_a_new_key_is_served_before_the_flood_of_another_key() -> None:
    fair, unfair = flooded(fair_share=True), flooded(fair_share=False)

    assert max(fair[1000], fair[1001]) < 40
    assert min(unfair[1000], unfair[1001]) > max(unfair[key] for key in range(300))


def test_the_tokens_of_each_key_are_reported() -> None:
    rig = CoreRig(CoreSettings(fair_share=True, max_num_seqs=1, prefix_caching=False))
    rig.add(1, [1, 2, 3], max_tokens=4, ignore_eos=True, tenant=0x0A5 << 48)
    rig.add(2, [4, 5, 6], max_tokens=4, ignore_eos=True)
    rig.step()
    assert rig.core.stats().waiting_tenants >= 1

    rig.run()

    assert rig.core.stats().tenant_tokens == {"0a500000": 7, "none": 7}
    assert rig.core.stats().waiting_tenants == 0


def test_the_rate_and_the_shares_of_the_queue_are_reported() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1, max_ttft_s=5.0))
    for key, tenant in ((1, A), (2, A), (3, B)):
        rig.add(key, [1, 2, 3], max_tokens=4, ignore_eos=True, tenant=tenant)
    rig.step()
    rig.step()

    stats = rig.core.stats()

    assert sorted(stats.waiting_shares) == [(0, A, 3), (0, B, 3)]
    assert stats.prefill_tokens_per_s > 0
    rig.run()
    assert rig.core.stats().waiting_shares == []


def test_requests_of_a_lost_front_end_are_freed() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=2))
    gone, stays = 1 << FRONT_END_SHIFT, 2 << FRONT_END_SHIFT
    for key in (gone + 1, stays + 1, gone + 2, stays + 2):
        rig.add(key, [1, 2, 3], max_tokens=10, ignore_eos=True)
    for _ in range(4):
        rig.step()

    count = rig.core.remove_front_end(1)

    assert count == 2
    for key in (gone + 1, gone + 2):
        rig.ledger.abort(key)
    while rig.core.has_work:
        assert {front_end for front_end, _ in rig.step()} <= {2}
    for key in (stays + 1, stays + 2):
        rig.check_output(key)
    assert rig.core.stats().blocks_used == 0

"""engine/scheduling/scheduler.py: which requests run in which step, read from the plans of a real
core."""

import itertools
import random
from functools import partial

import pytest
from core_rig import CoreRig, CoreSettings

from config.log import LimitedWarning
from engine.request import RUNNING
from engine.scheduling.scheduler import YIELD_STEPS
from hpu.protocol import DECODE, PREFILL, StepPlan

ENDLESS = {"ignore_eos": True, "max_tokens": None}


def launched(plan: StepPlan, phase: int) -> list[int]:
    return sorted(
        row for launch in plan.launches if launch.phase == phase for row in launch.req_indices
    )


def prefilled(plan: StepPlan) -> int:
    return sum(sum(launch.query_lens) for launch in plan.launches if launch.phase == PREFILL)


def test_decodes_continue_while_a_long_prompt_is_chunked() -> None:
    rig = CoreRig(CoreSettings(budget=8, max_num_seqs=4))
    for key in range(3):
        rig.add(key, [key, 1], **ENDLESS)
    rig.run(steps=3)
    rig.add(9, list(range(40)), max_tokens=1, ignore_eos=True)

    rig.run(steps=12)

    with_chunks = [
        plan for plan in rig.plans if plan.launches and prefilled(plan) and plan.step > 0
    ]
    assert len(with_chunks) >= 40 // 5
    assert all(len(launched(plan, DECODE)) == 3 for plan in with_chunks)
    assert rig.reason(9) == "length"


def test_no_step_exceeds_its_token_budget() -> None:
    rig = CoreRig(CoreSettings(budget=7, max_num_seqs=5))
    for key in range(8):
        rig.add(key, list(range(1 + 5 * key)), max_tokens=5)

    rig.run()

    for plan in rig.plans:
        assert prefilled(plan) + len(launched(plan, DECODE)) <= 7


def test_drafts_are_counted_in_the_token_budget_of_a_step() -> None:
    rig = CoreRig(CoreSettings(budget=24, max_num_seqs=5, max_tokens_per_step=4, max_model_len=100))
    for key in range(4):
        rig.add(key, [key, 1], **ENDLESS)
    rig.run(steps=3)
    rig.add(9, list(range(40)), max_tokens=1, ignore_eos=True)

    rig.run(steps=8)

    with_both = [plan for plan in rig.plans if prefilled(plan) and launched(plan, DECODE)]
    assert [(len(launched(plan, DECODE)), prefilled(plan)) for plan in with_both] == [(4, 8)] * 5


def test_drafts_above_the_token_budget_leave_prompts_one_block_and_log_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = CoreRig(CoreSettings(budget=14, max_num_seqs=5, max_tokens_per_step=4, max_model_len=100))
    for key in range(4):
        rig.add(key, [key, 1], **ENDLESS)
    rig.run(steps=4)
    rig.add(9, list(range(40)), max_tokens=1, ignore_eos=True)

    rig.run(steps=13)

    with_both = [plan for plan in rig.plans if prefilled(plan) and len(launched(plan, DECODE)) == 4]
    assert [prefilled(plan) for plan in with_both] == [4] * 10
    assert rig.reason(9) == "length"
    (warning,) = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert warning == (
        "5 decodes of 4 tokens, with their drafts, need 20 tokens in a step, "
        "max_num_batched_tokens is 14: a step with all of them computes at most 4 prompt "
        "tokens; set --max-num-batched-tokens above 20"
    )


def test_no_budget_warning_is_logged_without_drafts_or_if_drafts_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    CoreRig(CoreSettings(budget=5, max_num_seqs=5))
    CoreRig(CoreSettings(budget=20, max_num_seqs=5, max_tokens_per_step=4))

    assert not caplog.records


def test_the_queue_is_served_in_order_of_arrival() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1))
    for key in (5, 3, 9):
        rig.add(key, [key], max_tokens=1)

    rig.run()

    waits = [rig.ledger.requests[key].finish.queue_s for key in (5, 3, 9)]  # type: ignore[union-attr]
    assert waits == sorted(waits)


def test_a_smaller_priority_value_is_scheduled_first_under_the_priority_policy() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1, policy="priority", depth=1))
    rig.add(0, [1], max_tokens=1, priority=5)
    rig.add(1, [2], max_tokens=1, priority=-1)
    rig.add(2, [3], max_tokens=1, priority=5)

    rig.run()

    tokens_of_plans = [bytes(plan.new_requests[0].tokens)[0] for plan in rig.plans]
    assert tokens_of_plans == [2, 1, 3]


def test_fcfs_ignores_priority() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1, depth=1))
    rig.add(0, [1], max_tokens=1, priority=5)
    rig.add(1, [2], max_tokens=1, priority=-1)

    rig.run()

    assert [bytes(plan.new_requests[0].tokens)[0] for plan in rig.plans] == [1, 2]


def test_the_output_of_a_request_with_a_salt_is_private() -> None:
    rig = CoreRig(CoreSettings(depth=1))
    rig.add(0, [1], max_tokens=1, salt="mine")
    rig.add(1, [2], max_tokens=1)

    rig.run()

    new = {bytes(new.tokens)[0]: new for plan in rig.plans for new in plan.new_requests}
    assert new[1].is_private and not new[2].is_private


def test_blocks_are_allocated_only_as_they_are_needed() -> None:
    rig = CoreRig(CoreSettings(budget=8, depth=1))
    rig.add(0, list(range(20)), max_tokens=6, ignore_eos=True)

    used = []
    while rig.core.has_work:
        rig.step()
        used.append(rig.core.stats().blocks_used)

    # Three chunks (8, 8, 4) in blocks of 4, then one block at a time; the last token needs no slot.
    assert used == [2, 4, 5, 6, 6, 6, 6, 0]
    allocated = [len(new.blocks) for plan in rig.plans for new in plan.new_requests]
    assert sum(allocated) + sum(len(plan.grown_blocks) for plan in rig.plans) == 7


def test_the_newest_request_is_preempted_and_continues_where_it_was() -> None:
    rig = CoreRig(CoreSettings(num_blocks=10, max_num_seqs=3, budget=32))
    for key in range(3):
        rig.add(key, [key] * 8, max_tokens=14, ignore_eos=True)

    rig.run()

    given_way = [rig.ledger.requests[key].finish.num_preemptions for key in range(3)]  # type: ignore[union-attr]
    assert given_way[0] == 0
    assert given_way[2] >= given_way[1]
    assert sum(given_way) == rig.core.stats().preemptions > 0
    for key in range(3):
        rig.check_output(key)


def test_the_request_of_the_highest_priority_is_not_preempted() -> None:
    rig = CoreRig(CoreSettings(num_blocks=10, max_num_seqs=3, policy="priority"))
    rig.add(0, [1] * 8, max_tokens=20, ignore_eos=True, priority=9)
    rig.add(1, [2] * 8, max_tokens=20, ignore_eos=True, priority=0)
    rig.add(2, [3] * 8, max_tokens=20, ignore_eos=True, priority=5)

    rig.run()

    assert rig.core.stats().preemptions > 0
    assert rig.ledger.requests[1].finish.num_preemptions == 0  # type: ignore[union-attr]
    for key in range(3):
        rig.check_output(key)


def test_the_first_preemption_is_logged_with_advice_and_the_next_a_minute_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"now": 100.0}
    limited = partial(LimitedWarning, clock=lambda: times["now"])
    monkeypatch.setattr("engine.scheduling.scheduler.LimitedWarning", limited)
    rig = CoreRig(CoreSettings(num_blocks=8, max_num_seqs=2, prefix_caching=False))
    seen = []
    for after_s in (0, 30, 61):
        times["now"] += after_s
        first = 2 * len(seen)
        for key in (first, first + 1):
            rig.add(key, [key] * 8, max_tokens=20, ignore_eos=True)
        rig.run()
        seen.append(len(caplog.messages))

    assert seen == [1, 1, 2]
    # The form in vLLM's documents, for scripts that read the log.
    assert caplog.messages[0].startswith(
        "Sequence group 1 is preempted by PreemptionMode.RECOMPUTE mode because there is not "
        "enough KV cache space. This can affect the end-to-end performance. Increase "
        "gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory"
    )
    count = f"total_num_cumulative_preemption={rig.core.stats().preemptions}"
    assert caplog.messages[1].endswith(count)


def test_a_preempted_request_starts_with_an_empty_table_and_keeps_its_tokens() -> None:
    rig = CoreRig(CoreSettings(num_blocks=8, max_num_seqs=2, prefix_caching=False))
    rig.add(0, [1] * 8, max_tokens=20, ignore_eos=True)
    rig.add(1, [2] * 8, max_tokens=20, ignore_eos=True)

    rig.run()

    again = [new for plan in rig.plans for new in plan.new_requests][2:]
    assert again
    for new in again:
        known = len(new.tokens) // 4
        assert new.num_computed_tokens == 0
        assert new.num_prompt_tokens == 8 < known
        assert list(memoryview(new.tokens).cast("I")) == [2] * 8 + rig.tokens(1)[: known - 8]
    rig.check_output(1)


def test_a_plan_lists_each_grown_block_of_a_request_once() -> None:
    rig = CoreRig(CoreSettings(num_blocks=12, max_num_seqs=4, budget=12))
    for key in range(10):
        rig.add(key, list(range(key + 1)), max_tokens=9, ignore_eos=True)

    rig.run()

    for plan in rig.plans:
        assert len(plan.grown_requests) == len(plan.grown_blocks)
        pairs = list(zip(plan.grown_requests, plan.grown_blocks, strict=True))
        assert len(set(pairs)) == len(pairs)


def test_a_lone_request_that_outgrows_the_cache_fails_with_the_numbers() -> None:
    for depth in (1, 2):
        rig = CoreRig(CoreSettings(num_blocks=4, max_num_seqs=2, depth=depth))
        rig.add(0, [1] * 8, max_tokens=50, ignore_eos=True)

        rig.run()

        assert rig.reason(0) == "error"
        assert rig.error(0) == "the request needs 5 KV blocks of 4 tokens, the cache has 4"
        finish = rig.ledger.requests[0].finish
        assert finish is not None and finish.param == ""
        assert rig.tokens(0) == rig.expected(0)[0][:9]


def test_a_request_that_does_not_fit_waits_for_the_running_requests() -> None:
    rig = CoreRig(CoreSettings(num_blocks=8, max_num_seqs=2))
    rig.add(0, [1] * 16, max_tokens=4, ignore_eos=True)
    rig.add(1, [2] * 16, max_tokens=4, ignore_eos=True)

    rig.run()

    assert rig.core.stats().preemptions == 0
    assert rig.reason(0) == rig.reason(1) == "length"


def test_the_admission_watermark_keeps_blocks_for_running_requests() -> None:
    rig = CoreRig(CoreSettings(num_blocks=198, max_num_seqs=8, max_model_len=400, budget=400))
    rig.add(0, [1] * 396, max_tokens=4, ignore_eos=True)
    rig.add(1, [2] * 396, max_tokens=4, ignore_eos=True)

    rig.run(steps=2)

    # Each prompt takes 99 blocks: the second would fit, but leave no block for growth.
    assert rig.core.stats().running == 1
    rig.run()
    assert rig.core.stats().preemptions == 0


def test_an_index_is_reused_only_after_the_last_plan_that_names_it() -> None:
    rig = CoreRig(
        CoreSettings(max_num_seqs=2, depth=2), next_token=lambda history, generated, sampling: 2
    )
    for key in range(12):
        rig.add(key, [key + 1, 7], max_tokens=9)

    rig.run()

    # Every request ends with its first token, after the plan for its second token was sent.
    named: dict[int, int] = {}
    for plan in rig.plans:
        for row in plan.freed_requests:
            assert named[row] < rig.executor.collected_before[plan.step]
        named.update(dict.fromkeys((r for x in plan.launches for r in x.req_indices), plan.step))
    assert all(rig.tokens(key) == [2] for key in range(12))


def test_a_request_with_its_last_token_in_flight_is_not_preempted() -> None:
    rig = CoreRig(CoreSettings(num_blocks=6, max_num_seqs=2, depth=2))
    rig.add(0, [1] * 8, max_tokens=12, ignore_eos=True)
    rig.run(steps=4)
    rig.add(1, [2], max_tokens=5, ignore_eos=True)

    rig.run()

    # In step 8, request 1 takes the sixth block for its last token; in step 9, request 0 needs that
    # block.
    assert rig.plans[8].grown_requests == [rig.plans[4].new_requests[0].req_index]
    assert rig.core.stats().preemptions == 0
    assert [rig.reason(key) for key in (0, 1)] == ["length", "length"]


def test_no_request_is_admitted_before_a_long_prompt_has_its_blocks() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, budget=10, max_num_seqs=3))
    rig.add(0, [1] * 40, max_tokens=2, ignore_eos=True)
    rig.add(1, [2] * 28, max_tokens=2, ignore_eos=True)

    rig.run()

    # 10 and 7 blocks together exceed the cache, although most blocks are free at first.
    first = next(
        plan.step for plan in rig.plans if len(plan.launches[-1].req_indices) and plan.step > 3
    )
    second = [plan.step for plan in rig.plans if plan.new_requests]
    assert second[1] >= first
    assert rig.core.stats().preemptions == 0


def test_concurrent_equal_prompts_are_computed_once() -> None:
    for depth in (1, 2):
        rig = CoreRig(CoreSettings(depth=depth, budget=200, max_num_seqs=8))
        for key in range(8):
            rig.add(key, list(range(40)), max_tokens=4, seed=key, temperature=1.0, ignore_eos=True)

        rig.run()

        cached = [rig.ledger.requests[key].num_cached for key in range(8)]
        assert cached == [0] + [36] * 7
        assert sum(map(prefilled, rig.plans)) == 40 + 7 * 4


def test_a_request_that_waits_for_a_prefix_continues_if_its_producer_ends() -> None:
    for steps in range(6):
        rig = CoreRig(CoreSettings(budget=10))
        rig.add(0, list(range(40)), max_tokens=4, ignore_eos=True)
        rig.add(1, list(range(40)), max_tokens=4, ignore_eos=True)
        rig.run(steps=steps)

        rig.abort(0)
        rig.run()

        rig.check_output(1)


def test_a_suspect_starts_after_all_running_requests_have_tokens_and_blocks_admission() -> None:
    rig = CoreRig(CoreSettings(budget=8, max_num_seqs=8))
    rig.add(1, list(range(30)), **ENDLESS)
    rig.add(2, [1, 2], is_suspect=True, **ENDLESS)
    rig.add(3, [1, 3], is_suspect=True, **ENDLESS)
    rig.add(4, [1, 4], **ENDLESS)
    pending: list[list[int]] = []
    rig.run(steps=1)

    while not rig.tokens(4):
        rig.step()
        requests = rig.core._scheduler.requests_with_blocks
        pending.append([request.key for request in requests if request.has_no_output])

    assert [keys for keys, _ in itertools.groupby(pending) if keys] == [[1], [2], [3], [4]]


@pytest.mark.parametrize("seed", range(6))
def test_a_suspect_is_the_only_request_without_a_token_in_random_traffic(seed: int) -> None:
    rng = random.Random(seed)
    rig = CoreRig(
        CoreSettings(
            num_blocks=24,
            budget=rng.choice([8, 32]),
            depth=rng.choice([1, 2]),
            policy=rng.choice(["fcfs", "priority"]),
            fair_share=rng.random() < 0.5,
        )
    )
    keys = range(40)
    num_alone = 0
    for key in keys:
        prompt = [rng.randrange(5) for _ in range(rng.randint(1, 24))]
        rig.add(
            key,
            prompt,
            priority=rng.randrange(3),
            tenant=rng.randrange(3),
            is_suspect=rng.random() < 0.3,
            max_tokens=rng.randint(1, 12),
        )
        for _ in range(rng.randrange(4)):
            rig.step()
            requests = rig.core._scheduler.requests_with_blocks
            running = [request for request in requests if request.state == RUNNING]
            pending = [request.is_suspect for request in running if request.has_no_output]
            num_alone += pending == [True]
            assert True not in pending or len(pending) == 1

    rig.run()

    assert num_alone
    for key in keys:
        rig.check_output(key)


def first_steps(rig: CoreRig) -> dict[int, int]:
    """Step of the first output of each request."""
    result: dict[int, int] = {}
    while rig.core.has_work and rig.steps < 2_000:
        rig.step()
        for key in rig.asked:
            if rig.tokens(key):
                result.setdefault(key, rig.steps)
    return result


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_new_tenant_soon_runs_in_a_batch_filled_by_another_tenant(
    prefix_caching: bool,
) -> None:
    rig = CoreRig(
        CoreSettings(max_num_seqs=4, num_blocks=64, fair_share=True, prefix_caching=prefix_caching)
    )
    for key in range(6):
        rig.add(key, [key] * 4, tenant=11, max_tokens=50, ignore_eos=True)
    rig.run(steps=6)
    for key in range(6, 9):
        rig.add(key, [key] * 4, tenant=22, max_tokens=50, ignore_eos=True)

    arrived = rig.steps
    first = first_steps(rig)

    assert first[6] - arrived <= YIELD_STEPS + 4
    preempted = [rig.ledger.requests[key].finish.num_preemptions for key in range(9)]  # type: ignore[union-attr]
    assert preempted[:4] == [0, 0, 0, 1]
    assert sum(preempted) <= 3
    for key in range(9):
        rig.check_output(key)


def test_a_new_tenant_soon_gets_blocks_from_a_cache_filled_by_another_tenant() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=8, num_blocks=24, fair_share=True))
    for key in range(2):
        rig.add(key, [key] * 28, tenant=11, max_tokens=36, ignore_eos=True)
    rig.run(steps=6)
    rig.add(5, [5] * 36, tenant=22, max_tokens=2, ignore_eos=True)

    arrived = rig.steps
    first = first_steps(rig)

    assert first[5] - arrived <= 8
    for key in (0, 1, 5):
        rig.check_output(key)


@pytest.mark.parametrize(
    ("fair_share", "tenants", "priority"),
    [(False, (11, 22), 0), (True, (11, 11), 0), (True, (11, 22), 1), (True, (0, 1, 2, 3, 22), 0)],
    ids=["no fair share", "same tenant", "less urgent", "no share above one place"],
)
def test_a_full_batch_is_preempted_only_for_a_tenant_below_its_share(
    fair_share: bool, tenants: tuple[int, ...], priority: int
) -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=4, fair_share=fair_share, policy="priority"))
    *filling, newcomer = tenants
    for key in range(4):
        tenant = filling[key % len(filling)]
        rig.add(key, [key] * 4, tenant=tenant, max_tokens=40, ignore_eos=True)
    rig.run(steps=4)
    rig.add(9, [9] * 4, tenant=newcomer, priority=priority, max_tokens=2, ignore_eos=True)

    rig.run()

    assert rig.core.stats().preemptions == 0

"""engine/scheduling/scheduler.py: prompts that arrive together. A launch with a few of them is as
fast per token as a launch with all of them (`prefill_launch_tokens`)."""

from dataclasses import replace

import pytest
from core_rig import CoreRig, CoreSettings

from hpu.protocol import DECODE, PREFILL, StepPlan

BUDGET, LAUNCH, PROMPT = 64, 16, 8
ENDLESS = {"ignore_eos": True, "max_tokens": None}


BURST = CoreSettings(
    budget=BUDGET,
    max_num_seqs=32,
    max_prefill_batch=32,
    num_blocks=1024,
    max_model_len=128,
    prefill_launch_tokens=LAUNCH,
)


def burst(rig: CoreRig, keys: range, length: int = PROMPT, **sampling: object) -> None:
    for key in keys:
        rig.add(key, [key] * length, **{"max_tokens": 2, "ignore_eos": True, **sampling})


def num_prompt_tokens(plan: StepPlan) -> int:
    return sum(sum(launch.query_lens) for launch in plan.launches)


def num_decodes(plan: StepPlan) -> int:
    return sum(len(launch.req_indices) for launch in plan.launches if launch.phase == DECODE)


def first_tokens(plan: StepPlan) -> list[int]:
    """First token of each prompt that starts in a plan, which equals the request's key."""
    return [memoryview(new.tokens).cast("I")[0] for new in plan.new_requests]


def test_prompts_are_launched_in_arrival_order_in_small_groups() -> None:
    rig = CoreRig(BURST)
    burst(rig, range(16))

    rig.run()

    starts = [plan for plan in rig.plans if plan.new_requests]
    assert [first_tokens(plan) for plan in starts] == [[key, key + 1] for key in range(0, 16, 2)]
    for plan in starts:
        prefills = [launch for launch in plan.launches if launch.phase == PREFILL]
        assert [launch.bucket for launch in prefills] == [(2, PROMPT, 0)]
    for key in range(16):
        rig.check_output(key)


@pytest.mark.parametrize("depth", [1, 2])
def test_first_tokens_are_sent_when_their_own_launch_is_done(depth: int) -> None:
    rig = CoreRig(replace(BURST, depth=depth))
    burst(rig, range(8))

    answered = []
    while rig.core.has_work and len(answered) < 4:
        for _, message in rig.step():
            if message.keys:
                answered.append((message.keys, rig.executor.collected))

    assert answered == [([key, key + 1], 1 + key // 2) for key in range(0, 8, 2)]


def test_a_burst_decodes_once_for_each_budget_of_prompt_tokens() -> None:
    rig = CoreRig(BURST)
    burst(rig, range(3), **ENDLESS)
    rig.run(steps=3)
    before = len(rig.plans)
    burst(rig, range(3, 27))

    rig.run(steps=14)

    plans = rig.plans[before : before + 12]
    assert [num_prompt_tokens(plan) for plan in plans] == [LAUNCH] * 12
    # All requests that started earlier decode in every fourth step.
    assert [num_decodes(plan) for plan in plans] == [3, 0, 0, 0, 11, 0, 0, 0, 11, 0, 0, 0]


def test_running_requests_wait_for_no_more_prompt_tokens_than_a_step_may_have() -> None:
    rig = CoreRig(BURST)
    burst(rig, range(2), **ENDLESS)
    rig.run(steps=3)
    before = len(rig.plans)
    for key in range(2, 30):
        rig.add(key, [key] * (1 + 13 * key % 60), max_tokens=3, ignore_eos=True)

    rig.run(steps=40)

    waited = 0
    for plan in rig.plans[before:]:
        waited = num_prompt_tokens(plan) + (0 if num_decodes(plan) else waited)
        assert waited + num_decodes(plan) <= BUDGET
    for key in range(2, 30):
        rig.check_output(key)


def test_a_prompt_longer_than_the_launch_size_is_not_split() -> None:
    rig = CoreRig(BURST)
    burst(rig, range(3), length=40)

    rig.run()

    # The second prompt takes the rest of a step's budget.
    assert [num_prompt_tokens(plan) for plan in rig.plans[:4]] == [40, 24, 16, 40]


def test_prompts_that_do_not_fill_a_launch_delay_no_decode() -> None:
    rig = CoreRig(BURST)
    burst(rig, range(2), **ENDLESS)
    rig.run(steps=3)
    before = len(rig.plans)
    for key in range(2, 10):
        rig.add(key, [key] * PROMPT, max_tokens=1, ignore_eos=True)
        rig.run(steps=1)

    assert len(rig.plans) - before >= 8
    assert all(num_decodes(plan) == 2 for plan in rig.plans[before:])


def test_running_requests_decode_while_prompts_cannot_start() -> None:
    rig = CoreRig(replace(BURST, max_num_seqs=4, max_prefill_batch=4))
    burst(rig, range(8), max_tokens=12)

    rig.run()

    # Two steps fill the batch, and the remaining prompts delay no decode.
    assert [num_prompt_tokens(plan) for plan in rig.plans[:3]] == [LAUNCH, LAUNCH, 0]
    assert all(num_decodes(plan) == 4 for plan in rig.plans[2:12])
    for key in range(8):
        rig.check_output(key)


def test_without_a_launch_size_prompts_fill_the_token_budget() -> None:
    rig = CoreRig(replace(BURST, prefill_launch_tokens=0))
    burst(rig, range(16))

    rig.run()

    assert [first_tokens(plan) for plan in rig.plans[:2]] == [[*range(8)], [*range(8, 15)]]
    assert num_decodes(rig.plans[1]) == 8

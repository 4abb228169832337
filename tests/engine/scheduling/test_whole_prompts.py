"""WholePrompts: without chunked prefill, a step computes whole prompts only."""

import random

import pytest
from core_rig import CoreRig, CoreSettings

from hpu.protocol import DECODE, PREFILL, TOKEN_BYTES, StepPlan


def prefills(plan: StepPlan) -> list[tuple[int, int]]:
    """(request index, new tokens) of each prompt in the plan."""
    return [
        pair
        for launch in plan.launches
        if launch.phase == PREFILL
        for pair in zip(launch.req_indices, launch.query_lens, strict=True)
    ]


def decodes(plan: StepPlan) -> int:
    return sum(len(launch.req_indices) for launch in plan.launches if launch.phase == DECODE)


def test_the_longest_prompt_runs_whole_beside_decodes() -> None:
    rig = CoreRig(
        CoreSettings(budget=40, max_model_len=40, max_num_seqs=4, enable_chunked_prefill=False)
    )
    for key in range(3):
        rig.add(key, [key, 1], ignore_eos=True, max_tokens=None)
    rig.run(steps=3)
    rig.add(9, list(range(39)), max_tokens=1, ignore_eos=True)

    rig.run(steps=3)

    with_prompt = [plan for plan in rig.plans[1:] if prefills(plan)]
    assert [[count for _, count in prefills(plan)] for plan in with_prompt] == [[39]]
    assert decodes(with_prompt[0]) == 3
    assert rig.reason(9) == "length"


def test_an_unchunked_prompt_waits_for_a_step_with_room() -> None:
    rig = CoreRig(
        CoreSettings(budget=40, max_model_len=40, max_num_seqs=4, enable_chunked_prefill=False)
    )
    for key in range(3):
        rig.add(key, [key, *range(24)], max_tokens=1, ignore_eos=True)

    rig.run(steps=4)

    assert [sum(count for _, count in prefills(plan)) for plan in rig.plans[:3]] == [25] * 3


def test_a_prompt_with_a_cached_prefix_is_computed_in_one_chunk() -> None:
    rig = CoreRig(
        CoreSettings(
            budget=40, max_model_len=40, max_num_seqs=4, block_size=4, enable_chunked_prefill=False
        )
    )
    rig.add(1, list(range(30)), max_tokens=1, ignore_eos=True)
    rig.run(steps=3)
    rig.add(2, [*range(16), *range(40, 50)], max_tokens=1, ignore_eos=True)

    rig.run(steps=3)

    assert [count for plan in rig.plans for _, count in prefills(plan)] == [30, 10]


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_with_preemptions_has_no_chunk(seed: int) -> None:
    rng = random.Random(seed)
    rig = CoreRig(
        CoreSettings(
            budget=64,
            max_model_len=64,
            max_num_seqs=5,
            num_blocks=26,
            prefix_caching=seed % 2 == 0,
            enable_chunked_prefill=False,
            prefill_launch_tokens=16 * (seed // 2),
        )
    )
    lengths = {key: rng.randint(1, 50) for key in range(30)}
    for key, length in lengths.items():
        prompt = [rng.randrange(3) for _ in range(length)]
        rig.add(key, prompt, max_tokens=rng.choice([1, 5, 14]), ignore_eos=True)
        rig.run(steps=rng.randint(0, 3))

    rig.run()

    assert rig.core.stats().preemptions > 0
    for plan in rig.plans:
        # Each prefill belongs to a request that starts in this step, and covers all uncached
        # tokens.
        new = {request.req_index: request for request in plan.new_requests}
        for req_index, count in prefills(plan):
            request = new[req_index]
            assert count == request.tokens.nbytes // TOKEN_BYTES - request.num_computed_tokens
    for key in lengths:
        rig.check_output(key)

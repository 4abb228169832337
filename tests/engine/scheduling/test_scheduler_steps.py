"""--num-scheduler-steps: number of decodes of each request per step, read from plans and
messages."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from core_rig import CoreRig, CoreSettings
from tiny_models import EOS, VOCAB_SIZE, write_tokenizer

from config.params.structured_output import GrammarSpec
from engine.structured_output.grammar import Grammar, Vocabulary
from hpu.protocol import PREFILL, RequestSampling, StepPlan

ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": None}


FOUR_STEPS = CoreSettings(num_scheduler_steps=4)
EIGHT_STEPS = CoreSettings(num_scheduler_steps=8)


def rounds(plan: StepPlan) -> list[list[int]]:
    """Requests of each launch of a plan that contains only decodes."""
    assert all(launch.phase != PREFILL for launch in plan.launches)
    return [launch.req_indices for launch in plan.launches]


def test_the_tokens_of_all_decodes_of_a_step_are_sent_in_one_message() -> None:
    rig = CoreRig(FOUR_STEPS)
    for key in range(2):
        rig.add(key, [key, 1], **ENDLESS)
    rig.run(steps=3)
    first, second = rig.ledger.requests[0], rig.ledger.requests[1]
    before = len(first.tokens), len(second.tokens)

    (_, message), *others = rig.step()

    assert not others
    assert message.counts == [4, 4] and len(message.keys) == 2
    assert (len(first.tokens), len(second.tokens)) == (before[0] + 4, before[1] + 4)
    assert rounds(rig.plans[-1]) == [rig.plans[-1].launches[0].req_indices] * 4
    assert rig.plans[-1].decode_steps == 4


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 9])
def test_a_request_at_its_length_is_not_launched_in_the_rest_of_a_step(max_tokens: int) -> None:
    rig = CoreRig(FOUR_STEPS)
    rig.add(0, [1, 2], max_tokens=max_tokens, ignore_eos=True)
    rig.add(1, [3, 4], max_tokens=20, ignore_eos=True)

    rig.run()

    for key in range(2):
        rig.check_output(key)
    launches = [index for plan in rig.plans for x in plan.launches for index in x.req_indices]
    # Each request is launched once per token, the first time with its prompt; no launch is wasted.
    assert len(launches) == max_tokens + 20


def test_no_step_with_a_prompt_decodes_twice() -> None:
    rig = CoreRig(replace(FOUR_STEPS, budget=8))
    rig.add(0, [1, 2], **ENDLESS)
    rig.run(steps=3)
    rig.add(1, list(range(40)), max_tokens=1, ignore_eos=True)

    rig.run(steps=8)

    with_prompts = [p for p in rig.plans if any(x.phase == PREFILL for x in p.launches)]
    assert len(with_prompts) > 5
    assert {plan.decode_steps for plan in with_prompts} == {1}


def test_a_request_with_a_grammar_limits_the_step_to_a_single_decode(tmp_path: Any) -> None:
    write_tokenizer(tmp_path)
    vocabulary = Vocabulary(str(tmp_path), VOCAB_SIZE, frozenset([EOS]))
    form = GrammarSpec("regex", "[a-c]{9}")
    rig = CoreRig(replace(FOUR_STEPS, vocab_size=VOCAB_SIZE))
    rig.add(0, [1, 2], max_tokens=50, ignore_eos=True)
    rig.add(1, [3, 4], structured_outputs=form, grammar=Grammar(form, vocabulary), max_tokens=30)

    rig.run(steps=6)
    beside = {plan.decode_steps for plan in rig.plans}
    rig.run()

    assert beside == {1}
    assert max(plan.decode_steps for plan in rig.plans) == 4
    for key in range(2):
        rig.check_output(key)


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_after_an_end_token_are_not_sent_counted_or_cached(depth: int) -> None:
    def next_token(history: int, generated: int, sampling: RequestSampling) -> int:
        return 2 if generated == 5 else 10 + generated

    rig = CoreRig(replace(EIGHT_STEPS, depth=depth), next_token=next_token)
    rig.add(0, [1, 2, 3], max_tokens=40)

    rig.run()

    assert rig.tokens(0) == [10, 11, 12, 13, 14, 2]
    assert rig.reason(0) == "stop"
    assert rig.core.stats().blocks_used == 0
    sent = [10, 11, 12, 13, 14, 2, 16, 17, 18]
    rig.add(1, [1, 2, 3, *sent], max_tokens=1)
    rig.run()
    # Two blocks of four: the KV of the end token itself is not cached.
    assert rig.ledger.requests[1].num_cached == 8


def test_several_decodes_per_step_use_free_blocks_without_preemption() -> None:
    rig = CoreRig(replace(EIGHT_STEPS, num_blocks=9, max_num_seqs=2, max_model_len=32))
    for key in range(2):
        rig.add(key, [key, 1, 2], max_tokens=12, ignore_eos=True)

    rig.run()

    for key in range(2):
        rig.check_output(key)
    assert rig.core.stats().preemptions == 0
    assert max(plan.decode_steps for plan in rig.plans) == 8


def test_several_decodes_per_step_without_free_blocks_preempt_no_request() -> None:
    rig = CoreRig(replace(EIGHT_STEPS, num_blocks=5, max_num_seqs=2, max_model_len=20))
    rig.add(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=4, ignore_eos=True)
    rig.add(1, [3, 4, 5, 6, 7], max_tokens=4, ignore_eos=True)

    rig.run()

    for key in range(2):
        rig.check_output(key)
    assert rig.core.stats().preemptions == 0


def test_an_abort_between_the_steps_frees_the_blocks_ahead() -> None:
    rig = CoreRig(EIGHT_STEPS)
    rig.add(0, [1, 2], **ENDLESS)
    rig.add(1, [3, 4], max_tokens=30, ignore_eos=True)
    rig.run(steps=3)

    rig.abort(0)
    rig.run()

    rig.check_output(0)
    rig.check_output(1)
    assert rig.core.stats().blocks_used == 0


def test_a_nan_token_fails_its_request_at_its_position() -> None:
    def next_token(history: int, generated: int, sampling: RequestSampling) -> int:
        return -1 if generated == 6 and sampling.seed == 7 else 10 + generated

    rig = CoreRig(FOUR_STEPS, next_token=next_token)
    rig.add(0, [1, 2], max_tokens=20, seed=7, ignore_eos=True)
    rig.add(1, [3, 4], max_tokens=20, seed=8, ignore_eos=True)

    rig.run()

    assert rig.tokens(0) == [10, 11, 12, 13, 14, 15]
    assert rig.error(0) == "the logits of output token 7 were NaN or infinite"
    rig.check_output(1)


def test_in_reject_mode_every_decode_has_a_prepared_bucket() -> None:
    rig = CoreRig(
        replace(
            EIGHT_STEPS,
            buckets="exponential",
            on_unwarmed="reject",
            widest_decode=8,
            max_num_seqs=3,
        )
    )
    for key in range(3):
        rig.add(key, [key, 1, 2], max_tokens=9 + key, ignore_eos=True)

    rig.run()

    for key in range(3):
        rig.check_output(key)
    lookups = rig.core.stats().lookups
    assert max(plan.decode_steps for plan in rig.plans) == 8
    assert not any(name.endswith(("miss", "fallback")) for name in lookups)


def test_the_log_has_the_number_of_decodes_per_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        CoreRig(EIGHT_STEPS)

    assert "Decodes of a request in a step: 8 (--num-scheduler-steps); steps in" in caplog.text


def test_with_drafts_every_step_decodes_once_and_the_reason_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        rig = CoreRig(replace(EIGHT_STEPS, max_tokens_per_step=4))
    rig.executor.early_every = 2
    rig.add(0, [1, 2], max_tokens=30, ignore_eos=True)
    rig.add(1, [3, 4], max_tokens=9, ignore_eos=True)

    rig.run()

    rig.check_output(0)
    rig.check_output(1)
    assert {plan.decode_steps for plan in rig.plans} == {1}
    line = (
        "Decodes of a request in a step: 1 (--num-scheduler-steps 8 has no effect: the next "
        "decode starts after the accepted drafts); steps in flight: 2"
    )
    assert line in caplog.messages

"""engine/core/output_processor.py: finish reasons and messages of a real core, as front ends
receive them."""

import pytest
from core_rig import CoreRig, CoreSettings

from engine.transport.messages import StepOutput
from hpu.protocol import RequestSampling

EOS = 2


def script(*tokens: int):  # type: ignore[no-untyped-def]
    """Fake model that gives each request these tokens, repeating the last token."""

    def next_token(history: int, generated: int, sampling: RequestSampling) -> int:
        token = tokens[min(generated, len(tokens) - 1)]
        return 40 if generated < sampling.min_tokens and token in sampling.end_token_ids else token

    return next_token


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "stop_token"),
    [
        ({}, [5, 6, EOS], "stop", None),
        ({"max_tokens": 2}, [5, 6], "length", None),
        ({"max_tokens": 3}, [5, 6, EOS], "stop", None),
        ({"ignore_eos": True}, [5, 6, EOS, 7, 7], "length", None),
        ({"stop_token_ids": (6,)}, [5, 6], "stop", 6),
        ({"stop_token_ids": (EOS,)}, [5, 6, EOS], "stop", None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [5, 6, EOS], "stop", EOS),
        ({"min_tokens": 4, "stop_token_ids": (7,)}, [5, 6, 40, 40, 7], "stop", 7),
        ({"max_tokens": None}, [5, 6, EOS], "stop", None),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens_per_step", [1, 4])
def test_a_request_ends_by_the_first_matching_rule(
    max_tokens_per_step: int,
    depth: int,
    sampling: dict[str, object],
    tokens: list[int],
    reason: str,
    stop_token: int | None,
) -> None:
    rig = CoreRig(
        CoreSettings(depth=depth, max_tokens_per_step=max_tokens_per_step),
        next_token=script(5, 6, EOS, 7),
    )
    rig.add(0, [1, 1], **{"max_tokens": 5, **sampling})

    rig.run()

    finish = rig.ledger.requests[0].finish
    assert finish is not None
    assert (rig.tokens(0), finish.reason, finish.stop_token) == (tokens, reason, stop_token)


def test_the_end_of_the_context_has_finish_reason_length() -> None:
    rig = CoreRig(CoreSettings(max_model_len=16), next_token=script(9))
    rig.add(0, [1] * 15, max_tokens=None)
    rig.add(1, [2] * 6, max_tokens=100)

    rig.run()

    assert (rig.tokens(0), rig.reason(0)) == ([9], "length")
    assert (rig.tokens(1), rig.reason(1)) == ([9] * 10, "length")


def test_a_surplus_planned_decode_delivers_no_extra_token() -> None:
    rig = CoreRig(CoreSettings(depth=2), next_token=script(EOS))
    rig.add(0, [1], max_tokens=9)

    rig.run()

    assert len(rig.plans) == 2
    assert rig.tokens(0) == [EOS]
    assert rig.core.stats().blocks_used == 0


def test_a_request_is_not_planned_beyond_max_tokens() -> None:
    rig = CoreRig(CoreSettings(depth=2), next_token=script(9))
    rig.add(0, [1], max_tokens=3)

    rig.run()

    assert len(rig.plans) == 3


def test_nan_logits_fail_only_their_request() -> None:
    def next_token(history: int, generated: int, sampling: RequestSampling) -> int:
        return -1 if sampling.top_k == 7 and generated == 2 else 9

    rig = CoreRig(next_token=next_token)
    rig.add(0, [1] * 9, max_tokens=6, top_k=7)
    rig.add(1, [2] * 9, max_tokens=6)

    rig.run()

    assert (rig.tokens(0), rig.reason(0)) == ([9, 9], "error")
    assert rig.error(0) == "the logits of output token 3 were NaN or infinite"
    assert (rig.tokens(1), rig.reason(1)) == ([9] * 6, "length")
    rig.add(2, [1] * 9, max_tokens=1)
    rig.run()
    assert rig.ledger.requests[2].num_cached == 0


def test_max_tokens_0_returns_no_token() -> None:
    rig = CoreRig(CoreSettings(budget=4))
    rig.add(0, [1, 2, 3], max_tokens=0)
    rig.add(1, [4, 5, 6, 7, 8, 9], max_tokens=0, prompt_logprobs=1)

    rig.run()

    assert (rig.tokens(0), rig.reason(0)) == ([], "length")
    assert (rig.tokens(1), rig.reason(1)) == ([], "length")
    assert rig.ledger.requests[1].scored == [5, 6, 7, 8, 9]


def test_prompt_logprobs_are_sent_once_and_in_order_despite_a_preemption() -> None:
    for depth in (1, 2):
        rig = CoreRig(
            CoreSettings(num_blocks=17, max_num_seqs=3, budget=5, depth=depth, policy="priority"),
            next_token=script(9),
        )
        for key in (1, 2):
            rig.add(key, [key, 8], max_tokens=24, priority=0)
        rig.run(steps=3)
        rig.add(0, list(range(10, 50)) + [5] * 8, max_tokens=3, prompt_logprobs=1, priority=9)

        rig.run()

        assert rig.ledger.requests[0].finish.num_preemptions > 0  # type: ignore[union-attr]
        rig.check_output(0)


def test_logprobs_belong_to_the_tokens_of_their_key() -> None:
    rig = CoreRig()
    rig.add(0, [1], max_tokens=5, ignore_eos=True)
    rig.add(1, [2], max_tokens=5, ignore_eos=True, logprobs=2)

    rig.run()

    assert rig.ledger.requests[0].logprob_ids == []
    assert rig.ledger.requests[1].logprob_ids == rig.tokens(1)


def test_each_front_end_gets_only_its_own_keys() -> None:
    rig = CoreRig(next_token=script(9))
    first, second = 5, (1 << 48) | 5
    rig.add(first, [1], max_tokens=2)
    rig.add(second, [2], max_tokens=4)

    messages: list[tuple[int, StepOutput]] = []
    while rig.core.has_work:
        messages += rig.step()

    by_front_end = {
        index: [
            key for front_end, message in messages for key in message.keys if front_end == index
        ]
        for index in (0, 1)
    }
    assert by_front_end == {0: [first] * 2, 1: [second] * 4}


def test_a_finish_has_the_time_of_each_phase() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1), next_token=script(9))
    rig.add(0, [1], max_tokens=4)
    rig.add(1, [2], max_tokens=4)

    rig.run()

    requests, other = (rig.ledger.requests[key].finish for key in (0, 1))
    assert requests is not None and other is not None
    assert requests.prefill_s > 0 and requests.decode_s > 0
    assert other.queue_s >= requests.prefill_s + requests.decode_s


def test_a_sent_message_is_not_changed_by_later_steps() -> None:
    rig = CoreRig(CoreSettings(depth=1), next_token=script(9))
    rig.add(0, [1], max_tokens=9)
    (_, first) = rig.step()[0]
    steps = first.stats.steps if first.stats else None

    rig.run()

    assert (first.keys, first.tokens, steps) == ([0], [9], 1)
    assert first.stats is not None and first.stats.steps == 1


def test_an_end_token_before_min_tokens_does_not_finish_a_request() -> None:
    rig = CoreRig(next_token=lambda history, generated, sampling: EOS)
    rig.add(0, [1], max_tokens=9, min_tokens=3)

    rig.run()

    assert (rig.tokens(0), rig.reason(0)) == ([EOS] * 4, "stop")


CORNERED = {"allowed_token_ids": (5, 6), "bad_words_token_ids": ((5, 5), (5, 6), (9, 9, 6))}


def test_settings_that_forbid_every_token_are_a_user_error() -> None:
    rig = CoreRig(next_token=lambda history, generated, sampling: -1 if generated == 2 else 5)
    rig.add(0, [1] * 9, max_tokens=6, **CORNERED)

    rig.run()

    finish = rig.ledger.requests[0].finish
    assert finish is not None
    assert (rig.tokens(0), finish.reason, finish.param) == ([5, 5], "error", "allowed_token_ids")
    assert finish.error == (
        "allowed_token_ids has 2 tokens, and bad_words or min_tokens exclude all of them at "
        "output token 3"
    )
    # The request's cached blocks have valid contents, so the next request may use them.
    rig.add(1, [1] * 9, max_tokens=1)
    rig.run()
    assert rig.ledger.requests[1].num_cached > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {**CORNERED, "bad_words_token_ids": ((5, 5), (6, 6))},
        {**CORNERED, "bad_words_token_ids": ((5, 5), (7, 6))},
        {"bad_words_token_ids": ((5, 5), (5, 6))},
    ],
)
def test_nan_logits_with_an_allowed_token_are_a_server_error(sampling: dict[str, object]) -> None:
    rig = CoreRig(next_token=lambda history, generated, sampling: -1 if generated == 2 else 5)
    rig.add(0, [1] * 9, max_tokens=6, **sampling)

    rig.run()

    finish = rig.ledger.requests[0].finish
    assert finish is not None and finish.param is None
    assert finish.error == "the logits of output token 3 were NaN or infinite"


def test_several_tokens_of_a_step_are_sent_in_one_column_with_their_logprobs() -> None:
    rig = CoreRig(CoreSettings(depth=1, max_tokens_per_step=4), next_token=script(5, 6, 7, 8))
    prompts = {key: [key, 1, 1] for key in range(4)}
    for key, prompt in prompts.items():
        rig.add(key, prompt, max_tokens=14, logprobs=0)

    counts: list[int] = []
    while rig.core.has_work:
        for _, message in rig.step():
            counts += message.counts

    assert {2, 3, 4} <= set(counts) and max(counts) == 4
    for key in prompts:
        assert rig.tokens(key) == [5, 6, 7] + [8] * 11
        rig.check_output(key)


def test_blocks_of_several_accepted_tokens_are_cached() -> None:
    rig = CoreRig(CoreSettings(depth=2, max_tokens_per_step=4), next_token=script(*range(3, 40)))
    rig.add(0, [1, 1], max_tokens=30)
    rig.run()

    rig.add(1, [1, 1, *rig.tokens(0)], max_tokens=1)
    rig.run()

    assert rig.ledger.requests[1].num_cached == 28

"""Requests with and without a grammar in one batch: masks are sent with the plan that samples them,
or after it."""

import random
import re
from pathlib import Path

import pytest
from core_rig import CoreRig, CoreSettings
from tiny_models import EOS, VOCAB_SIZE, write_tokenizer
from tokenizers import Tokenizer

from config.params.structured_output import GrammarSpec
from engine.scheduling import grammar_matching
from engine.structured_output.grammar import Grammar, Vocabulary

PATTERN = "[a-f]{4,9};[0-9]{3}"
FORM = GrammarSpec("regex", PATTERN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def grammar(folder: Path) -> Grammar:
    return Grammar(FORM, Vocabulary(str(folder), VOCAB_SIZE, frozenset([EOS])))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_output_matches_with_chunks_preemptions_and_prefix_hits(
    grammar: Grammar, encoder: Tokenizer, depth: int
) -> None:
    rng = random.Random(depth)
    rig = CoreRig(
        CoreSettings(num_blocks=16, max_num_seqs=6, budget=9, depth=depth, vocab_size=VOCAB_SIZE)
    )
    guided = {key for key in range(40) if rng.random() < 0.5}
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(12)]

    for key in range(40):
        prompt = [*common[: rng.randint(0, 12)], rng.randrange(3, VOCAB_SIZE)]
        rules = {"structured_outputs": FORM, "grammar": grammar} if key in guided else {}
        rig.add(key, prompt, max_tokens=20, logprobs=rng.choice([None, 1]), **rules)
        rig.run(steps=rng.randint(0, 4))
    rig.run()

    for key in range(40):
        rig.check_output(key)
        if key in guided:
            tokens = rig.tokens(key)
            assert (rig.reason(key), tokens[-1]) == ("stop", EOS)
            assert re.fullmatch(PATTERN, encoder.decode(tokens[:-1]))
    assert rig.core.stats().preemptions > 0
    assert rig.executor.max_in_flight == depth


def test_a_guided_request_is_planned_ahead_and_its_mask_follows(
    grammar: Grammar,
) -> None:
    rig = CoreRig(CoreSettings(vocab_size=VOCAB_SIZE))
    rig.add(0, [5, 6], max_tokens=5, structured_outputs=FORM, grammar=grammar)
    rig.add(1, [7, 8], max_tokens=6, ignore_eos=True)
    rig.run()

    guided, free = (new.req_index for new in rig.plans[0].new_requests)
    named = [[row for launch in plan.launches for row in launch.req_indices] for plan in rig.plans]

    assert named == [[guided, free]] * 5 + [[free]]
    assert [plan.masked_requests for plan in rig.plans] == [[guided], [], [], [], [], []]
    assert [plan.deferred_requests for plan in rig.plans] == [[], *[[guided]] * 4, []]
    assert [(masks.step, masks.req_indices) for masks in rig.executor.masks] == [
        (step, [guided]) for step in range(1, 5)
    ]
    assert rig.executor.collected_before == [0, 0, 1, 2, 3, 4]


def test_a_mask_is_sent_with_the_plan_if_the_last_token_is_known(
    grammar: Grammar,
) -> None:
    rig = CoreRig(CoreSettings(vocab_size=VOCAB_SIZE))
    rig.executor.early_every = 1
    rig.add(0, [5, 6], max_tokens=5, structured_outputs=FORM, grammar=grammar)
    rig.run()

    assert len(rig.plans) == 5
    assert all(plan.masked_requests and not plan.deferred_requests for plan in rig.plans)


@pytest.mark.parametrize("reason", ["stop", "error"])
def test_a_request_that_ended_in_the_previous_step_gets_no_mask(
    grammar: Grammar, encoder: Tokenizer, reason: str
) -> None:
    rig = CoreRig(CoreSettings(vocab_size=VOCAB_SIZE))
    # Letters only; the pattern requires another character after at most nine letters.
    letters = tuple(encoder.encode("".join(pair)).ids[0] for pair in "abcdef")
    rules = {"stop": {}, "error": {"allowed_token_ids": letters}}[reason]
    guided = {"structured_outputs": FORM, "grammar": grammar, "max_tokens": 20}
    rig.add(0, [5, 6], **guided, **rules)
    rig.add(1, [5, 7], **guided)
    rig.run()

    (ended,) = [
        masks.step
        for masks in rig.executor.masks
        if len(masks.req_indices) < len(rig.plans[masks.step].deferred_requests) > 1
    ]
    assert rig.plans[ended].deferred_requests == [0, 1]
    assert rig.reason(0) == reason
    rig.check_output(1)


def test_a_request_preempted_in_its_planned_step_still_gets_its_mask(
    grammar: Grammar,
) -> None:
    rig = CoreRig(
        CoreSettings(
            num_blocks=12, max_num_seqs=6, budget=6, policy="priority", vocab_size=VOCAB_SIZE
        )
    )
    for key in range(2):
        rules = {"structured_outputs": FORM, "grammar": grammar}
        rig.add(key, [5, 6, 7], priority=1, max_tokens=30, **rules)
    rig.run(steps=1)
    rig.add(2, list(range(10, 38)), max_tokens=2)
    rig.run()

    assert rig.core.stats().preemptions > 0
    for key in range(3):
        rig.check_output(key)


def test_an_output_cut_by_length_has_finish_reason_length(
    grammar: Grammar, encoder: Tokenizer
) -> None:
    rig = CoreRig(CoreSettings(vocab_size=VOCAB_SIZE))
    rig.add(0, [5], max_tokens=3, structured_outputs=FORM, grammar=grammar)
    rig.run()

    assert rig.reason(0) == "length"
    assert re.fullmatch("[a-f]+", encoder.decode(rig.tokens(0)))


@pytest.mark.parametrize("after", [0, 1])
def test_a_grammar_without_allowed_tokens_fails_the_request_with_the_reason(
    grammar: Grammar, encoder: Tokenizer, after: int
) -> None:
    rig = CoreRig(CoreSettings(vocab_size=VOCAB_SIZE))
    allowed = encoder.encode("xc").ids[: after + 1] if after else encoder.encode("x").ids
    words = ((encoder.encode("c").ids * 2),)
    rig.add(
        0,
        [5],
        max_tokens=9,
        structured_outputs=FORM,
        grammar=grammar,
        allowed_token_ids=tuple(allowed),
        bad_words_token_ids=words,
    )
    rig.run()

    assert "allowed_token_ids, bad_words or min_tokens exclude" in rig.error(0)
    assert len(rig.tokens(0)) == after
    finish = rig.ledger.requests[0].finish
    assert finish is not None and finish.param == "structured_outputs"


def test_a_grammar_that_is_too_slow_to_match_fails_only_its_requests(
    folder: Path, grammar: Grammar, encoder: Tokenizer
) -> None:
    costly = Grammar(FORM, Vocabulary(str(folder), VOCAB_SIZE, frozenset([EOS])))
    rig = CoreRig(CoreSettings(vocab_size=VOCAB_SIZE, depth=2))
    for key, used in enumerate((grammar, costly, costly)):
        rig.add(key, [5, key], max_tokens=30, structured_outputs=FORM, grammar=used)
    rig.add(3, [7, 8], max_tokens=12, ignore_eos=True)
    rig.run(steps=4)

    costly.spend(3.0)
    rig.add(4, [5, 9], max_tokens=30, structured_outputs=FORM, grammar=costly)
    rig.run()

    assert re.fullmatch(PATTERN, encoder.decode(rig.tokens(0)[:-1]))
    rig.check_output(3)
    for key in (1, 2, 4):
        assert "took 2.99" in rig.error(key)
        finish = rig.ledger.requests[key].finish
        assert finish is not None and finish.param == "structured_outputs"
    assert len(rig.tokens(4)) == 1


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_requests_whose_grammars_exceed_a_steps_time_wait(
    grammar: Grammar, encoder: Tokenizer, monkeypatch: pytest.MonkeyPatch, depth: int,
    tokens_per_step: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(grammar_matching, "MAX_MATCHING_S", 0.0)
    rig = CoreRig(CoreSettings(
        vocab_size=VOCAB_SIZE, depth=depth, max_num_seqs=8, num_blocks=90,
        max_tokens_per_step=tokens_per_step,
    ))  # fmt: skip
    for key in range(6):
        rig.add(key, [5, key], max_tokens=20, structured_outputs=FORM, grammar=grammar)
    rig.add(6, [7, 8], max_tokens=24, ignore_eos=True)
    rig.run(steps=12 if depth == 1 else 16)
    rig.abort(5)
    rig.run(steps=20)

    assert rig.reason(6) == "length"
    rig.run()

    for key in range(7):
        rig.check_output(key)
    assert rig.core.stats().preemptions == 0


def test_a_resumed_output_is_matched_between_other_steps(
    grammar: Grammar, encoder: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_matching, "MAX_MATCHING_S", 0.0)
    rig = CoreRig(CoreSettings(vocab_size=VOCAB_SIZE))
    rules = {"max_tokens": 20, "structured_outputs": FORM, "grammar": grammar}
    rig.add(0, [5, 6], **rules)
    rig.run()
    tokens = rig.tokens(0)

    rig.add(1, [7, 8], max_tokens=9, ignore_eos=True)
    for key, output in ((2, tokens[:6]), (3, encoder.encode("abx").ids)):
        rig.add(key, [5, 6], resumed=output, **rules)
    rig.run(steps=5)
    assert len(rig.tokens(1)) > 2 and not rig.tokens(2)
    rig.run()

    assert rig.tokens(2) == tokens[6:]
    assert rig.reason(1) == "length"
    assert "cannot be enforced" in rig.error(3)

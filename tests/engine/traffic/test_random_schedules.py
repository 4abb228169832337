"""Random schedules: the real core with a KV store that records the contents of every slot, compared
with the slow model that runs each request alone. The invariants of CoreRig are checked after every
step."""

from dataclasses import replace

import pytest
from core_rig import CoreRig, CoreSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import (
    FORMS,
    PROFILE,
    TALKS,
    VOCABULARY,
    Ask,
    Move,
    play,
    rigs,
    schedules,
)
from slow_model import hashed_token
from tiny_models import EOS, VOCAB_SIZE, write_tokenizer

from engine.structured_output.grammar import Grammar, Vocabulary


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> list[Grammar]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    vocabulary = Vocabulary(str(folder), VOCAB_SIZE, frozenset([EOS]))
    return [Grammar(form, vocabulary) for form in FORMS]


@settings(PROFILE, max_examples=180)
@given(rigs, schedules)
def test_every_request_gets_the_tokens_of_a_single_run(
    shape: CoreSettings, schedule_moves: list[Move]
) -> None:
    play(CoreRig(shape), schedule_moves)


@settings(PROFILE, max_examples=90)
@given(rigs, st.sampled_from([0, 2, 3]), st.sampled_from([0, 0, 23]), schedules)
def test_steps_with_several_tokens_give_the_same_tokens(
    grammars: list[Grammar],
    shape: CoreSettings,
    early_every: int,
    bad_every: int,
    schedule_moves: list[Move],
) -> None:
    rig = CoreRig(
        replace(shape, max_tokens_per_step=4, vocab_size=VOCAB_SIZE),
        next_token=hashed_token(VOCAB_SIZE, bad_every=bad_every),
    )
    rig.executor.early_every = early_every
    play(rig, schedule_moves, () if bad_every else grammars)


@settings(PROFILE, max_examples=60)
@given(rigs, schedules)
def test_a_request_with_nan_logits_affects_no_other_request(
    shape: CoreSettings, schedule_moves: list[Move]
) -> None:
    play(CoreRig(shape, next_token=hashed_token(VOCABULARY, bad_every=23)), schedule_moves)


@settings(PROFILE, max_examples=60)
@given(rigs, schedules)
def test_a_decode_that_reads_a_slice_reaches_the_highest_block_of_its_requests(
    shape: CoreSettings, schedule_moves: list[Move]
) -> None:
    play(CoreRig(replace(shape, prefix_caching=False, contiguous=True)), schedule_moves)


@settings(PROFILE, max_examples=60)
@given(rigs, st.sampled_from([0, 0, 2, 3]), schedules)
def test_a_request_with_a_grammar_gets_the_tokens_of_a_single_run_with_and_without_overlap(
    grammars: list[Grammar], shape: CoreSettings, early_every: int, schedule_moves: list[Move]
) -> None:
    rig = CoreRig(replace(shape, vocab_size=VOCAB_SIZE))
    rig.executor.early_every = early_every

    play(rig, schedule_moves, grammars)


def test_blocks_move_down_when_lower_blocks_are_freed() -> None:
    rig = CoreRig(
        CoreSettings(
            num_blocks=60,
            max_num_seqs=9,
            budget=200,
            prefix_caching=False,
            contiguous=True,
            defrag_threshold=20,
        )
    )
    for key in range(9):
        tokens = 3 if key < 8 else 40
        rig.add(key, TALKS[key % 2][:16], max_tokens=tokens, ignore_eos=True)

    rig.run()

    moved = [plan for plan in rig.plans if plan.moved_from]
    rig.check_output(8)
    assert len(moved) == 1 and max(moved[0].moved_from) > 30
    assert rig.plans[-1].launches[0].bucket == (1, 1, 14)


def test_in_reject_mode_only_blocks_within_the_widest_slice_are_allocated() -> None:
    rig = CoreRig(
        CoreSettings(
            num_blocks=60,
            max_num_seqs=6,
            prefix_caching=False,
            contiguous=True,
            buckets="linear",
            on_unwarmed="reject",
            widest_decode=24,
        )
    )
    for key in range(8):
        rig.add(key, TALKS[key % 2][:20], max_tokens=30, ignore_eos=True)

    rig.run()

    stats = rig.core.stats()
    for key in range(8):
        rig.check_output(key)
    assert stats.blocks_total == 24 and stats.preemptions > 0
    assert not any(name.endswith(("miss", "fallback")) for name in stats.lookups)


def test_a_schedule_covers_preemption_prefix_hits_and_chunks() -> None:
    # A fixed schedule, independent of hypothesis: this kind of load must preempt, share, chunk and
    # end early.
    rig = CoreRig(CoreSettings(num_blocks=18, max_num_seqs=5, budget=9))
    ask_of = {"max_tokens": 25, "seed": 7, "stop_token_ids": (3, 4)}
    schedule: list[Move] = []
    for number in range(12):
        prompt = tuple(TALKS[number % 2][: 8 + number])
        schedule += [Ask(prompt, "", 0, 0, ask_of), 5]

    play(rig, schedule)

    stats = rig.core.stats()
    assert stats.preemptions > 0
    assert any(row.num_computed_tokens for plan in rig.plans for row in plan.new_requests)
    assert any(len(plan.grown_requests) > 1 for plan in rig.plans)
    assert any(not all(x.samples) for plan in rig.plans for x in plan.launches)

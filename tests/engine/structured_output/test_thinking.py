"""Thinking before structured output: thinking ends with its end marker, however tokens split the
marker; then the grammar begins."""

import random
import re
from typing import Any

import pytest
import text_folders
from core_rig import CoreRig, CoreSettings
from schemas import next_tokens
from tokenizers import Tokenizer

from config.params.structured_output import FREE, GrammarSpec, ThinkingSpec
from engine.structured_output.grammar import Grammar, Guide, Vocabulary

THINK = (("<think>",), ("</think>",))
PROSE = (("Here is my thought:", "Here's my thought:"), ("Here is my answer:", "Here's my answer:"))
SPECIAL = (("[T]",), ("[/T]",))
CHANNELS = (
    ("<|channel|>analysis<|message|>",),
    ("<|end|><|start|>assistant<|channel|>final<|message|>",),
)
CHANNEL_TOKENS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
AWKWARD = ["</", "think", ">\n", ">\n\n", "\n\n", ">a", "k>b", "</think>a", "<th", "ink>\nH", ":b"]
"""Tokens that begin, contain and end a marker in the middle."""


@pytest.fixture(scope="module")
def encoder() -> Tokenizer:
    made = text_folders.byte_level()
    made.add_special_tokens(["[T]", "[/T]", *CHANNEL_TOKENS])
    made.add_tokens(AWKWARD)
    return made


@pytest.fixture(scope="module")
def vocabulary(encoder: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = text_folders.save(encoder, tmp_path_factory.mktemp("tokenizer"))
    return Vocabulary(folder, encoder.get_vocab_size(), frozenset([end_of(encoder)]))


def end_of(encoder: Tokenizer) -> int:
    (token,) = encoder.encode("</s>").ids
    return token


def grammar_of(
    vocabulary: Vocabulary,
    marks: Any = THINK,
    *,
    form: tuple[str, str] = ("regex", "[ab]{2,4}"),
    is_inside: bool = True,
    skips_blanks: bool = False,
) -> Grammar:
    thinking = ThinkingSpec(*marks, is_inside, skips_blanks)
    return Grammar(GrammarSpec(*form, thinking), vocabulary)


def guide_of(grammar: Grammar, budget: int | None = None) -> Guide:
    return Guide(
        grammar, min_tokens=0, end_ids=frozenset(), ignore_eos=False, thinking_budget=budget
    )


def walk(guide: Guide, encoder: Tokenizer, rng: random.Random, likely: set[int]) -> str:
    """A random complete text that the guide allows."""
    tokens: list[int] = []
    for _ in range(400):
        allowed = sorted(next_tokens(guide))
        soon = sorted(likely.intersection(allowed))
        token = rng.choice(soon if soon and rng.random() < 0.8 else allowed)
        if token == end_of(encoder):
            return encoder.decode(tokens, skip_special_tokens=False)
        assert guide.advance(token) is None
        tokens.append(token)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("skips_blanks", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("marks", [THINK, PROSE, SPECIAL, CHANNELS])
def test_every_output_is_thinking_up_to_its_marker_then_structured(
    vocabulary: Vocabulary, encoder: Tokenizer, marks: Any, is_inside: bool, skips_blanks: bool
) -> None:
    grammar = grammar_of(vocabulary, marks, is_inside=is_inside, skips_blanks=skips_blanks)
    rng = random.Random(1)
    words = " ".join([*marks[0], *marks[1], *AWKWARD])
    likely = set(encoder.encode(words).ids) | {encoder.token_to_id(mark) for mark in AWKWARD}
    opening, closing = ("|".join(map(re.escape, mark)) for mark in marks)
    begins = rf"((?!{closing}).)*?({closing})"
    blanks = r"[ \t\r\n]*" if skips_blanks else ""
    begins = f"{begins}{blanks}" if is_inside else f"(({opening}){begins}{blanks})?"
    pattern = re.compile(f"(?s:{begins})([ab]{{2,4}})")

    texts = [walk(guide_of(grammar, rng.randint(0, 30)), encoder, rng, likely) for _ in range(60)]

    assert [text for text in texts if not pattern.fullmatch(text)] == []
    assert len(set(texts)) > 20


def test_structured_output_begins_at_once_or_after_the_marker(
    vocabulary: Vocabulary, encoder: Tokenizer
) -> None:
    grammar = grammar_of(vocabulary, form=("choice", '["<thing>", "b"]'), is_inside=False)
    shown = []

    for said in ("", "<th", "<thi", "<thin", "<thin" + "k", "<think>", "b"):
        guide = guide_of(grammar)
        for character in said:
            assert guide.advance(encoder.token_to_id(character)) is None
        allowed = {encoder.decode([t], skip_special_tokens=False) for t in next_tokens(guide)}
        shown.append(allowed if len(allowed) < 9 else "anything")

    assert shown == [
        {"<", "<th", "b"}, {"i", "ink>\nH"}, {"n"}, {"g", "k", "k>b"}, {">", ">\n", ">\n\n", ">a"},
        "anything", {"</s>"},
    ]  # fmt: skip


def test_the_end_token_is_not_allowed_while_thinking(
    vocabulary: Vocabulary, encoder: Tokenizer
) -> None:
    guide = guide_of(grammar_of(vocabulary))

    assert end_of(encoder) not in next_tokens(guide)
    assert len(next_tokens(guide)) > vocabulary.vocab_size - 5


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("marks", [THINK, SPECIAL, CHANNELS])
def test_thinking_is_closed_when_its_budget_is_spent_and_the_answer_follows(
    vocabulary: Vocabulary, encoder: Tokenizer, marks: Any, budget: int
) -> None:
    guide = guide_of(grammar_of(vocabulary, marks, form=(FREE, "")), budget)
    (letter,) = encoder.encode("x").ids
    tokens = []

    for _ in range(budget + 30):
        token = letter if letter in next_tokens(guide) else min(next_tokens(guide))
        assert guide.advance(token) is None
        tokens.append(token)

    text = encoder.decode(tokens, skip_special_tokens=False)
    assert re.fullmatch("x" * budget + re.escape(marks[1][0]) + "x+", text)
    assert len(next_tokens(guide)) == vocabulary.vocab_size


def test_a_budget_that_is_not_reached_changes_no_token(vocabulary: Vocabulary) -> None:
    free = grammar_of(vocabulary, form=(FREE, ""), is_inside=False)
    rules: list[Any] = [{}, {"min_tokens": 5}, {"ignore_eos": True}, {"stop_token_ids": (9, 40)}]
    rig = CoreRig(CoreSettings(vocab_size=vocabulary.vocab_size, max_num_seqs=8))
    for key, rule in enumerate(rules):
        bound = {"structured_outputs": GrammarSpec(FREE, thinking=free.markers.spec)}  # type: ignore[union-attr]
        rig.add(2 * key, [5, key], max_tokens=20, **rule)
        rig.add(
            2 * key + 1, [5, key], max_tokens=20, thinking_token_budget=30, grammar=free,
            **bound, **rule,
        )  # fmt: skip

    rig.run()

    for key in range(0, 8, 2):
        assert rig.tokens(key) == rig.tokens(key + 1)
        assert rig.reason(key) == rig.reason(key + 1)

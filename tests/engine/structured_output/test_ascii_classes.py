r"""ASCII classes: \d, \w and \s have the meaning of Python's re.ASCII in every kind of pattern."""

import re
from typing import Any

import pytest
from tiny_models import EOS, VOCAB_SIZE, write_tokenizer
from tokenizers import Tokenizer

from config.errors import UserError
from config.params.structured_output import grammar_spec
from engine.structured_output.bounds import with_ascii_classes, with_ascii_patterns
from engine.structured_output.grammar import Grammar, Vocabulary
from engine.structured_output.token_bitmask import has

CHARACTERS = "7a_-+.]^[ \t\n\v\r\x1c~é\u0663\u0130\u00a0\u2003\u3000中"
PATTERNS = [
    *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"x\d|y\W", r"\\d", r"\\\d", r"(\w)", r"\w{2}"),
    *(
        r"[\d]",
        r"[^\d]",
        r"[^\w\s]",
        r"[\s\S]",
        r"[\d.]",
        r"[-\d]",
        r"[a-z\d-]",
        r"[.\D]",
        r"[\W7]",
    ),
    *(r"[\]\d]", r"[a-c-\s]", r"[^^\d]", r"\[\d\]", r"[\\d]", r"(?:\s|\d)?"),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Vocabulary(str(folder), VOCAB_SIZE, frozenset([EOS]))


@pytest.fixture(scope="module")
def encoder(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("encoder")
    write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _texts() -> list[str]:
    return [
        *CHARACTERS,
        *("a" + second for second in CHARACTERS),
        *("x7", "x\u0663", "yé", "y7", "[7]", "[\u0663]", "\\d", "\\7", "\\\u0663"),
    ]


def _grammar(vocabulary: Vocabulary, **asked: Any) -> Grammar:
    spec = grammar_spec(asked)
    assert spec is not None
    return Grammar(spec, vocabulary)


def _matches(grammar: Grammar, encoder: Tokenizer, text: str) -> bool:
    state = grammar.start()
    for token in encoder.encode(text, add_special_tokens=False).ids:
        if not has(state.bitmask, token):
            return False
        state.advance(token)
    return has(state.bitmask, EOS)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_as_it_does_in_ascii(
    vocabulary: Vocabulary, encoder: Tokenizer, pattern: str
) -> None:
    known = [text for text in _texts() if encoder.decode(encoder.encode(text).ids) == text]
    expected = [text for text in known if re.fullmatch(pattern, text, re.ASCII)]

    assert len(known) > 20 and {"\u0663", "é", "\u00a0"} <= set(known)
    grammar = _grammar(vocabulary, regex=pattern)

    assert [text for text in known if _matches(grammar, encoder, text)] == expected


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": r"\d"},
        {"grammar": 'start: "x"? /\\d/'},
        {"structural_tag": {"format": {"type": "regex", "pattern": r"\d"}}},
    ],
)
def test_digit_classes_match_only_ascii_in_every_kind_of_pattern(
    vocabulary: Vocabulary, encoder: Tokenizer, asked: dict[str, Any]
) -> None:
    grammar = _grammar(vocabulary, **asked)

    assert _matches(grammar, encoder, "7")
    assert not _matches(grammar, encoder, "\u0663")


@pytest.mark.parametrize("pattern", [r"[+-\d]", r"[a-\w]", r"[\x20-\s]"])
def test_a_character_class_as_the_end_of_a_range_is_refused(
    vocabulary: Vocabulary, pattern: str
) -> None:
    with pytest.raises(UserError, match="range"):
        _grammar(vocabulary, regex=pattern)


def test_only_the_patterns_of_a_grammar_are_rewritten() -> None:
    lark = 'start: A "/\\d" // \\d /\\w/\nA: /\\d\\/\\w/i\n%json {"pattern": "/\\\\d/"}\n'

    assert with_ascii_patterns(lark) == lark.replace(r"/\d\/\w/i", r"/[0-9]\/[0-9A-Za-z_]/i")


def test_a_pattern_without_classes_is_unchanged() -> None:
    pattern = r"(?i)a[b-d]\.\p{L}\x{41}[[:alpha:]]\\"

    assert with_ascii_classes(pattern) == pattern

"""Patterns of published tokenizers count as linear; patterns that backtrack do not."""

import time

import pytest
from delays import machine_s
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from config.checkpoint.gguf_tokenizer import _SEQUENCES, _SPLITS
from config.checkpoint.split_patterns import is_linear, min_match_characters

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORD = r"[^\r\n\p{L}\p{N}]?"
ORDINARY = {
    **_SPLITS,
    **{
        f"{name}, {index}": pattern
        for name, patterns in _SEQUENCES.items()
        for index, pattern in enumerate(patterns)
        # Exclude `\s+$`, which scans to the end of the text at every space; published files contain
        # it.
        if pattern != r"\s+$"
    },
    "gpt2": GPT2,
    "qwen3.5": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek v3, digits": r"\p{N}{1,3}",
    "deepseek v3, han": "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "deepseek v3": "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "deepseek coder": r"\s?\p{L}+",
    "bloom": " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    "falcon": "[0-9][0-9][0-9]",
    "bailing": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "kimi": rf"[\p{{Han}}]+|{_WORD}{_CASE[0]}*{_CASE[1]}+{_ENDING}"
    rf"|{_WORD}{_CASE[0]}+{_CASE[1]}*{_ENDING}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "clip": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "t5": " {2,}",
    "gemma": r"[^\n]+|[\n]+",
}
BACKTRACKING = [
    *("(a+)+$", "(a|aa)+$", "(a*)*b", "a*a*a*b", "a+b", ".*?b", "X*Y+", "(?:a?){30}a{30}"),
    *(r"\s+$", r"\s+(?!\S)", "a?" * 30 + "a" * 30, r"(?=(\d{3})+(?!\d))", "(?:a{1,9}){1,9}b"),
]
UNKNOWN = ["(?<x>a)", r"\1", "(a", "[a", "a{,3}", "(?i)a", r"x\K", "(((((a)))))", "*a", "a**", "\\"]


@pytest.mark.parametrize("name", ORDINARY)
def test_patterns_of_published_tokenizers_are_linear(name: str) -> None:
    assert is_linear(ORDINARY[name])


@pytest.mark.parametrize("pattern", [*BACKTRACKING, *UNKNOWN, "a" * 10_000])
def test_a_pattern_that_may_backtrack_is_not_linear(pattern: str) -> None:
    assert not is_linear(pattern)


def test_the_minimum_length_of_a_match_is_computed() -> None:
    patterns = [" {2,}", "ab|c", "x*", r"\p{N}{2,3}(?=a)", "(a", "^a?"]

    assert [min_match_characters(pattern) for pattern in patterns] == [2, 1, 0, 2, 0, 0]


_ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", r"\s", "(?:a|ab)", "(?:b?)", "(?!b)", "."])
_QUANTIFIERS = st.sampled_from(["", "?", "*", "+", "{2}", "{0,3}", "{2,}", "?+"])
_ITEMS = st.lists(st.tuples(_ATOMS, _QUANTIFIERS).map("".join), max_size=6).map("".join)
_PATTERNS = st.lists(_ITEMS, min_size=1, max_size=4).map("|".join)
_RUNS = st.lists(st.sampled_from(["a", "b", " ", "ab"]), min_size=1, max_size=3).map("".join)


@given(_PATTERNS, _RUNS, st.sampled_from("abc \n"))
def test_a_linear_pattern_splits_long_runs_in_little_time(
    pattern: str, run: str, last: str
) -> None:
    if not is_linear(pattern):
        return
    try:
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception:  # The library raises a plain Exception for an unsupported pattern.
        return
    text = run * (20_000 // len(run)) + last

    start_s = time.thread_time()
    splitter.pre_tokenize_str(text)

    # A quadratic pattern takes 2 s.
    assert time.thread_time() - start_s < machine_s(1.0)

"""Expressions match as Python's `re` does, in linear time."""

import random
import re
import time
import warnings

import pytest
from delays import machine_s

from config.errors import ConfigError
from config.expressions import (
    FULL,
    MAX_EXPRESSION_CHARACTERS,
    MAX_EXPRESSIONS,
    MAX_NAME_CHARACTERS,
    SEARCH,
    START,
    Expressions,
    Unsupported,
)

NAME = "model.layers.11.self_attn.q_proj"
MATCHERS = {FULL: re.fullmatch, START: re.match, SEARCH: re.search}

# Expressions in the forms of published adapters and checkpoints.
PUBLISHED = (
    r".*\.(q|v)_proj",
    r"q_proj",
    r"^(model|language_model).*\.(q_proj|v_proj)$",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|o_proj).*?)|(?:\bmodel\.layers\."
    r"[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
    r".*\.(gate|router)$",
    r".*mlp.gate$",
    r"model\.layers\.(1|11|[2-4]\d)\..*",
    r"\Z",
    r"(?i)MODEL.*",
    r"model(?P<rest>\..+)\Z",
    r"[[:alpha:]]+",
    r"[]m]odel[^]x]*.*",
    r"mode(l{,2}|x{1,}).*",
    r"m{}|.*\x2e\.?.*",
    r"m\²?odel.*",
    r"\w+\.\D+\S+\b.*",
)


def matches(text: str, part: str, name: str, prefix: str = "") -> bool:
    return Expressions([text], "the test", part, prefix=prefix).first(name) is not None


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@pytest.mark.parametrize("part", MATCHERS)
@pytest.mark.parametrize("text", PUBLISHED)
def test_an_expression_matches_as_in_python(text: str, part: str) -> None:
    for name in (NAME, "q_proj", "mlp.gate", "l:]", "mode", "m{}", "xodel", "model.X"):
        assert matches(text, part, name) is bool(MATCHERS[part](text, name)), name


@pytest.mark.parametrize("seed", range(4))
def test_random_expressions_match_as_in_python(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [
        *(
            "a",
            "b",
            ".",
            r"\.",
            "_",
            "1",
            r"\d",
            r"\w",
            r"\W",
            r"\b",
            r"\B",
            "^",
            "$",
            r"\Z",
            r"\A",
        ),
        *("(", ")", "(?:", "|", "*", "+", "?", "{2}", "{,2}", "{1,}", "{}", "{", "}", "[", "]"),
        *("[^", "-", "[ab]", "[^a]", "[[:", "[]", r"\]", r"\-", r"\_", "(?i:", r"\x61", "(?P<n>"),
    ]
    num_compared = 0
    for _ in range(4000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 9)))
        part = rng.choice([*MATCHERS])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled = re.compile(text)
        except re.error:
            continue
        try:
            ours = Expressions([text], "the test", part)
        except ConfigError:
            continue
        num_compared += 1
        for name in ("a", "ab", "b.a", "a_1", "A-[:a]", "aab11.{}"):
            method = {FULL: compiled.fullmatch, START: compiled.match, SEARCH: compiled.search}
            assert (ours.first(name) is not None) is bool(method[part](name)), (text, part, name)

    assert num_compared > 300


def test_the_first_matching_expression_takes_precedence() -> None:
    texts = [f"layers.{i}.q_proj" for i in range(600)] + [".*", "layers.1.q_proj"]
    found = Expressions(texts, "the test", FULL, prefix=r"(?:.*\.)?")

    assert found.first("model.layers.7.q_proj") == 7
    assert found.first("model.layers.577.q_proj") == 577
    assert found.first("other") == 600
    assert Expressions(texts[:600], "the test", FULL).first("other") is None
    assert Expressions([], "the test", FULL).first("other") is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (r"^(language_model|model)(?=\.).*\.(q_proj|v_proj)$", "a lookahead"),
        (r"(?!lm_head).*", "a lookahead"),
        (r".*(?<!v)_proj", "a lookbehind"),
        (r".*(?<=q)_proj", "a lookbehind"),
        (r"(q|v)\1", "a backreference"),
        (r"(?P<a>q)(?P=a)", "a backreference"),
        (r"(q)?(?(1)a|b)", "a condition"),
        (r"(?>a+)b", "an atomic group"),
        (r"(?#note)a", "a comment"),
        (r"(?x) a", r"the flags \(\?x\)"),
        (r"\u0061", r"the escape \\u"),
        (r"\0", "an octal number"),
    ],
)
def test_expressions_that_re2_does_not_support_are_refused_by_name(text: str, what: str) -> None:
    with pytest.raises(Unsupported, match=what):
        Expressions([text], "the test", FULL)


@pytest.mark.parametrize(
    "text",
    ["(", ")", "a)|(b", "[a", "*", "a**", "(?P<a", r"\Q.\E", r"\pL", "\\", "\ud800", "(?<n>a)"],
)
def test_invalid_expressions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid regular expression"):
        Expressions([text], "the test", FULL, prefix="(?:x)?")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a" * (MAX_EXPRESSION_CHARACTERS + 1)], "of 4097 characters, at most 4096"),
        (["a"] * (MAX_EXPRESSIONS + 1), "has 4097 regular expressions, at most 4096"),
        (["a" * 4000] * 70, "of 280000 characters, at most 262144"),
        (["a{1000}" * 6, "b{1000}" * 6], "repeat parts 12000 times, at most 10000"),
        (["a{1001}"], "repeats a part 1001 times or more, at most 1000"),
        (["(a{99}b){99}"], "is not a valid regular expression|need more than the"),
        (["(?:abcdefghi){1000}"] * 9, "need more than the 4194304 bytes"),
    ],
)
def test_large_expressions_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Expressions(texts, "the test", FULL)


def test_an_invalid_module_name_is_refused() -> None:
    expressions = Expressions([".*"], "the test", FULL)

    for name in ("a" * (MAX_NAME_CHARACTERS + 1), "a\n", "ä", "\ud800"):
        with pytest.raises(ConfigError, match="at most 1024"):
            expressions.first(name)


def test_exponential_patterns_are_matched_in_under_a_second() -> None:
    begin = time.thread_time()

    found = [
        matches(text, FULL, "a" * 1000)
        for text in ("(([a-z0-9_.]+)+)+!", "(a*)*(a*)*(a*)*b", "(a|a)*b", "(.*a){12}b")
    ]

    assert found == [False] * 4
    assert time.thread_time() - begin < machine_s(1)


def test_expressions_that_are_slow_despite_linear_time_are_stopped() -> None:
    texts = [rf"(?:a|b|\.)*a[a-z.]{{{1000 - i}}}.*" for i in range(10)]
    rng = random.Random(0)
    expressions = Expressions(texts, "the test", FULL)

    with pytest.raises(ConfigError, match=r"has taken \d+\.\d s to match \d+ names, at most 1.0"):
        for _ in range(1000):
            expressions.first("".join(rng.choices("aab.", k=1000)))


def test_a_refused_expression_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("(", "(?:abcdefghi){1000}" * 9):
        with pytest.raises(ConfigError):
            Expressions([text], "the test", FULL)

    assert capfd.readouterr() == ("", "")

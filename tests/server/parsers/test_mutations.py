"""Answers with a call: truncated, with a deleted token, and with their blocks in every order."""

import re
from collections.abc import Callable, Iterator
from itertools import cycle, permutations
from typing import Any

import pytest
from parsing import TOOLS, is_json, read
from written_calls import WHOLE

from server.parsers.harmony import HARMONY_REASONING
from server.parsers.output_parser import OutputParser
from server.parsers.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from server.parsers.stream.base import Parser
from server.parsers.tool.base import CallFinder, ToolCallParser

TOKEN = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|\w+|\s+|.", re.DOTALL)
"""A token: a tag, a word, whitespace or another character."""
WORDS = ("Alpha", "Bravo", "Charlie", "Oslo")
"""Words of the reasoning, the text and an argument, which no answer may lose."""
SHOWN = "minimax_m2_append_think"
REASONING = sorted(
    {
        form: name
        for name, form in REASONING_FORMATS.items()
        if name not in ("openai_gptoss", SHOWN)
    }.values()
)
"""One name per format."""
SAMPLES = {
    name: max((text for family, text, *_ in WHOLE if family == name and "Oslo" in text), key=len)
    for name in sorted(TOOL_CALL_FORMATS)
    if name in {family for family, text, *_ in WHOLE if "Oslo" in text}
}
PAIRS = [(calls, thinking) for calls, thinking in zip(SAMPLES, cycle(REASONING), strict=False)]
ALL_PAIRS = [(calls, thinking) for calls in SAMPLES for thinking in REASONING]


def parsers_of(calls: str, thinking: str) -> Callable[[], Parser]:
    """The parsers of an answer that begins in the reasoning."""
    family = TOOL_CALL_FORMATS[calls]
    reasoning = HARMONY_REASONING if calls == "openai" else REASONING_FORMATS[thinking]

    def make() -> Parser:
        return OutputParser(
            reasoning.parser(is_inside=True, calls=CallFinder(family, TOOLS)),
            ToolCallParser(family, TOOLS),
            lambda: "ID",
        )

    return make


def blocks_of(calls: str, thinking: str) -> list[str]:
    """Blocks of an answer: reasoning, text, a call and text."""
    if calls == "openai":
        final = "<|start|>assistant<|channel|>final<|message|>"
        return [
            "Alpha<|end|>",
            f"{final}Bravo<|end|>",
            f"<|start|>assistant{SAMPLES[calls]}",
            f"{final}Charlie<|end|>",
        ]
    end = REASONING_FORMATS[thinking].end_tags[0]
    return [f"Alpha{end}", "\nBravo.\n", SAMPLES[calls], "\nCharlie.\n"]


def check(make: Callable[[], Parser], text: str, *, is_cut: bool = False) -> Any:
    """Assert that a stream of characters equals the whole answer and that neither loses a word."""
    whole = read(make, [text], is_cut=is_cut)
    thought, said, calls, broken = whole

    assert read(make, list(text), is_cut=is_cut) == whole, text
    output = " ".join([thought, said, *(f"{name} {arguments}" for name, arguments, _ in calls)])
    for word in WORDS:
        assert output.count(word) >= min(1, text.count(word)), (word, text, whole)
    for place, (_, arguments, _) in enumerate(calls):
        assert place in broken or is_json(arguments)
    return whole


def check_mutations(calls: str, thinking: str) -> None:
    make, blocks = parsers_of(calls, thinking), blocks_of(calls, thinking)
    text = "".join(blocks)
    found = check(make, text)
    assert found[2][0][0] == "get_weather" and not found[3]
    assert ("Alpha" in found[0], "Charlie" in found[1]) == (True, True)

    for mutation in (*prefixes_of(text), *deletions_of(text), *orders_of(blocks)):
        check(make, mutation)
    for prefix in prefixes_of(text):
        check(make, prefix, is_cut=True)


def prefixes_of(text: str) -> Iterator[str]:
    tokens = TOKEN.findall(text)
    return ("".join(tokens[:end]) for end in range(len(tokens)))


def deletions_of(text: str) -> Iterator[str]:
    tokens = TOKEN.findall(text)
    return ("".join(tokens[:at] + tokens[at + 1 :]) for at in range(len(tokens)))


def orders_of(blocks: list[str]) -> Iterator[str]:
    return map("".join, permutations(blocks))


@pytest.mark.parametrize(("calls", "thinking"), PAIRS)
def test_streaming_a_mutated_answer_equals_parsing_it_whole_and_loses_no_word(
    calls: str, thinking: str
) -> None:
    check_mutations(calls, thinking)


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "thinking"), ALL_PAIRS)
def test_a_mutated_answer_of_any_pair_of_parsers_loses_no_word(calls: str, thinking: str) -> None:
    check_mutations(calls, thinking)

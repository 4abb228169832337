"""Answers in channels: reasoning, text and calls, for every split of the text."""

from functools import partial
from typing import Any

import pytest
from parsing import TOOLS, good_calls, read_every_way

from server.parsers.harmony import HARMONY_REASONING, HARMONY_TOOL_CALLS
from server.parsers.output_parser import OutputParser
from server.parsers.tool.base import ToolCallParser

THINKS = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
)
OSLO = '{"city": "Oslo"}'


def parser(*, is_inside: bool = False, has_tools: bool = True) -> OutputParser:
    calls = ToolCallParser(HARMONY_TOOL_CALLS, TOOLS) if has_tools else None
    return OutputParser(HARMONY_REASONING.parser(is_inside=is_inside), calls, lambda: "ID")


@pytest.mark.parametrize(
    ("text", "thought", "answer", "calls"),
    [
        (f"{THINKS}{FINAL}Yes.", "Hm.", "Yes.", []),
        (f"{THINKS}\n{FINAL}Yes.<|return|>", "Hm.", "Yes.", []),
        ("<|channel|>final<|message|>Yes.", "", "Yes.", []),
        ("Yes <|chan", "", "Yes <|chan", []),
        (f"{THINKS}<|start|>assistant{THINKS}{FINAL}Yes.", "Hm.\nHm.", "Yes.", []),
        ("<|channel|>analysis<|message|>Hm", "Hm", "", []),
        (f"{THINKS}{CALL}{OSLO}<|call|>", "Hm.", "", [OSLO]),
        (f"{THINKS}{CALL}{OSLO}", "Hm.", "", [OSLO]),
        (f"{THINKS}{CALL}", "Hm.", "", ["{}"]),
        (
            f"<|channel|>commentary<|message|>Let me see.<|end|>{CALL}{OSLO}<|call|>",
            "",
            "Let me see.",
            [OSLO],
        ),
        (
            f" to=functions.get_weather<|channel|>commentary json<|message|>{OSLO}<|call|>",
            "",
            "",
            [OSLO],
        ),
        (
            f"{THINKS}<|start|>assistant to=get_weather<|channel|>analysis code<|message|>{OSLO}",
            "Hm.",
            "",
            [OSLO],
        ),
        (f"{THINKS}{CALL}{OSLO}<|end|>{CALL}{OSLO}<|call|>", "Hm.", "", [OSLO, OSLO]),
        (
            f"<|channel|>commentary<|message|>So.<|end|>{FINAL}Yes.",
            "",
            "So.\nYes.",
            [],
        ),
        # A message to the model itself, or to a tool that is not in the request, is reasoning.
        *(
            (
                f"<|channel|>commentary to={to}<|message|>1 + 1<|end|>{FINAL}Yes.",
                "1 + 1",
                "Yes.",
                [],
            )
            for to in ("assistant", "python", "browser.search code")
        ),
        ("<|start|>assistant without an end", "", "<|start|>assistant without an end", []),
    ],
)
def test_channels_are_separated_for_every_split(
    text: str, thought: str, answer: str, calls: list[str]
) -> None:
    found = read_every_way(parser, text)

    assert found[:2] == (thought, answer)
    assert [call[:2] for call in found[2]] == [["get_weather", call] for call in calls]
    assert found[3] == []


def test_invalid_json_arguments_are_text() -> None:
    found = read_every_way(parser, f"{THINKS}{CALL}oops<|call|>")

    assert good_calls(found) == []
    assert "oops" in found[1]


def test_an_answer_may_continue_the_reasoning_of_its_prompt() -> None:
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"

    found = read_every_way(
        partial(parser, is_inside=True, has_tools=False), f"Hm.<|end|>{FINAL}Yes. "
    )

    assert found[:2] == ("Hm.", "Yes. ")
    assert HARMONY_REASONING.starts_in_reasoning(prompt)
    assert not HARMONY_REASONING.starts_in_reasoning("<|start|>assistant")


@pytest.mark.parametrize("length", [3, 30])
def test_a_call_cut_by_length_keeps_its_partial_arguments(length: int) -> None:
    text = f'{CALL}{{"city": "{"x" * length}'

    found: Any = read_every_way(parser, text, is_cut=True)

    assert found[2] == [["get_weather", f'{{"city": "{"x" * length}', "ID"]]

"""Tool calls before the end tag of the reasoning, for every split of the text."""

from collections.abc import Callable
from typing import Any

import pytest
from parsing import good_calls, read_every_way

from server.parsers.output_parser import OutputParser
from server.parsers.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from server.parsers.tool.base import (
    MAX_NAME_CHARACTERS,
    PIECE_CHARACTERS,
    CallFinder,
    ToolCallParser,
)

TOOLS: Any = {"f": {"properties": {"city": {"type": "string"}}}}
CODER = "<tool_call>\n<function=f>\n<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f<arg_key>city</arg_key><arg_value>{}</arg_value></tool_call>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"city": "A"}<|tool_call_end|><|tool_calls_section_end|>'
)
DEEPSEEK = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>f"
    '<\uff5ctool\u2581sep\uff5c>{"city": "A"}'
    "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
)
MINIMAX = (
    '<minimax:tool_call><invoke name="f"><parameter name="city">A</parameter></invoke>'
    "</minimax:tool_call>"
)
MUSE = '<atem:invoke name="f"><atem:parameter name="city">A</atem:parameter></atem:invoke>'
HERMES = '<tool_call>{"name": "f", "arguments": {"city": "A"}}</tool_call>'
A = {"city": "A"}

CASES: list[tuple[str, str, str, str, str, list[Any]]] = [
    ("qwen3", "qwen3_coder", f"hm\n{CODER}", "hm", "", [A]),
    ("qwen3", "qwen3_coder", f"{CODER}", "", "", [A]),
    ("qwen3", "qwen3_coder", f"hm\n{CODER}\n{CODER}", "hm", "", [A, A]),
    ("qwen3", "qwen3_coder", f"hm\n{CODER}\n</think>\n\nOk.", "hm", "Ok.", [A]),
    ("qwen3", "qwen3_coder", f"use <tool_call> so\n</think>{CODER}", "use <tool_call> so", "", [A]),
    ("qwen3", "qwen3_coder", f"use <tool_call>, {CODER}", "use <tool_call>,", "", [A]),
    ("qwen3", "qwen3_coder", "use <tool_call>", "use <tool_call>", "", []),
    ("qwen3", "qwen3_coder", "<tool_call>" + "x" * 2000, "<tool_call>" + "x" * 2000, "", []),
    ("glm45", "glm45", f"hm{GLM.format('</think>')}</think>", "hm", "", [{"city": "</think>"}]),
    ("kimi_k2", "kimi_k2", f"hm {KIMI}", "hm", "", [A]),
    ("deepseek_v3", "deepseek_v31", f"hm {DEEPSEEK}", "hm", "", [A]),
    ("minimax_m2", "minimax_m2", f"hm {MINIMAX}", "hm", "", [A]),
    ("qwen3", "hermes", f"hm {HERMES}</think> {HERMES}", "hm", "", [A, A]),
    ("mistral", "mistral", 'hm[TOOL_CALLS]f[ARGS]{"city": "A"}', "hm", "", [A]),
    ("granite", "granite", f"hm {HERMES}", "hm", "", [A]),
    ("qwen3", "hermes", f"hm</think>{HERMES}</tool_call> x</tool_call>", "hm", "x", [A]),
    # Reasoning tags in an argument are text.
    (
        "mistral",
        "mistral",
        'hm[/THINK]Ok[TOOL_CALLS]f[ARGS]{"city": "[THINK][/THINK]</think>"}',
        "hm",
        "Ok",
        [{"city": "[THINK][/THINK]</think>"}],
    ),
    (
        "gemma4",
        "gemma4",
        'hm<channel|><|tool_call>call:f{city:<|"|><|channel>A<channel|><|"|>}<tool_call|>',
        "hm",
        "",
        [{"city": "<|channel>A<channel|>"}],
    ),
    # A drafted call in the reasoning is not a call.
    ("muse_glimmer", "muse_glimmer", f"{MUSE}<|eom|>Ok", MUSE, "Ok", []),
    ("qwen3", "llama3_json", '{"name": "f", "parameters": {}}</think>Ok', "{}", "Ok", []),
    ("qwen3", "xlam", '```json\n[{"name": "f", "arguments": {}}]\n```</think>Ok', "{}", "Ok", []),
    ("qwen3", "phi4_mini_json", 'functools[{"name": "f"}]</think>Ok', "{}", "Ok", []),
]


def parser_of(thinking: str, name: str) -> Callable[[], OutputParser]:
    calls = TOOL_CALL_FORMATS[name]

    def make() -> OutputParser:
        reasoning = REASONING_FORMATS[thinking].parser(
            is_inside=True, calls=CallFinder(calls, TOOLS)
        )
        return OutputParser(reasoning, ToolCallParser(calls, TOOLS), lambda: "ID")

    return make


@pytest.mark.parametrize(("thinking", "name", "text", "thought", "content", "calls"), CASES)
def test_a_call_ends_the_reasoning_for_every_split(
    thinking: str, name: str, text: str, thought: str, content: str, calls: list[Any]
) -> None:
    found = read_every_way(parser_of(thinking, name), text)

    assert found[0] == (text.partition("</think>")[0] if thought == "{}" else thought)
    assert found[1] == content
    assert good_calls(found) == [("f", arguments) for arguments in calls]


def test_a_cut_call_in_the_reasoning_keeps_its_partial_arguments() -> None:
    text = f"hm\n{CODER[: CODER.index('A') + 1]}"

    found = read_every_way(parser_of("qwen3", "qwen3_coder"), text, is_cut=True)

    assert found[:3] == ("hm", "", [["f", '{"city": "A', "ID"]])


@pytest.mark.parametrize(
    ("name", "word"),
    [("hermes", "<tool_call>"), ("qwen3_coder", "<function="), ("kimi_k2", "<|tool_call_begin|>")],
)
def test_many_markers_in_one_piece_are_parsed_in_linear_time(
    name: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, fed = ToolCallParser.feed, list[int]()

    def counted(self: ToolCallParser, text: str) -> Any:
        fed.append(len(text))
        return feed(self, text)

    monkeypatch.setattr(ToolCallParser, "feed", counted)
    text = word * 300
    parser = REASONING_FORMATS["qwen3"].parser(
        is_inside=True, calls=CallFinder(TOOL_CALL_FORMATS[name], TOOLS)
    )
    parser.feed(text)
    parser.finish(is_cut=False)

    # Each marker was parsed with the 1,024 characters after it, in quadratic time.
    assert sum(fed) / 300 <= MAX_NAME_CHARACTERS + 2 * PIECE_CHARACTERS

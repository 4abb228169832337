"""Calls with a missing tag, bracket or quote, with text around them, and with mismatched types."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from delays import least, machine_s
from parsing import good_calls, parser_of, read_every_way

from server.parsers.output_parser import OutputParser
from server.parsers.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from server.parsers.stream.base import ToolCallArguments
from server.parsers.stream.text_stream import MAX_LOOKAHEAD, MAX_REREAD_CHARACTERS
from server.parsers.tool.base import ToolCallParser

D = "\uff5cDSML\uff5c"
M3 = "]<]minimax[>["
TOOLS: Any = {
    "h": {
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        }
    },
    "f": {"properties": {"city": {"type": "string"}}},
    "g": {},
}
ABC = {"s": "abc", "n": 5}


def coder(inner: str) -> str:
    return f"<tool_call>\n<function=h>\n{inner}\n</function>\n</tool_call>"


def invoke(*parameters: tuple[str, str, str]) -> str:
    written = "\n".join(
        f'<{D}parameter name="{name}" string="{is_text}">{value}</{D}parameter>'
        for name, is_text, value in parameters
    )
    calls = f"{D}function_calls"
    return f'<{calls}>\n<{D}invoke name="h">\n{written}\n</{D}invoke>\n</{calls}>'


def kimi(*calls: str) -> str:
    return "<|tool_call_begin|>" + "<|tool_call_begin|>".join(
        f"functions.g:{i}<|tool_call_argument_begin|>{{}}<|tool_call_end|>{after}"
        for i, after in enumerate(calls)
    )


SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
JSON_F = '{"name": "f", "parameters": {"city": "Oslo"}}'
OSLO = ("f", {"city": "Oslo"})
G: Any = ("g", {})

CASES: list[tuple[str, str, str, list[Any]]] = [
    # A tag is missing.
    (
        "qwen3_coder",
        "<tool_call><function=h><parameter=s>\nabc\n<parameter=n>\n5\n</parameter></function>"
        "</tool_call>",
        "",
        [("h", ABC)],
    ),
    ("qwen3_coder", "<tool_call><function=h><parameter=s>abc</function></tool_call>", "", "abc"),
    ("qwen3_coder", "<tool_call><function=h><parameter=s>abc</tool_call>", "", "abc"),
    ("qwen3_coder", "<tool_call><function=h><parameter=s>abc</function>", "", "abc"),
    ("qwen3_coder", "<tool_call><function=h><parameter=s>abc</parameter>", "", "abc"),
    ("qwen3_coder", "<tool_call><function=h><parameter=s>abc</parameter></tool_call>", "", "abc"),
    ("qwen3_coder", coder("<parameter=s\nabc\n</parameter>"), "", "abc"),
    ("qwen3_coder", "<tool_call><function=g></tool_call>", "", [G]),
    (
        "qwen3_coder",
        "<tool_call><function=h><parameter=s>abc</parameter><function=g></function></tool_call>",
        "",
        [("h", {"s": "abc"}), G],
    ),
    ("seed_oss", "<function=h><parameter=s>abc</parameter></function></seed:tool_call>", "", "abc"),
    (
        "glm45",
        "<tool_call>h\n<arg_key>s</arg_key>\n<arg_value>abc\n<arg_key>n</arg_key>\n"
        "<arg_value>5</arg_value>\n</tool_call>",
        "",
        [("h", ABC)],
    ),
    (
        "glm45",
        "<tool_call>h\n<arg_key>s</arg_key>\nabc</arg_value>\n<arg_key>n<arg_value>5</arg_value>\n"
        "</tool_call>",
        "",
        [("h", ABC)],
    ),
    ("glm45", "<tool_call>h\ns</arg_key>\n<arg_value>abc</tool_call>", "", "abc"),
    (
        "minimax_m2",
        '<invoke name="h"><parameter name="s">abc</parameter></invoke></minimax:tool_call>',
        "",
        "abc",
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="h"><parameter name="s">abc<parameter name="n">5'
        "</parameter></invoke></minimax:tool_call>",
        "",
        [("h", ABC)],
    ),
    (
        "step3",
        '<steptml:invoke name="h"><steptml:parameter name="s">abc</steptml:invoke>',
        "",
        "abc",
    ),
    ("hermes", '<tool_call>{"name": "h", "arguments": {"s": "abc"}</tool_call>', "", "abc"),
    ("hermes", '<tool_call>{"name": "h", "arguments": {"s": "abc"</tool_call> x', "x", "abc"),
    ("hermes", '<tool_call>{"name": "h", "arguments": {"s": "abc"}', "", "abc"),
    (
        "hermes",
        '<tool_call>{"name": "h", "arguments": {"n": [1, 2}}</tool_call>',
        "",
        {"n": [1, 2]},
    ),
    (
        "hermes",
        '<tool_call>{"name": "h", "arguments": {"n": [1, 2,],}}</tool_call>',
        "",
        {"n": [1, 2]},
    ),
    (
        "hermes",
        '<tool_call>{"name": "h", "arguments": {"s": "\\d\\u1"}}</tool_call>',
        "",
        {"s": "\\d\\u1"},
    ),
    ("kimi_k2", kimi("").replace("{}", '{"a": 1'), "", [("g", {"a": 1})]),
    ("lfm2", "<|tool_call_start|>[h(s='abc'<|tool_call_end|>", "", "abc"),
    ("lfm2", "<|tool_call_start|>[h(s='abc'], g()]<|tool_call_end|>", ", g()]", "abc"),
    ("gemma4", '<|tool_call>call:h{s:<|"|>abc<|"|><tool_call|>', "", "abc"),
    ("gemma4", '<|tool_call>call:h{s:abc<|"|>,n:5}<tool_call|>', "", [("h", ABC)]),
    # JSON in the tags of a format without JSON.
    ("qwen3_coder", coder('{"s": "abc", "n": 5}'), "", [("h", ABC)]),
    ("qwen3_coder", coder('{"name": "h", "arguments": {"s": "abc"}}'), "", "abc"),
    ("qwen3_coder", coder('{"s": "</function>"} ok'), "ok", {"s": "</function>"}),
    ("qwen3_coder", '<function=h>{"s": "abc"</function>', "", "abc"),
    ("qwen3_coder", '<tool_call><function=h>{"s": "abc"}</tool_call>', "", "abc"),
    ("qwen3_coder", "<tool_call><function=g>{}</function></tool_call>", "", [G]),
    ("qwen3_coder", f"<tool_call>[{JSON_F}, {JSON_F}]</tool_call>", "", [OSLO, OSLO]),
    ("seed_oss", '<seed:tool_call><function=h>{"s": "abc"}</function>', "", "abc"),
    ("glm45", '<tool_call>h\n{"s": "abc"}\n</tool_call>', "", "abc"),
    ("glm45", '<tool_call>h{"s": "abc"}</tool_call>', "", "abc"),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="h">{"s": "abc"}</invoke></minimax:tool_call>',
        "",
        "abc",
    ),
    (
        "minimax_m3",
        f'{M3}<tool_call>\n{M3}<invoke name="h">{{"s": "abc"}}{M3}</invoke>\n{M3}</tool_call>',
        "",
        "abc",
    ),
    ("minimax_m3", f"{M3}<tool_call>{JSON_F}{M3}</tool_call>", "", [OSLO]),
    ("deepseek_v32", f'<{D}invoke name="h">{{"s": "abc"}}</{D}invoke>', "", "abc"),
    ("minicpm5", '<function name="h">{"s": "abc"}</function>', "", "abc"),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="h" index="1"<|sep|>{"s": "abc"}'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        "",
        "abc",
    ),
    (
        "hunyuan",
        '<tool_calls><tool_call>h<tool_sep>{"s": "abc"}</tool_call></tool_calls>',
        "",
        "abc",
    ),
    ("step3", '<steptml:invoke name="h">{"s": "abc"}</steptml:invoke>', "", "abc"),
    # Tags inside a value are part of the value.
    ("qwen3_coder", coder("<parameter=s>a</function> b</parameter>"), "", {"s": "a</function> b"}),
    (
        "qwen3_coder",
        coder("<parameter=s>a<parameter=z>b</parameter>"),
        "",
        {"s": "a<parameter=z>b"},
    ),
    (
        "glm45",
        "<tool_call>h<arg_key>s</arg_key><arg_value></tool_call>.</arg_value></tool_call>",
        "",
        {"s": "</tool_call>."},
    ),
    # Text before, between and after calls.
    ("qwen3_coder", coder("<parameter=s>abc</parameter>\noops"), "oops", "abc"),
    ("seed_oss", "<seed:tool_call>So: <function=g></function></seed:tool_call> ok", "So: ok", [G]),
    ("qwen3_coder", "<function=other></function>", "<function=other></function>", []),
    ("kimi_k2", f"Hm. {SECTION[0]} a {kimi(' b ', ' c ')}{SECTION[1]} d", "Hm.  d", [G, G]),
    ("kimi_k2", f"{SECTION[0]} no call {SECTION[1]} d", " no call  d", []),
    ("kimi_k2", f"{SECTION[0]} no call", " no call", []),
    ("kimi_k2", kimi(" a "), "a", [G]),
    ("kimi_k2", f"<|tool_call_begin|>junk{kimi('')}", "<|tool_call_begin|>junk", [G]),
    ("llama3_json", f"Let me check.\n{JSON_F}", "Let me check.", [OSLO]),
    ("llama3_json", f"A: {JSON_F}; {JSON_F} More?", "A:  More?", [OSLO, OSLO]),
    ("llama3_json", f"So:\n```json\n{JSON_F}\n```\nok", "So:\n\nok", [OSLO]),
    ("llama3_json", JSON_F.replace("name", "function"), "", [OSLO]),
    ("llama3_json", f'{{"x": 1}}\n{JSON_F}', '{"x": 1}', [OSLO]),
    ("llama3_json", f'{{"x": [{JSON_F}]}}', f'{{"x": [{JSON_F}]}}', []),
    ("llama3_json", '```json\n{"x": 1}\n```', '```json\n{"x": 1}\n```', []),
    ("pythonic", 'Sure. [f(city="Oslo")]', "Sure.", [OSLO]),
    ("pythonic", '[a.f(city="Oslo")] ok', "ok", [("a.f", {"city": "Oslo"})]),
    ("pythonic", "[f](x) a[f(city=1)]", "[f](x) a[f(city=1)]", []),
    # Values whose type differs from the schema.
    ("deepseek_v32", invoke(("s", "true", "5"), ("n", "true", "5")), "", {"s": "5", "n": 5}),
    (
        "deepseek_v32",
        invoke(("o", "true", '{"x": 1}'), ("s", "false", "null")),
        "",
        {"o": {"x": 1}, "s": "null"},
    ),
    ("deepseek_v32", invoke(("n", "false", "5"), ("s", "false", '"q"')), "", {"n": 5, "s": "q"}),
    ("deepseek_v32", invoke(("x", "true", "5"), ("y", "false", "5")), "", {"x": "5", "y": 5}),
    ("deepseek_v4", invoke(("arguments", "false", '{"s": "abc", "n": 5}')), "", [("h", ABC)]),
    ("deepseek_v4", invoke(("input", "true", '{"s": "abc"}')), "", "abc"),
    ("deepseek_v4", invoke(("input", "false", '{"z": 1}')), "", {"input": {"z": 1}}),
    (
        "deepseek_v4",
        invoke(("input", "false", '{"n": 1}'), ("n", "false", "5")),
        "",
        {"input": {"n": 1}, "n": 5},
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="h"><parameter name="s">\nabc\n\n</parameter>'
        "</invoke></minimax:tool_call>",
        "",
        {"s": "\nabc\n\n"},
    ),
    # Almost valid Python.
    ("lfm2", "<|tool_call_start|>[h(s={'a', 'b'})]<|tool_call_end|>", "", {"s": ["a", "b"]}),
    (
        "lfm2",
        "<|tool_call_start|>[h(s={'a': {'b'}, 2: []}, n={})]<|tool_call_end|>",
        "",
        {"s": {"a": ["b"], "2": []}, "n": {}},
    ),
    (
        "lfm2",
        "<|tool_call_start|>[h(s='sed -n '1,9p' x.py')]<|tool_call_end|>",
        "",
        {"s": "sed -n '1,9p' x.py"},
    ),
    (
        "lfm2",
        "<|tool_call_start|>[h(s='python -c \"print(f('a'))\"'), g()]<|tool_call_end|>",
        "",
        [("h", {"s": "python -c \"print(f('a'))\""}), G],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[h(s='it's', n=['it's', 'b'])]<|tool_call_end|>",
        "",
        {"s": "it's", "n": ["it's", "b"]},
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_recovered_for_every_split(
    name: str, text: str, content: str, calls: Any
) -> None:
    found = read_every_way(partial(parser_of, name, tools=TOOLS), text)

    if isinstance(calls, str):
        calls = {"s": calls}
    if isinstance(calls, dict):
        calls = [("h", calls)]
    assert found[3] == []
    assert json.dumps(good_calls(found)) == json.dumps(calls)
    assert found[1] == content


def test_an_argument_without_its_end_is_not_completed() -> None:
    text = "<tool_call><function=h><parameter=s>\nrm -r /tmp"

    found = read_every_way(partial(parser_of, "qwen3_coder", tools=TOOLS), text)

    assert found[2][0][1] == '{"s": "rm -r /tmp' and found[3] == [0]


def test_documented_limits_equal_the_code() -> None:
    page = " ".join((Path(__file__).parents[4] / "docs" / "tools.md").read_text("utf-8").split())

    assert f"at most {MAX_LOOKAHEAD:,} characters after it" in page
    assert f"up to {MAX_REREAD_CHARACTERS:,} characters" in page


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("kimi_k2", "<|tool_call_begin|>"),
        ("hermes", '<tool_call>{"arguments": {"a": "'),
        ("llama3_json", '{"arguments": [{'),
        ("qwen3_coder", "<tool_call><function=h><parameter=s></function>\n"),
        ("lfm2", "<|tool_call_start|>[h(s='"),
        ("llama3_json", "["),
    ],
)
def test_text_with_many_markers_is_parsed_in_linear_time(name: str, word: str) -> None:
    text = word * 3000
    parser = parser_of(name, tools=TOOLS)
    started = time.process_time()

    for start in range(0, len(text), 100):
        parser.feed(text[start : start + 100])
    parser.finish(is_cut=False)

    # Rereading the whole text for each marker takes minutes.
    assert time.process_time() - started < machine_s(10)


LONG = "[" + "1," * 60_000 + "1]"
LONG_TOOLS: Any = {"h": {"properties": {"l": {"type": "array"}}}}
CODER = ("<tool_call><function=h><parameter=l>", "</parameter></function></tool_call>")
ELEMENTS = (
    f'{M3}<tool_call>{M3}<invoke name="h">{M3}<l>',
    f"{M3}</l>{M3}</invoke>{M3}</tool_call>",
)
HERMES = ('<tool_call>{"name": "h", "arguments": "{\\"l\\": ', '}"}</tool_call>')
LONG_VALUES: dict[str, tuple[str, str, str, str, Any]] = {
    "a list": ("qwen3_coder", *CODER, LONG, json.loads(LONG)),
    "nested elements": ("minimax_m3", *ELEMENTS, LONG, json.loads(LONG)),
    "a list in a string": ("hermes", *HERMES, LONG, json.loads(LONG)),
    "a list in Python": ("qwen3_coder", *CODER, LONG.replace("1]", "None]"), None),
    "a list with a raw line break": ("qwen3_coder", *CODER, LONG.replace("1]", '"\n"]'), "\n"),
    "a list without its end": ("qwen3_coder", *CODER, LONG[:-1], None),
}
"""Values by name: format, text before and after, value, and the list or its last entry; None: the
value becomes a string."""


@pytest.mark.parametrize("name", LONG_VALUES)
def test_the_end_of_a_long_value_takes_little_time(name: str) -> None:
    form, before, after, value, expected = LONG_VALUES[name]
    limit_s = machine_s(0.1)
    found: list[Any] = []

    def end_s() -> float:
        parser = parser_of(form, tools=LONG_TOOLS)
        events = [*parser.feed(before)]
        for start in range(0, len(value), 1_000):
            events += parser.feed(value[start : start + 1_000])
        start_s = time.thread_time()
        events += parser.feed(after)
        took_s = time.thread_time() - start_s
        events += parser.finish(is_cut=False)
        written = "".join(e.text for e in events if isinstance(e, ToolCallArguments))
        found[:] = [json.loads(written)["l"]]
        return took_s

    # Reading the whole value with corrections took 0.3 s.
    assert least(end_s, limit_s) < limit_s
    if isinstance(expected, list):
        assert found == [expected]
    elif expected is not None:
        assert found[0][-1] == expected
    else:
        assert found == [value]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_endless_whitespace_is_parsed_in_linear_time(name: str) -> None:
    limit_s = machine_s(1.5)

    def parse_s() -> float:
        reasoning = REASONING_FORMATS[name].parser(is_inside=True)
        tools = ToolCallParser(TOOL_CALL_FORMATS["hermes"], TOOLS)
        parser = OutputParser(reasoning, tools, lambda: "ID")
        start_s = time.thread_time()
        for text in ("a", " ", "</think>b", " "):
            for _ in range(1 if len(text) > 1 or text == "a" else 100_000):
                parser.feed(text)
        return time.thread_time() - start_s

    # Each piece was appended to a copy of all earlier whitespace, in 5 s.
    assert least(parse_s, limit_s) < limit_s

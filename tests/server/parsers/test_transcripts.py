"""Answers of models, with the results that other servers' tests expect."""

import json
from functools import partial
from typing import Any

import pytest
from parsing import good_calls, parser_of, read_every_way

from server.parsers.reasoning.tags import ReasoningTagParser
from server.parsers.registry import REASONING_FORMATS

NAMES = ("get_weather", "get_time", "add", "user", "search")
TOOLS: Any = {
    **{name: {} for name in NAMES},
    "user": {
        "properties": {
            "name": {"type": "string"},
            "nick": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "theme": {"type": "string", "enum": ["dark", "none"]},
            "age": {"type": "integer"},
            "ok": {"type": "boolean"},
            "score": {"type": "number"},
            "tags": {"type": "array"},
            "conf": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        }
    },
}
TOKYO: Any = ("get_weather", {"city": "Tokyo"})
TIME: Any = ("get_time", {"timezone": "Asia/Tokyo"})
TYPES: Any = {
    "string": "hello",
    "int": 42,
    "float": 3.14,
    "bool": True,
    "none": None,
    "list": ["a", "b"],
    "object": {"nested": "value"},
    "no_list": [],
    "no_object": {},
}
ESCAPED: Any = {
    "quoted": 'He said "hello"',
    "path": "C:\\Users\\file.txt",
    "lines": "line1\nline2",
    "emoji": "\U0001f389",
}
USER: Any = {
    "name": "none",
    "nick": None,
    "theme": "none",
    "age": 42,
    "ok": True,
    "score": 9.5,
    "tags": ["a"],
    "conf": {"size": 14},
}


def as_json(call: Any, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]})


def json_rows(
    name: str, start: str, end: str, *, opening: str = "", key: str = "arguments", shared: bool
) -> list[Any]:
    """Transcripts of a JSON format; `shared`: several calls share a pair of tags."""

    def written(*calls: Any) -> str:
        texts = [as_json(call, key) for call in calls]
        if shared:
            joined = ", ".join(texts)
            return f"{start}{opening}{joined}{']' if opening else ''}{end}"
        return "\n".join(f"{start}{opening}{text}{']' if opening else ''}{end}" for text in texts)

    first = as_json(("search", {}), key)
    swapped = f'{{"{key}": {json.dumps(TOKYO[1])}, "name": "{TOKYO[0]}"}}'
    return [
        (name, written(TOKYO), "", [TOKYO]),
        (name, written(TOKYO, TIME), "", [TOKYO, TIME]),
        (name, written(("add", TYPES)), "", [("add", TYPES)]),
        (name, written(("add", {})), "", [("add", {})]),
        (name, written(("add", ESCAPED)), "", [("add", ESCAPED)]),
        (name, f"I check. {written(TOKYO)}", "I check.", [TOKYO]),
        (name, written(TOKYO).replace(as_json(TOKYO, key), swapped), "", [TOKYO]),
        (name, written(("search", {})).replace(first, "{not json"), None, []),
        (name, "No call here.", "No call here.", []),
    ]


def tag_rows(name: str, before: str, after: str, argument: str, end: str) -> list[Any]:
    """Transcripts of a format with arguments in tags: `argument` has a key and a value."""

    def written(function: str, arguments: dict[str, str]) -> str:
        inner = "".join(argument.format(key=key, value=value) for key, value in arguments.items())
        return f"{before.format(name=function)}{inner}{end}"

    values = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in USER.items()
    }
    tokyo, time = (written(call[0], call[1]) for call in (TOKYO, TIME))
    code = {"text": "def f(x):\n    return x < 1 && '\"</a>'"}
    return [
        (name, tokyo + after, "", [TOKYO]),
        (name, f"{tokyo}{after}\n{time}{after}", "", [TOKYO, TIME]),
        (name, written("user", values) + after, "", [("user", USER)]),
        (name, written("search", {}) + after, "", [("search", {})]),
        (name, written("search", code) + after, "", [("search", code)]),
        (name, f"I check.\n\n{tokyo}{after}\n\nOk.", "I check.\n\n\n\nOk.", [TOKYO]),
        (name, "No call here.", "No call here.", []),
    ]


D = "\uff5cDSML\uff5c"
B, E, S = (
    f"<\uff5ctool\u2581{word}\uff5c>" for word in ("call\u2581begin", "call\u2581end", "sep")
)
BB, EE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
STEP = [f"<\uff5ctool_{word}\uff5c>" for word in ("calls_begin", "call_begin", "call_end", "sep")]
STEP_END = "<\uff5ctool_calls_end\uff5c>"
INVOKE = '<invoke name="{name}">'
PARAMETER = '<parameter name="{key}">{value}</parameter>'
QWEN = "<parameter={key}>\n{value}\n</parameter>\n"
Q = '<|"|>'

ROWS: list[tuple[str, str, str | None, list[Any]]] = [
    *json_rows("hermes", "<tool_call>\n", "\n</tool_call>", shared=False),
    *json_rows("granite4", "<tool_call> ", " </tool_call>", shared=False),
    *json_rows("granite", "<|tool_call|> ", "", opening="[", shared=True),
    *json_rows("granite-20b-fc", "<function_call> ", "", shared=False),
    *json_rows("jamba", " <tool_calls>", "</tool_calls>", opening="[\n    ", shared=True),
    *json_rows("hunyuan_a13b", "<tool_calls>", "</tool_calls>", opening="[", shared=True),
    *json_rows("phi4_mini_json", "functools", "", opening="[", shared=True),
    *json_rows("mistral", "[TOOL_CALLS] ", "", opening="[", shared=True),
    *json_rows("xlam", "", "", opening="[", shared=True),
    *json_rows("xlam", "```json\n", "\n```", opening="[", shared=True),
    *json_rows("xlam", "<tool_call>", "</tool_call>", opening="[", shared=True),
    *json_rows(
        "internlm", "<|action_start|><|plugin|>", "<|action_end|>", key="parameters", shared=False
    ),
    *json_rows("llama3_json", "<|python_tag|>", "", key="parameters", shared=False)[:1],
    *tag_rows(
        "qwen3_coder", "<tool_call>\n<function={name}>\n", "", QWEN, "</function>\n</tool_call>"
    ),
    *tag_rows(
        "seed_oss",
        "<seed:tool_call>\n<function={name}>",
        "",
        QWEN,
        "</function>\n</seed:tool_call>",
    ),
    *tag_rows(
        "glm47",
        "<tool_call>{name}",
        "",
        "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        "</tool_call>",
    ),
    *tag_rows(
        "glm45",
        "<tool_call>{name}\n",
        "",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        "</tool_call>",
    ),
    *tag_rows(
        "minimax_m2", f"<minimax:tool_call>{INVOKE}", "", PARAMETER, "</invoke></minimax:tool_call>"
    ),
    *tag_rows(
        "deepseek_v32",
        f'<{D}function_calls>\n<{D}invoke name="{{name}}">\n',
        "",
        f'<{D}parameter name="{{key}}" string="false">{{value}}</{D}parameter>\n',
        f"</{D}invoke>\n</{D}function_calls>",
    ),
    *tag_rows(
        "step3",
        f'{STEP[0]}{STEP[1]}<steptml:invoke name="{{name}}">',
        "",
        '<steptml:parameter name="{key}">{value}</steptml:parameter>',
        f"</steptml:invoke>{STEP[2]}{STEP_END}",
    ),
    (
        "step3",
        f'{STEP[0]}{STEP[1]}<steptml:invoke name="add"></steptml:invoke>{STEP[2]}{STEP[3]}{STEP[1]}'
        f'<steptml:invoke name="search"></steptml:invoke>{STEP[2]}{STEP_END}',
        "",
        [("add", {}), ("search", {})],
    ),
    # Values keep whitespace that is not part of the format.
    *(
        (name, text, "", [("search", {"text": value})])
        for value in (" hi ", "  def f():\n    return 1\n")
        for name, text in (
            (
                "minimax_m2",
                f"<minimax:tool_call>{INVOKE.format(name='search')}"
                f"{PARAMETER.format(key='text', value=value)}</invoke></minimax:tool_call>",
            ),
            (
                "glm47",
                f"<tool_call>search<arg_key>text</arg_key><arg_value>{value}</arg_value></tool_call>",
            ),
            (
                "qwen3_coder",
                f"<tool_call><function=search>{QWEN.format(key='text', value=value)}</function>",
            ),
        )
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n</function>\n<tool_call>\n<function=search>\n</function>\n</tool_call>",
        "",
        [("add", {}), ("search", {})],
    ),
    # Arguments as a JSON string; a call without its last bracket; a list in the middle.
    (
        "granite4",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": [[1.5, 2]]}"}</tool_call>',
        "",
        [("add", {"a": [[1.5, 2]]})],
    ),
    ("granite4", f"A: <tool_call> {as_json(TOKYO)} </tool_call> B: ", "A:  B:", [TOKYO]),
    ("hermes", f"<tool_call>\n{as_json(TOKYO)}", "", [TOKYO]),
    ("hermes", f"Hi!<tool_call>{as_json(TOKYO)}</tool_call>", "Hi!", [TOKYO]),
    ("xlam", f"<think>Hm.</think>[{as_json(TOKYO)}]", "<think>Hm.</think>", [TOKYO]),
    ("xlam", f"I check.[TOOL_CALLS][{as_json(TOKYO)}]", "I check.", [TOKYO]),
    ("mistral", f"[TOOL_CALLS][{as_json(TOKYO)}] and text", "and text", [TOKYO]),
    ("mistral", '[TOOL_CALLS]add{"a": 3.5, "b": 4}', "", [("add", {"a": 3.5, "b": 4})]),
    (
        "mistral",
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]search[ARGS]{"q": {}}',
        "",
        [("add", {"a": 1}), ("search", {"q": {}})],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"arguments": {"name": "John"}, "name": "add"}]',
        "",
        [("add", {"name": "John"})],
    ),
    (
        "hunyuan_a13b",
        f"<tool_calls>[{as_json(TOKYO)}]</tool_calls>\n</answer>",
        "</answer>",
        [TOKYO],
    ),
    ("phi4_mini_json", "functools[ This is text ]", "functools[ This is text ]", []),
    ("internlm", "<|action_start|><|plugin|>not json<|action_end|>", None, []),
    # A name between two special tokens.
    (
        "deepseek_v31",
        f'A{BB}{B}add{S}{{"x":1}}{E}{B}search{S}{{"y":2}}{E}{EE} b',
        "A b",
        [("add", {"x": 1}), ("search", {"y": 2})],
    ),
    (
        "deepseek_v3",
        f'{BB}{B}function{S}get_weather\n```json\n{{"city": "Tokyo"}}\n```{E}{EE}',
        "",
        [TOKYO],
    ),
    (
        "deepseek_v3",
        f'{BB}{B}function{S}get_weather\n```json\n{{"city": "Tokyo"\n```{E}{EE}',
        "",
        [TOKYO],
    ),
    (
        "kimi_k2",
        "I check. <|tool_calls_section_begin|> noise <|tool_call_begin|>get_weather:0 "
        '<|tool_call_argument_begin|>{"city": "Tokyo"} <|tool_call_end|><|tool_calls_section_end|>',
        "I check.",
        [TOKYO],
    ),
    ("kimi_k2", "A. <|tool_calls_section_begin|><|tool_calls_section_end|>", "A. ", []),
    # Python-like calls.
    (
        "pythonic",
        "[add(name='John', age=37, at={'c': 'SF'}, role=None, ok=True, tags=['J', 'K'])]",
        "",
        [
            (
                "add",
                {
                    "name": "John",
                    "age": 37,
                    "at": {"c": "SF"},
                    "role": None,
                    "ok": True,
                    "tags": ["J", "K"],
                },
            )
        ],
    ),
    (
        "pythonic",
        "[add(data={}), search(steps=[])]",
        "",
        [("add", {"data": {}}), ("search", {"steps": []})],
    ),
    (
        "pythonic",
        r"[add(city='Martha\'s', metric='\"cool\"')]",
        "",
        [("add", {"city": "Martha's", "metric": '"cool"'})],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[add(a='LA', b='C'), search(n='D', age=9)]",
        "",
        [("add", {"a": "LA", "b": "C"}), ("search", {"n": "D", "age": 9})],
    ),
    (
        "lfm2",
        "A.<|tool_call_start|> [a.b(l=[{'n': 'x', 'q': 2}])]<|tool_call_end|>\nB.",
        "A.\nB.",
        [("a.b", {"l": [{"n": "x", "q": 2}]})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[add(month=07, day=05)]<|tool_call_end|>",
        "",
        [("add", {"month": 7, "day": 5})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[add(c='grep -F \"]\" x')]<|tool_call_end|>",
        "",
        [("add", {"c": 'grep -F "]" x'})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[add(c='a << EOF\nprint(1)\nEOF')]<|tool_call_end|>",
        "",
        [("add", {"c": "a << EOF\nprint(1)\nEOF"})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[add(c='printf a\0b')]<|tool_call_end|>",
        "",
        [("add", {"c": "printf a\0b"})],
    ),
    # Gemma formats.
    (
        "functiongemma",
        "I check.<start_function_call>call:get_weather{city:<escape>Tokyo<escape>}"
        "<end_function_call>",
        "I check.",
        [TOKYO],
    ),
    (
        "gemma4",
        f"<|tool_call>call:add{{a:{Q}Paris, France{Q},n:42,ok:true,s:3.14,z:null}}<tool_call|>",
        "",
        [("add", {"a": "Paris, France", "n": 42, "ok": True, "s": 3.14, "z": None})],
    ),
    (
        "gemma4",
        f"<|tool_call>call:add{{o:{{{Q}i{Q}:{Q}v{Q}}},l:[[{Q}a]b{Q},{Q}c{Q}],108.]}}<tool_call|><div>",
        "<div>",
        [("add", {"o": {"i": "v"}, "l": [["a]b", "c"], "108."]})],
    ),
    ("gemma4", "<|tool_call>call:add-b{key:}<tool_call|>", "", [("add-b", {"key": ""})]),
    (
        "gemma4",
        f"<|tool_call>call:add{{h:{Q}<!DOCTYPE html>\n<b>{Q}}}<tool_call|>",
        "",
        [("add", {"h": "<!DOCTYPE html>\n<b>"})],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ROWS)
def test_a_transcript_has_the_calls_that_other_servers_find(
    name: str, text: str, content: str | None, calls: list[Any]
) -> None:
    found = read_every_way(partial(parser_of, name, tools=TOOLS), text)

    assert json.dumps(good_calls(found)) == json.dumps(calls)
    assert found[3] == []
    assert found[1] == (text if content is None else content)


THOUGHT, REST = "This is\nreasoning", "This is\nthe rest"
REASONING_ROWS = [
    ("minimax_m2", True, f"{THOUGHT}</think>{REST}", THOUGHT, REST),
    ("minimax_m2", True, f"{THOUGHT}</think>", THOUGHT, ""),
    ("minimax_m2", True, THOUGHT, THOUGHT, ""),
    ("minimax_m2", True, f"</think>{REST}", "", REST),
    ("minimax_m2", True, "", "", ""),
    ("minimax_m2", True, "```python\nx\n```</think>Ok.", "```python\nx\n```", "Ok."),
    ("deepseek_r1", True, f"<think>{THOUGHT}</think>{REST}", THOUGHT, REST),
    ("deepseek_v3", False, REST, "", REST),
    ("qwen3", False, f"<think>{THOUGHT}</think>{REST}", THOUGHT, REST),
    ("qwen3", True, f"{THOUGHT}</think>{REST}", THOUGHT, REST),
    ("glm45", False, f"<think></think>{REST}", "", REST),
    ("kimi_k2", False, f"<think>{THOUGHT}</think>{REST}", THOUGHT, REST),
    ("step3", True, f"{THOUGHT}</think>{REST}", THOUGHT, REST),
    ("seed_oss", False, f"<seed:think>{THOUGHT}</seed:think>{REST}", THOUGHT, REST),
    ("mistral", False, f"[THINK]{THOUGHT}[/THINK]{REST}", THOUGHT, REST),
    ("gemma4", True, f"{THOUGHT}<channel|>{REST}", THOUGHT, REST),
    ("gemma4", False, "<|channel>thought\n<channel|>", "", ""),
    ("gemma4", False, f"<|channel>thought\n{THOUGHT}", THOUGHT, ""),
    (
        "granite",
        False,
        f"Here is my thought process:{THOUGHT}Here is my response:{REST}",
        THOUGHT,
        REST,
    ),
    (
        "hunyuan_a13b",
        False,
        f"<think>\n{THOUGHT}\n</think>\n<answer>\n{REST}\n</answer>",
        THOUGHT,
        REST,
    ),
    ("hunyuan_a13b", False, f"<think>\n{THOUGHT}\n</think>\n<answer>\n", THOUGHT, ""),
]


@pytest.mark.parametrize(("name", "is_inside", "text", "thought", "rest"), REASONING_ROWS)
def test_a_transcript_has_the_reasoning_that_other_servers_find(
    name: str, is_inside: bool, text: str, thought: str, rest: str
) -> None:
    found = read_every_way(
        partial(ReasoningTagParser, REASONING_FORMATS[name], is_inside=is_inside), text
    )

    assert found[:2] == (thought, rest)

"""Reasoning is separated from the answer, for every split of the text."""

from functools import partial

import pytest
from parsing import TOOLS, good_calls, read, read_every_way

from server.parsers.output_parser import OutputParser
from server.parsers.reasoning.tags import ReasoningTagParser
from server.parsers.registry import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    reasoning_parser_of,
    tool_parser_of,
)
from server.parsers.tool.base import ToolCallParser

THINK = REASONING_FORMATS["qwen3"]
QUOTED = '<tool_call>{"name": "now", "arguments": {"a": "</think>"}}</tool_call>'
CASES = [
    ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", False, "Yes <think> no.", "", "Yes <think> no."),
    ("qwen3", False, " 1 < 2 ", "", " 1 < 2 "),
    ("qwen3", False, "<think>\n\n</think>\n\nYes.\n", "", "Yes.\n"),
    ("qwen3", False, "<think>never closed\n", "never closed", ""),
    ("qwen3", True, "\nHm </thin k>.\n</think>Yes.", "Hm </thin k>.", "Yes."),
    ("deepseek_r1", True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    # An end tag before the answer is dropped.
    ("deepseek_r1", False, "</think>Yes.", "", "Yes."),
    ("qwen3", False, "\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", False, "Yes </think> no.", "", "Yes </think> no."),
    ("granite", False, "Here is my response: b", "", "Here is my response: b"),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("mistral", False, "A\n[THINK]Hm.[/THINK]\nYes.", "Hm.", "A\n\nYes."),
    ("mistral", False, "[/THINK]Yes.", "", "Yes."),
    ("mistral", False, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("mistral", False, "Yes <think> no </think>.", "", "Yes <think> no </think>."),
    ("granite", False, "Here is my thought process: a\n\nHere's my response: b", "a", "b"),
    ("granite", False, "Here is the answer", "", "Here is the answer"),
    ("hunyuan_a13b", False, "<think>\na\n</think>\n<answer>\nb\n</answer>", "a", "b"),
    ("seed_oss", False, "<seed:think>a</seed:think>b", "a", "b"),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", True, "Hm.<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", True, "thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>Hm.<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>thousand reasons<channel|>Yes.", "thousand reasons", "Yes."),
    ("gemma4", False, "<|channel>thoughts<channel|>Yes.", "thoughts", "Yes."),
    ("gemma4", False, "<|channel>thought<channel|>Yes.", "", "Yes."),
    ("gemma4", False, "<|channel>thought\nthought\n<channel|>Yes.", "thought", "Yes."),
    ("gemma4", False, "<|channel>Hm.", "Hm.", ""),
    # The start tag is missing.
    ("gemma4", False, "thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", False, "thoughts\nare free", "", "thoughts\nare free"),
    ("gemma4", False, "thought", "", "thought"),
    ("gemma4", False, "A\n<|channel>Hm.<channel|>\nYes.", "Hm.", "A\n\nYes."),
    ("gemma4", False, "<|channel>a<channel|>b<|channel>thought\nc<channel|>d", "a\nc", "bd"),
    ("gemma4", False, "Hm.<channel|>Yes.", "", "Hm.Yes."),
    ("ernie45", True, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes."),
    ("ernie45", True, "Hm.\n</think>\nYes.", "Hm.", "Yes."),
    ("hy_v3", False, "<think:opensource>Hm.</think:opensource>\n\nYes.", "Hm.", "Yes."),
    ("hy_v3", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("nemotron_v3", True, "Hm.\n</think>\nYes.", "Hm.", "Yes."),
    (
        "cohere_command3",
        False,
        "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm.",
        "Yes.",
    ),
    (
        "cohere_command4",
        True,
        "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        "Hm.",
        "Yes.",
    ),
    ("cohere_command3", False, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes."),
    ("cohere_command3", True, "Hm.<|START_RESPONSE|>Yes.", "Hm.", "Yes."),
    (
        "kimi_k3",
        True,
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
        "<|close|>message<|sep|>",
        "Hm.",
        "Yes.",
    ),
    (
        "inkling",
        False,
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes."
        "<|end_message|><|message_model|>now<|content_thinking|>So.<|end_message|>",
        "Hm.\nSo.",
        "Yes.",
    ),
    ("inkling", False, "now<|content_text|>Yes.<|content_model_end_sampling|>", "", "Yes."),
    (
        "muse_glimmer",
        False,
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
        "Hm.",
        "Yes.",
    ),
    (
        "muse_glimmer",
        False,
        " to=now<|message|>A<|eom|><|start|>assistant to=self<|message|>Hm.<|eom|>"
        "<|start|>assistant to=f.g<|message|>B<|eot|>",
        "Hm.",
        "AB",
    ),
    ("kimi_k2", False, "\u25c1think\u25b7a\u25c1/think\u25b7b", "a", "b"),
]


@pytest.mark.parametrize(("name", "is_inside", "text", "thought", "answer"), CASES)
def test_thinking_is_found_for_every_split(
    name: str, is_inside: bool, text: str, thought: str, answer: str
) -> None:
    found = read_every_way(
        partial(ReasoningTagParser, REASONING_FORMATS[name], is_inside=is_inside), text
    )

    assert found == (thought, answer, [], [])


@pytest.mark.parametrize(
    ("name", "prompt", "is_inside"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<\uff5cAssistant\uff5c>", True),
        ("deepseek_r1", "<\uff5cAssistant\uff5c></think>", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
    ],
)
def test_the_end_of_the_prompt_decides_whether_an_answer_begins_in_reasoning(
    name: str, prompt: str, is_inside: bool
) -> None:
    assert REASONING_FORMATS[name].starts_in_reasoning(prompt) is is_inside


@pytest.mark.parametrize(
    ("begun", "is_inside"),
    [("The answer", False), ("<think>Hm", True), ("<think>Hm</think>So", False)],
)
def test_a_continued_message_is_in_reasoning_if_the_message_was(
    begun: str, is_inside: bool
) -> None:
    assert REASONING_FORMATS["deepseek_r1"].has_unclosed_reasoning(begun) is is_inside


def test_calls_are_parsed_only_after_the_thinking() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

    def both() -> OutputParser:
        thinking = ReasoningTagParser(REASONING_FORMATS["qwen3"], is_inside=False)
        return OutputParser(
            thinking, ToolCallParser(TOOL_CALL_FORMATS["hermes"], TOOLS), lambda: "ID"
        )

    found = read_every_way(both, f"<think>{call}</think>\n\nSo:\n{call}")

    assert found[:2] == (call, "So:")
    assert good_calls(found) == [("now", {})]


@pytest.mark.parametrize(
    ("prompt", "text", "said"),
    [
        ("<think>\n", "Hm.\n</think>\nYes.", "<think>Hm.\n</think>\nYes."),
        ("assistant\n", "<think>Hm.</think>Yes.", "<think>Hm.</think>Yes."),
        ("<think></think>", "Yes.", "Yes."),
    ],
)
def test_shown_reasoning_is_text_with_its_tags(prompt: str, text: str, said: str) -> None:
    form = REASONING_FORMATS["minimax_m2_append_think"]
    is_inside = form.starts_in_reasoning(prompt)

    assert read_every_way(lambda: form.parser(is_inside=is_inside), text) == ("", said, [], [])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (None, "a</think>b</think>c", "bc"),
        ("qwen3_coder", "a</think>b</think>c", "bc"),
        # Without reasoning, and in an argument, the tag is text.
        (None, "b</think>c", "b</think>c"),
        ("hermes", f"a</think>{QUOTED}", ""),
    ],
)
def test_a_repeated_end_tag_is_dropped(name: str | None, text: str, said: str) -> None:
    def both() -> OutputParser:
        thinking = ReasoningTagParser(THINK, is_inside=text.startswith("a"))
        calls = None if name is None else ToolCallParser(TOOL_CALL_FORMATS[name], TOOLS)
        return OutputParser(thinking, calls, lambda: "ID")

    found = read_every_way(both, text)

    assert found[1] == said
    assert good_calls(found) == ([("now", {"a": "</think>"})] if QUOTED in text else [])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("qwen3", 'a</think>"</think>"', '"</think>"'),
        ("qwen3", " </think>", " </think>"),
        ("mistral", 'a[/THINK]"[THINK]b[/THINK]"', '"[THINK]b[/THINK]"'),
        ("gemma4", 'a<channel|>"<channel|>"', '"<channel|>"'),
    ],
)
def test_a_constrained_answer_keeps_tags(name: str, text: str, said: str) -> None:
    def both() -> OutputParser:
        is_inside = text.startswith("a")
        thinking = ReasoningTagParser(
            REASONING_FORMATS[name], is_inside=is_inside, keeps_whitespace=True
        )
        return OutputParser(thinking, None, lambda: "ID")

    assert read_every_way(both, text)[1] == said


def test_a_parser_knows_whether_the_text_is_reasoning() -> None:
    parser = ReasoningTagParser(REASONING_FORMATS["qwen3"], is_inside=False)

    states = [parser.has_reasoning and not parser.is_done]
    for piece in ("<think>", "Hm.", "</think>", "Yes"):
        parser.feed(piece)
        states.append(parser.has_reasoning and not parser.is_done)

    assert states == [False, True, True, False, False]
    assert (
        read(lambda: ReasoningTagParser(REASONING_FORMATS["qwen3"], is_inside=True), ["a"])[0]
        == "a"
    )


@pytest.mark.parametrize(
    ("template", "calls", "thinking"),
    [
        ("{% for tool in tools %}<tool_call>{% endfor %}<think>", "hermes", "qwen3"),
        ("tools <tool_call>\n<function=example>", "qwen3_coder", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|tool_call|> in a template of Granite", "granite", None),
        ("<tool_call><arg_key>", "glm45", None),
        ("<|python_tag|>", "llama3_json", None),
        ("Use [func_name1(a=b), func_name2()]", "pythonic", None),
        ("<|start|>assistant<|channel|>final <|constrain|>", "openai", "openai_gptoss"),
        ("<|tool_call>call: <tool_call|> <|channel>thought", "gemma4", "gemma4"),
        ("<start_function_call>call:", "functiongemma", None),
        ("<steptml:invoke name=", "step3", "step3"),
        ("<tool_calls><tool_call>N<tool_sep><arg_key>", "hunyuan", None),
        ("{{ '<tool_calls{}><arg_key{}>'.format(s) }} <think{}>", "hy_v3", "hy_v3"),
        ("<think:opensource> <arg_key:opensource>", "hy_v3", "hy_v3"),
        ("<|START_THINKING|> <|START_ACTION|>", "cohere_command3", "cohere_command3"),
        ("<|message_model|><|content_thinking|>", None, "inkling"),
        ("<|content_invoke_tool_json|>", "inkling", None),
        ("<|open|>think<|sep|>", "kimi_k3", "kimi_k3"),
        ("to=self<|message|> <atem:function_calls>", "muse_glimmer", "muse_glimmer"),
        ("<|inner_prefix|><|tools_prefix|>", "apertus", None),
        ("<dots_function_call><invoke name=", "dots", None),
        ("<longcat_tool_call>", "longcat", None),
        ("function call<|role_sep|>", "gigachat3", None),
        ('<function name="f"><param name="x">', "minicpm5", None),
        ("<functions> <function_calls>", "olmo3", None),
        ("<think> <tool_call> <response>", "hermes", "ernie45"),
        ("{{ messages }}", None, None),
    ],
)
def test_parsers_are_detected_from_the_template(
    template: str, calls: str | None, thinking: str | None
) -> None:
    assert (tool_parser_of(template), reasoning_parser_of(template)) == (calls, thinking)

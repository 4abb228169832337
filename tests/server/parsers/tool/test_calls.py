"""Calls of every format, for every split of the text."""

from functools import partial
from typing import Any

import pytest
from parsing import good_calls, parser_of, read, read_every_way
from written_calls import BROKEN, NOW, NOW_JSON, TEXT, WHOLE

from server.parsers.registry import TOOL_CALL_FORMATS, words_of


@pytest.mark.parametrize("tag", ["<tool_calls>", "</tool_call>", "<tool_sep>", "<arg_key>"])
@pytest.mark.parametrize("suffix", ["", ":opensource"])
def test_the_hunyuan_3_parser_accepts_special_tokens_with_either_suffix(
    tag: str, suffix: str
) -> None:
    assert tag.replace(">", f"{suffix}>") in words_of(TOOL_CALL_FORMATS["hy_v3"])


@pytest.mark.parametrize(("name", "text", "content", "calls"), WHOLE)
def test_calls_are_found_for_every_split(
    name: str, text: str, content: str, calls: list[Any]
) -> None:
    found = read_every_way(partial(parser_of, name), text)

    assert good_calls(found) == calls
    assert found[1] == content
    assert found[3] == []


@pytest.mark.parametrize(("name", "text"), TEXT)
def test_invalid_calls_are_unchanged_text(name: str, text: str) -> None:
    found = read_every_way(partial(parser_of, name), text)

    assert found == ("", text, [], [])


@pytest.mark.parametrize(("name", "text", "content", "arguments"), BROKEN)
def test_unparsable_arguments_equal_the_streamed_arguments(
    name: str, text: str, content: str, arguments: str
) -> None:
    found = read_every_way(partial(parser_of, name), text)

    assert [call[1] for call in found[2]] == [arguments]
    assert found[1] == content
    assert found[3] == [0]


def test_a_valid_call_is_kept_if_the_next_call_is_invalid() -> None:
    text = f"<tool_call>{NOW_JSON}</tool_call><tool_call>{{oops</tool_call>"

    found = read_every_way(partial(parser_of, "hermes"), text)

    assert good_calls(found) == [NOW]
    assert found[1] == "<tool_call>{oops</tool_call>"


def test_a_call_cut_by_length_keeps_its_partial_arguments() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "xy'

    found = read_every_way(partial(parser_of, "hermes"), text, is_cut=True)

    assert found[:3] == ("", "", [["f", '{"a": "xy', "ID"]])


def test_arguments_are_streamed_as_they_are_generated() -> None:
    for name, head in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x"),
        ("pythonic", "[now(a='"),
    ):
        parser = parser_of(name)
        parser.feed(head)

        assert [event.text for event in parser.feed("word")] == ["word"], name  # type: ignore[union-attr]


def test_call_ids_of_the_model_are_kept() -> None:
    kimi = "<|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|>"

    assert read(partial(parser_of, "kimi_k2"), [kimi])[2][0][2] == "functions.now:4"
    assert (
        read(partial(parser_of, "mistral"), ["[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}"])[2][0][2] == "abc"
    )
    assert read(partial(parser_of, "hermes"), [f"<tool_call>{NOW_JSON}"])[2][0][2] == "ID"


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = f"<tool_call>{NOW_JSON}</tool_call>" * 3

    found = read_every_way(partial(parser_of, "hermes", 1), text)

    assert len(found[2]) == 1 and found[1] == ""


def test_a_long_argument_has_an_event_for_each_piece() -> None:
    parser = parser_of("hermes")
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": "')

    pieces = [len(parser.feed("word ")) for _ in range(20_000)]

    assert sum(pieces) == 20_000


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>\n[ ]\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n</tool_call>"),
        ("seed_oss", "<seed:tool_call></seed:tool_call>"),
        ("glm45", "<tool_call></tool_call>"),
        ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>"),
        ("minimax_m3", "]<]minimax[>[<tool_call>]<]minimax[>[</tool_call>"),
        ("gemma4", "<|tool_call><tool_call|>"),
        ("deepseek_v32", "<\uff5cDSML\uff5cfunction_calls></\uff5cDSML\uff5cfunction_calls>"),
        (
            "deepseek_v3",
            "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
        ),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
        ("olmo3", "<function_calls></function_calls>"),
        ("dots", "<dots_function_call></dots_function_call>"),
        ("longcat", "<longcat_tool_call></longcat_tool_call>"),
    ],
)
def test_a_block_without_calls_is_dropped(name: str, block: str) -> None:
    found = read_every_way(partial(parser_of, name), f"{block}\n\nNo call is needed.")

    assert found[1:] == ("\n\nNo call is needed.", [], [])


@pytest.mark.parametrize("text", ["<tool_call>\n[ ", "<tool_call> [</tool_call>", "<tool_call>]"])
def test_a_block_that_is_neither_empty_nor_a_call_stays_text(text: str) -> None:
    found = read_every_way(partial(parser_of, "hermes"), text)

    assert found[1:] == (text, [], [])

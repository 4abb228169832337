"""Tools rendered as text, for chat templates without support for tools."""

import json
from typing import Any

import pytest

from server.text.chat_template import ChatTemplate
from server.text.control_tokens import ControlMarker
from server.text.isolated_template import isolated_templates
from server.text.messages import normalize_messages
from server.text.sandbox import Sandbox
from server.text.tool_template import INSTRUCTIONS, with_tools_as_text

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = """{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}
[{{ m.role }}]{{ m.content }}{% endfor %}"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a „city“",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TEXT = INSTRUCTIONS.format(tools=json.dumps(WEATHER, ensure_ascii=False))
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather and time?"},
    {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Ålesund"}'},
            },
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
    {"role": "user", "content": "Thanks. And now?"},
]
CALLS = (
    'One moment.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ålesund"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
RESULTS = (
    "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
    "Thanks. And now?"
)


def rendered(
    messages: list[dict[str, Any]], tools: Any = (WEATHER,), *, takes_system: bool = True
) -> list[tuple[str, str]]:
    made = with_tools_as_text(
        normalize_messages(messages),
        tools,
        takes_system=takes_system,
        to_json=Sandbox(10_000).to_json,
    )
    assert not any("tool_calls" in message for message in made)
    return [(message["role"], message["content"]) for message in made]


def test_the_tools_become_the_system_message_without_what_only_the_server_reads() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}

    for tool in (WEATHER, strict):
        made = rendered([{"role": "user", "content": "hi"}], [tool])
        assert made == [("system", TEXT), ("user", "hi")]


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_the_tools_are_appended_to_an_existing_system_message(content: Any) -> None:
    messages = [{"role": "developer", "content": content}, {"role": "user", "content": "hi"}]

    assert rendered(messages) == [("system", f"Be brief.\n\n{TEXT}"), ("user", "hi")]


def test_calls_and_results_of_the_history_become_text() -> None:
    assert rendered(HISTORY, None) == [
        ("user", "Weather and time?"),
        ("assistant", CALLS),
        ("user", RESULTS),
    ]


async def test_a_template_without_tools_renders_a_conversation_with_calls() -> None:
    template = ChatTemplate(CHATML, {})

    text = await template.render(HISTORY, tools=[WEATHER])

    assert template.uses_generic_tools()
    assert text == (
        f"<|im_start|>system\n{TEXT}<|im_end|>\n<|im_start|>user\nWeather and time?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALLS}<|im_end|>\n<|im_start|>user\n{RESULTS}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_template_without_the_role_system_has_the_tools_in_the_first_message() -> None:
    text = await ChatTemplate(ALTERNATING, {}).render(HISTORY, tools=[WEATHER])

    assert f"[user]{TEXT}\n\nWeather and time?" in text
    assert f"[assistant]{CALLS}" in text and f"[user]{RESULTS}" in text


async def test_a_history_with_calls_becomes_text_if_the_request_has_no_tools() -> None:
    text = await ChatTemplate(CHATML, {}).render(HISTORY)

    assert CALLS in text and "<tools>" not in text


async def test_a_template_that_renders_calls_itself_gets_them_as_they_are() -> None:
    source = "{% for m in messages %}{{ m.role }}{{ m.tool_calls | length }},{% endfor %}"

    assert await ChatTemplate(source, {}).render(HISTORY) == "user0,assistant2,tool0,tool0,user0,"


async def test_a_template_with_a_place_for_tools_is_left_alone() -> None:
    template = ChatTemplate("{{ tools | tojson }}" + CHATML, {})

    text = await template.render(HISTORY, tools=[NOW])

    assert not template.uses_generic_tools()
    assert "<tools>" not in text and "<|im_start|>tool\nrain" in text


@pytest.mark.parametrize("source", ["{{ broken", "{% for i in range(99999999) %}{% endfor %}", {}])
def test_an_undecidable_template_is_classified_in_bounded_time(source: Any) -> None:
    template = ChatTemplate(source, {}, time_limit_s=0.2)

    assert template.uses_generic_tools() == (source == {})


async def test_control_tokens_in_tools_are_marked_in_templates_of_requests() -> None:
    marker = ControlMarker(["<|im_end|>"], [], "MARK")
    template = ChatTemplate(CHATML, {}, isolation=isolated_templates(marker))
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}

    text = await template.render(
        HISTORY, tools=[tool], template=CHATML + " ", mark=marker.mark_texts
    )

    assert '"description": "<MARK|im_end|>"' in text and CALLS in text
    template.close()

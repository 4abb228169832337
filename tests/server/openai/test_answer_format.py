"""Constraints of chats: grammars after thinking, thinking budgets, and the parsers of such
answers."""

import json
from typing import Any

import pytest
from http_rig import THINKING_TEMPLATE, TalkingClient, in_memory

from config.params.structured_output import FREE, ThinkingSpec

JSON: Any = {"response_format": {"type": "json_object"}}
TOOLS: Any = {"tools": [{"type": "function", "function": {"name": "f"}}]}
OPENED = "{{ messages }}<think>\n"
SILENT = "<think>a</think>\n\n"


def thinking(*, is_inside: bool, skips_blanks: bool = True) -> ThinkingSpec:
    return ThinkingSpec(("<think>",), ("</think>",), is_inside, skips_blanks)


async def spec_of(config: Any, **fields: Any) -> Any:
    client = TalkingClient("x")
    async with in_memory(client, **config) as rig:
        answer = await rig.chat(**fields)
        assert answer.status_code == 200, answer.text
    return client.queues[0].sampling.structured_outputs


MAY_THINK = {"chat_template": THINKING_TEMPLATE}
ALWAYS = {"reasoning_parser": "deepseek_r1"}
OFF: Any = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("config", "fields", "wanted"),
    [
        ({}, {}, None),
        (MAY_THINK, {}, thinking(is_inside=False)),
        (MAY_THINK, {"guided_regex": "a"}, thinking(is_inside=False, skips_blanks=False)),
        (MAY_THINK, {"reasoning_effort": "low"}, thinking(is_inside=False)),
        (MAY_THINK, {"reasoning_effort": "none"}, None),
        (MAY_THINK, OFF, None),
        ({"chat_template": OPENED}, {}, thinking(is_inside=True)),
        ({"chat_template": OPENED}, OFF, thinking(is_inside=True)),
        (ALWAYS, {}, thinking(is_inside=True)),
        (ALWAYS, OFF, None),
        (ALWAYS, {"chat_template_kwargs": {"thinking": False}}, None),
        ({**ALWAYS, "default_chat_template_kwargs": '{"thinking": false}'}, {}, None),
        (ALWAYS, {"continue_final_message": True}, None),
        ({**MAY_THINK, "reasoning_parser": "none"}, {}, None),
    ],
    ids=str,
)
async def test_structured_output_follows_optional_thinking(
    config: Any, fields: Any, wanted: ThinkingSpec | None
) -> None:
    form = {} if "guided_regex" in fields else JSON

    spec = await spec_of(config, **form, **fields)

    assert spec.kind == ("json_object" if form else "regex")
    assert spec.thinking == wanted


@pytest.mark.parametrize(
    ("choice", "reply"),
    [
        ("required", '[{"name": "f", "arguments": {}}]'),
        ({"type": "function", "function": {"name": "f"}}, "{}"),
    ],
)
async def test_required_calls_follow_the_thinking(choice: Any, reply: str) -> None:
    async with in_memory(TalkingClient(SILENT + reply), **MAY_THINK) as rig:
        answer = (await rig.chat(**TOOLS, tool_choice=choice)).json()

        message = answer["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "a"
        assert message["content"] is None
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": "{}"}
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert rig.client.queues[0].sampling.structured_outputs.thinking is not None


@pytest.mark.parametrize(
    ("fields", "content"), [(JSON, "{}\n"), ({"guided_choice": ["\n\n{}\n"]}, "\n\n{}\n")]
)
async def test_whitespace_after_thinking_belongs_to_a_grammar_that_allows_it(
    fields: Any, content: str
) -> None:
    async with in_memory(TalkingClient(SILENT + "{}\n"), **MAY_THINK) as rig:
        message = (await rig.chat(**fields)).json()["choices"][0]["message"]

        assert (message["reasoning"], message["content"]) == ("a", content)


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
STRICT: Any = {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}


@pytest.mark.parametrize(
    ("reply", "content", "num_calls", "reason"),
    [("Hi.", "Hi.", 0, "stop"), (f"{SILENT}So. {CALL}", "So.", 1, "tool_calls")],
)
async def test_with_a_strict_tool_only_calls_are_constrained(
    reply: str, content: str, num_calls: int, reason: str
) -> None:
    async with in_memory(TalkingClient(reply), **MAY_THINK) as rig:
        choice = (await rig.chat(**STRICT)).json()["choices"][0]

        assert choice["message"]["content"] == content
        assert len(choice["message"].get("tool_calls", ())) == num_calls
        assert choice["finish_reason"] == reason
        spec = rig.client.queues[0].sampling.structured_outputs
        assert spec.kind == "structural_tag" and spec.thinking == thinking(is_inside=False)
        part = json.loads(spec.text)["format"]
        assert (part["type"], part["tags"][0]["begin"]) == ("calls", "<tool_call>")


async def test_tool_schemas_that_are_too_large_are_a_400_of_the_field_tools() -> None:
    huge = {"description": "x" * 300_000}
    function = {"name": "f", "strict": True, "parameters": huge}
    async with in_memory(TalkingClient("x"), **MAY_THINK) as rig:
        answer = await rig.chat(
            tools=[{"type": "function", "function": function}], tool_choice="required"
        )

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert "262144" in answer.json()["error"]["message"]


async def test_channel_grammars_include_thinking_and_refuse_a_thinking_budget() -> None:
    config = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    async with in_memory(TalkingClient("x"), **MAY_THINK, **config) as rig:
        await rig.chat(**STRICT)
        refused = await rig.chat(**STRICT, thinking_token_budget=5)

        spec = rig.client.queues[0].sampling.structured_outputs
        assert spec.thinking is None and "<|channel|>" in spec.text
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "thinking_token_budget"


@pytest.mark.parametrize(
    "form", [JSON, {"guided_regex": "a/b"}, {"guided_choice": ["a", "{}"]}], ids=str
)
@pytest.mark.parametrize(
    ("reply", "content", "reason"), [("{}", "{}", "stop"), (CALL, None, "tool_calls")]
)
async def test_with_tools_an_answer_matches_its_format_or_is_a_call(
    form: Any, reply: str, content: str | None, reason: str
) -> None:
    async with in_memory(TalkingClient(SILENT.rstrip() + reply), **MAY_THINK) as rig:
        choice = (await rig.chat(**TOOLS, **form)).json()["choices"][0]

        assert choice["message"]["content"] == content
        assert choice["message"]["reasoning"] == "a"
        assert choice["finish_reason"] == reason
        spec = rig.client.queues[0].sampling.structured_outputs
        assert json.loads(spec.text)["format"]["type"] == "or"


async def test_a_thinking_budget_is_sent_with_and_without_a_grammar() -> None:
    client = TalkingClient(SILENT + "b")
    async with in_memory(client, **MAY_THINK) as rig:
        for fields in ({}, JSON, {"reasoning_effort": "none"}, TOOLS):
            answer = await rig.chat(**fields, thinking_token_budget=5)
            assert answer.json()["choices"][0]["message"]["content"] == "b"

    sent = [queue.sampling for queue in client.queues]
    assert [message.thinking_token_budget for message in sent] == [5, 5, None, 5]
    kinds = [message.structured_outputs and message.structured_outputs.kind for message in sent]
    assert kinds == [FREE, "json_object", None, FREE]


@pytest.mark.parametrize(
    ("config", "budget", "words"),
    [
        ({}, 5, "--reasoning-parser"),
        (MAY_THINK, -1, "at least 0"),
        (MAY_THINK, "5", "integer"),
    ],
)
async def test_an_invalid_or_unenforceable_thinking_budget_is_refused(
    config: Any, budget: Any, words: str
) -> None:
    async with in_memory(TalkingClient("x"), **config) as rig:
        answer = await rig.chat(thinking_token_budget=budget)
        plain = await rig.complete(thinking_token_budget=5)

        for response in (answer, plain):
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "thinking_token_budget"
        assert words in answer.json()["error"]["message"]

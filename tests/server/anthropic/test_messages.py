"""The Messages API over HTTP: requests to the model, whole answers, streams, and errors."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from delays import machine_s
from http_rig import (
    THINKING_TEMPLATE,
    TOKENIZER,
    TOOLS_TEMPLATE,
    Rig,
    TalkingClient,
    ids,
    in_memory,
)

from server.anthropic.chat_request import to_chat_body
from server.anthropic.output import full_message
from server.anthropic.schema import CountBody
from server.parsers.stream.base import ToolCallArguments, ToolCallStart
from server.serving.choices import ChoiceOutput

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ålesund"}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
HI = [{"role": "user", "content": "hi"}]
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}}


def talking(reply: str = "Hello world", **config: Any) -> Any:
    return in_memory(TalkingClient(reply), **{"chat_template": THINKING_TEMPLATE, **config})


async def ask(rig: Rig, **fields: Any) -> Any:
    return await rig.post("/v1/messages", {"max_tokens": 400, "messages": HI, **fields})


def asked(rig: Rig, place: int = -1) -> str:
    """The prompt that the engine received, as text."""
    return TOKENIZER.decode(rig.client.queues[place].prompt, skip_special_tokens=False)


def read_stream(stream: bytes) -> list[tuple[str, Any]]:
    found = []
    for frame in stream.removesuffix(b"\n\n").split(b"\n\n"):
        head, data = frame.split(b"\n")
        value = json.loads(data.removeprefix(b"data: "))
        assert head == b"event: " + value["type"].encode()
        found.append((value["type"], value))
    return found


def joined(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message that a client assembles from a stream's events."""
    kind, first = events[0]
    assert kind == "message_start"
    message, is_open, written = first["message"], False, ""
    for kind, event in events[1:-2]:
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, written = True, ""
        elif kind == "content_block_stop":
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(written)
        else:
            assert kind == "content_block_delta" and is_open
            assert event["index"] == len(message["content"]) - 1
            delta = event["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                written += delta["partial_json"]
            else:
                message["content"][-1][name] += delta[name]
    (kind, end), (last, _) = events[-2:]
    assert (kind, last, is_open) == ("message_delta", "message_stop", False)
    return {**message, **end["delta"], "usage": {**message["usage"], **end["usage"]}}


async def test_a_message_has_content_blocks_a_stop_reason_and_usage() -> None:
    async with talking("Hello world") as rig:
        response = await ask(rig, system="Be kind.", temperature=0.0, top_k=5)

        answer = response.json()
        assert answer.pop("id").startswith("msg_")
        assert response.headers["request-id"] == response.headers["x-request-id"]
        prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        assert asked(rig).startswith(prompt + "<|im_start|>assistant\n")
        assert answer == {
            "type": "message",
            "role": "assistant",
            "model": "demo",
            "content": [{"type": "text", "text": "Hello world"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(rig.client.queues[0].prompt),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": len(ids("Hello world")) + 1,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        }
        sampling = rig.client.queues[0].sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (400, 0.0, 5)


THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.mark.parametrize(
    ("reply", "fields", "kinds", "stop_reason"),
    [
        ("Hello world", {}, ["text"], "end_turn"),
        ("Hello world", {"max_tokens": 3}, ["text"], "max_tokens"),
        ("Well END on", {"stop_sequences": ["END", "x"]}, ["text"], "stop_sequence"),
        ("Hm. " + CALL + " Done.", {"tools": [WEATHER]}, ["text", "tool_use", "text"], "tool_use"),
        (CALL + CALL, {"tools": [WEATHER]}, ["tool_use", "tool_use"], "tool_use"),
        (
            CALL + CALL,
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            ["tool_use"],
            "tool_use",
        ),
        (THOUGHT + "Yes.", THINKS, ["thinking", "text"], "end_turn"),
        (THOUGHT + CALL, {**THINKS, "tools": [WEATHER]}, ["thinking", "tool_use"], "tool_use"),
        (
            '[{"name": "get_weather", "arguments": {"city": "a"}}]',
            {"tools": [WEATHER], "tool_choice": {"type": "any"}},
            ["tool_use"],
            "tool_use",
        ),
        (
            '{"city": "a"}',
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}},
            ["tool_use"],
            "tool_use",
        ),
        (CALL, {"tools": [WEATHER], "tool_choice": {"type": "none"}}, ["text"], "end_turn"),
    ],
)
async def test_a_streamed_message_equals_the_whole_message(
    reply: str, fields: Any, kinds: list[str], stop_reason: str
) -> None:
    async with talking(reply) as rig:
        whole = (await ask(rig, **fields)).json()
        stream = await ask(rig, **fields, stream=True)

        assert stream.headers["content-type"].startswith("text/event-stream")
        streamed = joined(read_stream(stream.content))
        for message in (whole, streamed):
            message.pop("id")
            for block in message["content"]:
                block.pop("id", None)
        assert streamed == whole
        assert [block["type"] for block in whole["content"]] == kinds
        assert whole["stop_reason"] == stop_reason


async def test_the_matched_stop_sequence_is_reported() -> None:
    async with talking("Well END on") as rig:
        answer = (await ask(rig, stop_sequences=["END"])).json()

        assert (answer["stop_sequence"], answer["content"][0]["text"]) == ("END", "Well ")


async def test_thinking_is_off_by_default_and_can_be_hidden() -> None:
    async with talking(THOUGHT + "Yes.") as rig:
        await ask(rig)
        await ask(rig, thinking={"type": "adaptive"})
        shown = (await ask(rig, **THINKS)).json()
        hidden = (await ask(rig, thinking={"type": "adaptive", "display": "omitted"})).json()

        assert asked(rig, 0).endswith("<think></think>")
        assert not asked(rig, 1).endswith("<think></think>")
        assert shown["content"][0] == {
            "type": "thinking",
            "thinking": "Let me see.",
            "signature": "",
        }
        assert hidden["content"][0]["thinking"] == ""
        budgets = [queue.sampling.thinking_token_budget for queue in rig.client.queues]
        assert budgets == [None, None, 1024, None]
        count = len(ids(THOUGHT.rstrip()))
        assert shown["usage"]["output_tokens_details"] == {"thinking_tokens": count}


HIDES = {"thinking": {"type": "adaptive", "display": "omitted"}}


async def test_hidden_reasoning_is_restored_from_its_signature() -> None:
    template = "{{ messages | tojson }}<think>{{ enable_thinking }}"
    async with talking(THOUGHT + "Yes.", chat_template=template, reasoning_parser="qwen3") as rig:
        whole = (await ask(rig, **HIDES)).json()["content"]
        streamed = joined(read_stream((await ask(rig, **HIDES, stream=True)).content))["content"]
        await ask(rig, messages=[*HI, {"role": "assistant", "content": whole}, *HI])

        assert whole == streamed
        assert (whole[0]["type"], whole[0]["thinking"]) == ("thinking", "")
        shown, _ = json.JSONDecoder().raw_decode(asked(rig))
        assert (shown[1]["reasoning_content"], shown[1]["content"]) == ("Let me see.", "Yes.")


@pytest.mark.parametrize("signature", ["", "EpAC", "gaudiserve.a", "gaudiserve./w==", 7, None])
async def test_signatures_of_other_servers_are_ignored(signature: object) -> None:
    template = "{{ messages | tojson }}"
    thinking = {"type": "thinking", "thinking": "", "signature": signature}
    answer = {"role": "assistant", "content": [thinking, {"type": "text", "text": "Yes."}]}
    async with talking(chat_template=template) as rig:
        response = await ask(rig, messages=[*HI, answer, *HI])

        assert response.status_code == 200, response.text
        shown, _ = json.JSONDecoder().raw_decode(asked(rig))
        assert (shown[1].get("reasoning_content", ""), shown[1]["content"]) == ("", "Yes.")


async def test_chat_template_variables_and_a_cache_salt_may_be_sent() -> None:
    async with talking(THOUGHT + "Yes.") as rig:
        thinking = {"chat_template_kwargs": {"enable_thinking": True}}
        answer = await ask(rig, cache_salt="s", **thinking)
        wrong = await ask(rig, chat_template_kwargs="x")
        refused = await ask(rig, kv_transfer_params={"remote_port": 1})

        assert not asked(rig, 0).endswith("<think></think>")
        assert [queue.cache_salt for queue in rig.client.queues] == ["s"]
        assert "x-gaudiserve-ignored-fields" not in answer.headers
        assert (wrong.status_code, refused.status_code) == (400, 400)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (
            '{"n": 12345678901234567890123, "x": 1e999}',
            '{"n": 12345678901234567890123, "x": 1e999}',
        ),
        (r'{"x": "\ud800"}', r'{"x": "\ud800"}'),
        ('{"a": 1, "city": "Ber', '{"a": 1}'),
        ('{"n": 12345678901234567890123, "x": [1, ', '{"n": 12345678901234567890123, "x": [1]}'),
        ('{"x": 1e999, ', "{}"),
    ],
)
async def test_the_input_of_a_truncated_call_has_its_complete_values_as_written(
    arguments: str, given: str
) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": ' + arguments
    async with talking(call) as rig:
        answer = await ask(rig, tools=[WEATHER], max_tokens=len(ids(call)))

        assert f'"input":{given}' in answer.text
        assert answer.json()["stop_reason"] == "max_tokens"


def test_only_the_last_call_of_a_truncated_answer_is_partial() -> None:
    generation = SimpleNamespace(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=9)
    job: Any = SimpleNamespace(id="m", model="demo", generation=generation, num_reasoning_tokens=0)
    choice = ChoiceOutput(finish_reason="length")
    for index in (0, 1):
        choice.message.add(
            [ToolCallStart(index, "f"), ToolCallArguments(index, '{"a": 1, "b": "B')]
        )

    content = full_message(job, choice, shows_reasoning=True)["content"]

    assert [json.loads(bytes(block["input"])) for block in content] == [{}, {"a": 1}]


async def test_the_input_of_a_call_that_the_model_left_open_is_empty() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"a": 1, "city": "Ber'
    async with talking(call) as rig:
        answer = (await ask(rig, tools=[WEATHER])).json()

        assert [block["input"] for block in answer["content"]] == [{}]
        assert answer["stop_reason"] == "tool_use"


async def test_blocks_become_the_messages_that_a_template_reads() -> None:
    template = "{{ messages | tojson }}{% if tools %}{{ tools | tojson }}{% endif %}"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "So", "cache_control": {"type": "ephemeral"}},
                USE,
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no such place"}],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    async with talking(chat_template=template, tool_call_parser="hermes") as rig:
        response = await ask(rig, messages=messages, system=system, tools=[WEATHER])

        assert response.status_code == 200, response.text
        shown, end = json.JSONDecoder().raw_decode(asked(rig))
        assert [(m["role"], m["content"]) for m in shown] == [
            ("system", "Be kind."),
            ("user", "ab\nc"),
            ("assistant", "So"),
            ("tool", "Error: no such place"),
            ("user", "And now?"),
        ]
        assert shown[2]["reasoning_content"] == "hm"
        assert shown[2]["tool_calls"] == [
            {
                "id": "t1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
            }
        ]
        assert (shown[3]["tool_call_id"], shown[3]["name"]) == ("t1", "get_weather")
        (tool,) = json.loads(asked(rig)[end:])
        assert tool["function"] == {
            "name": "get_weather",
            "description": "The weather of a place",
            "parameters": WEATHER["input_schema"],
        }


async def test_a_final_assistant_message_is_continued() -> None:
    async with talking(" blue") as rig:
        begun = [*HI, {"role": "assistant", "content": "The sky is"}]
        answer = (await ask(rig, messages=begun)).json()
        await ask(rig, messages=[*HI, {"role": "assistant", "content": ""}])

        assert asked(rig, 0).endswith("<|im_start|>assistant\nThe sky is")
        assert answer["content"][0]["text"] == " blue"
        assert "assistant\n<think>" in asked(rig, 1)


async def test_counted_tokens_equal_the_answers_usage() -> None:
    tools = {"tools": [WEATHER], "tool_choice": {"type": "any"}}
    async with talking("[]") as rig:
        rig.client.num_cached = 3  # type: ignore[attr-defined]
        for fields in ({}, {"system": "x"}, tools, THINKS):
            count = await rig.post(
                "/v1/messages/count_tokens", {"messages": HI, "model": "demo", **fields}
            )
            usage = (await ask(rig, **fields)).json()["usage"]

            assert usage["cache_read_input_tokens"] == 3
            assert count.json() == {"input_tokens": usage["input_tokens"] + 3}


async def test_input_tokens_exclude_cached_tokens() -> None:
    async with talking() as rig:
        rig.client.num_cached = 5  # type: ignore[attr-defined]
        usage = (await ask(rig)).json()["usage"]
        events = read_stream((await ask(rig, stream=True)).content)

        fresh = len(rig.client.queues[0].prompt) - 5
        found = [event for kind, event in events if kind in ("message_start", "message_delta")]
        for counted in (usage, found[0]["message"]["usage"], found[1]["usage"]):
            assert counted["input_tokens"] == fresh
            assert counted["cache_read_input_tokens"] == 5


BILLING = "x-anthropic-billing-header: cc_version=2.1.100.a1b; cc_entrypoint=cli; cch="


async def test_the_billing_header_of_a_client_is_removed_from_the_prompt() -> None:
    def header(value: str) -> dict[str, str]:
        return {"type": "text", "text": f"{BILLING}{value};"}

    text = {"type": "text", "text": "Be kind."}
    async with talking() as rig:
        prompts, counts = [], []
        for system in (
            "Be kind.",
            [text],
            [header("a"), text],
            [header("b"), text],
            f"{BILLING}c;\nBe kind.",
        ):
            for fields in (
                {"system": system},
                {"messages": [{"role": "system", "content": system}, *HI]},
            ):
                await ask(rig, **fields)
                prompts.append(asked(rig))
                counted = await rig.post("/v1/messages/count_tokens", {"messages": HI, **fields})
                counts.append(counted.json()["input_tokens"])
        await ask(rig)
        await ask(rig, system=[header("d")])
        await ask(rig, system=BILLING)
        quoted = {"messages": [{"role": "user", "content": BILLING}]}
        await ask(rig, **quoted)

        assert len(set(prompts)) == 1 and len(set(counts)) == 1
        assert asked(rig, -4) == asked(rig, -3) == asked(rig, -2)
        assert BILLING in asked(rig)


async def test_an_output_format_enforces_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with talking('{"a":1}') as rig:
        form = {"type": "json_schema", "schema": schema}
        await ask(rig, output_config={"format": form, "effort": "low"})

        spec = rig.client.queues[0].sampling.structured_outputs
        assert spec is not None and json.loads(spec.text) == schema


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
FORM = {"type": "json_schema", "schema": {}}


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_tools_and_earlier_blocks_of_other_servers_are_ignored_and_named(route: str) -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "xx"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "thinking", "signature": "xx"},
        {"type": "text", "text": None},
        {"type": "text", "text": "yo"},
    ]
    async with talking() as rig:
        messages = [*HI, {"role": "assistant", "content": blocks}, *HI]
        messages += [{"role": "assistant", "content": None}, *HI]
        body = {"max_tokens": 4, "messages": messages, "tools": [WEATHER, SEARCH]}
        answer = await rig.post(route, body)

        assert answer.status_code == 200, answer.text
        assert answer.headers["x-gaudiserve-ignored-fields"].split(", ")[-4:] == [
            "tools[1]:web_search_20250305",
            "messages[1].content[0]:redacted_thinking",
            "messages[1].content[1]:server_tool_use",
            "messages[1].content[3]:text",
        ]
        if rig.client.queues:
            assert "assistant\nyo<|im_end|>" in asked(rig)
            assert "web_search" not in asked(rig)


async def test_history_is_replayed_and_not_checked() -> None:
    reference = {"type": "tool_reference", "tool_name": "Read"}
    use = {**USE, "input": "cut"}
    result = {"type": "tool_result", "tool_use_id": "t9", "content": [reference]}
    async with talking() as rig:
        answer = await ask(
            rig,
            messages=[
                *HI,
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ],
        )

        assert answer.status_code == 200, answer.text
        assert "Read" in asked(rig)


def result(**fields: Any) -> list[Any]:
    block = {"type": "tool_result", "tool_use_id": "t1", **fields}
    return [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [block]}]


def says(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 5_000}, "maximum context length is 4096"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature is 3"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": [{"role": "system", "content": BILLING}]}, "messages is an empty list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            says({"text": "x"}),
            "messages[0].content[0].type is missing, it must be a string",
        ),
        (says({"type": "text"}), ".text is missing, it must be"),
        (
            says({"type": "image", "source": {}}),
            "and this server does not accept images: its model reads none, or",
        ),
        (says({"type": "document"}), "has type 'document', it must be text"),
        (says({"type": "search_result"}), "'search_result'"),
        ({"messages": result(content=[{"type": "image"}])}, "content[0].content[0]"),
        ({"messages": result()[:2]}, "send its tool_result"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"system": 5}, "system is 5, it must be a string or a list"),
        (
            {"tools": [WEATHER], "tool_choice": "auto"},
            "tool_choice is 'auto', it must be an object",
        ),
        ({"metadata": 5}, "metadata is 5, it must be an object"),
        (
            {"tools": [SEARCH, WEATHER], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice names 'web_search', it must name one of tools",
        ),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "no tools to call"),
        ({"tools": [{"type": 5, "name": "f", "input_schema": {}}]}, "tools[0].type is "),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        (
            {"tools": [{"input_schema": {}}]},
            "tools[0].name is missing, it must be",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
            "tools[0].input_schema.type is 'array', it must be",
        ),
        (
            {"tool_choice": {"type": "any"}},
            "tool_choice is 'required' and there are no tools to call",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "most"}}, "tool_choice.type"),
        ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences has 5 strings"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences has an empty string"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        (
            {"chat_template_kwargs": {f"k{i}": 1 for i in range(4_096)}},
            "chat_template_kwargs has 4098 entries, at most 4096 are allowed",
        ),
        (
            {"output_format": FORM, "tools": [WEATHER], "tool_choice": {"type": "any"}},
            "output_config.format cannot be combined",
        ),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "only one of them"),
    ],
)
async def test_invalid_and_unsupported_message_fields_are_refused_with_the_reason(
    fields: dict[str, Any], words: str
) -> None:
    async with talking() as rig:
        for more in ({}, {"stream": True}):
            response = await ask(rig, **{**fields, **more})

            body = response.json()
            assert (response.status_code, list(body)) == (400, ["type", "error"]), body
            assert body["type"] == "error"
            assert body["error"]["type"] == "invalid_request_error"
            assert words in body["error"]["message"]
            assert "function" not in body["error"]["message"]
        assert not rig.client.queues


async def test_strict_tools_that_cannot_be_enforced_are_refused_by_name() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}
    async with talking(tool_call_parser="qwen3_coder") as rig:
        response = await ask(rig, tools=[{**WEATHER, "strict": True, "input_schema": schema}])

        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "the parameters of 'get_weather'" in message
        assert "set strict to false, or tool_choice to any" in message


async def test_unknown_fields_nulls_and_hints_are_accepted() -> None:
    taken = {
        **{"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": None},
        **{"system": None, "tools": [], "tool_choice": {"type": "auto"}, "stop_sequences": []},
        **{"thinking": {"type": "disabled"}, "mcp_servers": [], "something": 1},
        "output_config": {"format": {"type": None, "schema": {"type": "object"}}},
        "context_management": {
            "edits": [
                {"type": "clear_thinking_20251015", "keep": "all"},
                {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens"}},
            ]
        },
    }
    async with talking() as rig:
        response = await ask(rig, **taken)

        assert response.status_code == 200, response.text
        assert response.headers["x-gaudiserve-ignored-fields"] == (
            "something, context_management.edits[1]:clear_tool_uses_20250919"
        )


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{}", {"x-api-key": "no"}, 401, "authentication_error"),
        ("POST", "/v1/messages", b"{", {}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"x" * 3_000, {}, 413, "request_too_large"),
        ("POST", "/v1/messages", b"", {"content-type": "a/b"}, 415, "invalid_request_error"),
        ("GET", "/v1/messages", b"", {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", {}, 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", b"[]", {}, 400, "invalid_request_error"),
        (
            "POST",
            "/v1/messages",
            b'{"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": ""}]}',
            {},
            404,
            "not_found_error",
        ),
    ],
)
async def test_errors_of_the_messages_routes_have_the_anthropic_form(
    method: str, path: str, body: bytes, headers: Any, status: int, kind: str
) -> None:
    async with talking(api_keys=("key",), max_body_bytes=2_000) as rig:
        headers = {"x-api-key": "key", **headers}
        response = await rig.http.request(method, path, content=body, headers=headers)

        error = response.json()
        assert response.status_code == status
        assert list(error) == ["type", "error"]
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert response.headers["request-id"]


async def test_overload_and_failed_requests_have_the_anthropic_error_types() -> None:
    async with in_memory(TalkingClient(), chat_template=TOOLS_TEMPLATE) as rig:
        rig.state.is_draining = True
        draining = await ask(rig)
        rig.state.is_draining = False
        rig.client.before = lambda queue: queue.say(finish="error", error="nan")  # type: ignore[attr-defined]
        broken = await ask(rig)
        streamed = await ask(rig, stream=True)

        assert (draining.status_code, draining.json()["error"]["type"]) == (503, "overloaded_error")
        assert draining.headers["retry-after"]
        assert (broken.status_code, broken.json()["error"]["type"]) == (500, "api_error")
        (kind, event) = read_stream(streamed.content)[-1]
        assert (kind, event["error"]["type"]) == ("error", "api_error")
        assert b"[DONE]" not in streamed.content


def test_many_messages_with_reasoning_are_joined_once() -> None:
    thought = {"type": "thinking", "thinking": "r" * 1500, "signature": ""}
    assistant = {"role": "assistant", "content": [thought]}
    user = {"role": "user", "content": "hi"}
    body = CountBody(model="m", messages=[user, *[assistant] * 20_000, user])
    start_s = time.thread_time()

    chat = to_chat_body(body, has_reasoning=True)

    # Building a text for each message took minutes.
    assert time.thread_time() - start_s < machine_s(20)
    assert chat.messages[1]["reasoning"] == "r" * 1500 * 20_000

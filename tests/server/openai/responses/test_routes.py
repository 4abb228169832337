"""/v1/responses over HTTP: whole and streamed answers, storage, and refusals."""

import asyncio
import json
from typing import Any

import pytest
from http_rig import (
    THINKING_TEMPLATE,
    TOKENIZER,
    Rig,
    TalkingClient,
    ids,
    in_memory,
    on_port,
)

from server.serving import job

ROUTE = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OUTPUT = {"type": "function_call_output", "output": "done"}
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": Oslo'


def speaking(reply: str, **config: Any) -> Any:
    return in_memory(TalkingClient(reply), **{"chat_template": THINKING_TEMPLATE, **config})


async def resolve_request(rig: Rig, given: Any = "hi", **fields: Any) -> dict[str, Any]:
    answer = await rig.post(ROUTE, {"input": given, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def streamed(rig: Rig, given: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    return told((await rig.post(ROUTE, {"input": given, "stream": True, **fields})).text)


def told(stream: str) -> list[dict[str, Any]]:
    """Events of a stream. Checks that each event has two lines and the next sequence number."""
    *frames, end = stream.split("\n\n")
    assert end == ""
    made = []
    for number, frame in enumerate(frames):
        event, data = frame.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert event == f"event: {made[-1]['type']}"
        assert made[-1]["sequence_number"] == made[0]["sequence_number"] + number
    return made


def alike(response: dict[str, Any]) -> dict[str, Any]:
    """The response without the fields that differ between two answers to the same question."""
    text = json.dumps({**response, "created_at": 0, "completed_at": 0})
    for item in response["output"]:
        text = text.replace(item.get("call_id", "?"), "call")
    return json.loads(text.replace(response["id"].removeprefix("resp_"), "ID"))  # type: ignore[no-any-return]


def error_of(answer: Any) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["message"]


async def prompt_of(rig: Rig, place: int = -1) -> str:
    return TOKENIZER.decode(rig.client.queues[place].prompt, skip_special_tokens=False)


async def test_a_response_has_the_fields_of_its_request_and_an_item_per_output() -> None:
    async with speaking(THOUGHT + "One moment.\n" + CALL) as rig:
        made = await resolve_request(
            rig, tools=[WEATHER], instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
        )

        thought, message, call = made.pop("output")
        number = made["id"].removeprefix("resp_")
        assert thought == {
            "id": f"rs_{number}_0",
            "type": "reasoning",
            "summary": [],
            "status": "completed",
            "content": [{"type": "reasoning_text", "text": "Let me see."}],
        }
        part = {"type": "output_text", "text": "One moment.", "annotations": [], "logprobs": []}
        assert message == {
            "id": f"msg_{number}_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
        assert call.pop("call_id").startswith("call_")
        assert call == {
            "id": f"fc_{number}_2",
            "type": "function_call",
            "name": "get_weather",
            "status": "completed",
            "arguments": '{"city": "Oslo"}',
        }
        usage = made.pop("usage")
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == len(ids(THOUGHT.strip()))
        expected = {
            **{"object": "response", "status": "completed", "error": None, "model": "demo"},
            **{"incomplete_details": None, "instructions": "Be brief.", "metadata": {"a": "b"}},
            **{"parallel_tool_calls": True, "previous_response_id": None, "temperature": 0.5},
            **{"top_p": 1.0, "tool_choice": "auto", "truncation": "disabled", "store": True},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tools": [{**WEATHER, "description": None, "strict": None}],
            "reasoning": {"effort": None, "summary": None},
        }
        assert expected.items() <= made.items()
        assert "Be brief." in await prompt_of(rig)


async def test_encrypted_reasoning_is_returned_without_its_text() -> None:
    asks = {"include": ["reasoning.encrypted_content"]}
    template = "{{ messages | tojson }}<think>"
    async with speaking(THOUGHT + "Hi.", chat_template=template, reasoning_parser="qwen3") as rig:
        thought, said = (await resolve_request(rig, **asks))["output"]
        events = await streamed(rig, **asks)
        del thought["content"]
        await resolve_request(rig, [{"role": "user", "content": "hi"}, thought, said])

        same = events[-1]["response"]["output"][0]
        assert same["encrypted_content"] == thought["encrypted_content"]
        assert same in [event.get("item") for event in events]
        shown, _ = json.JSONDecoder().raw_decode(await prompt_of(rig))
        assert (shown[1]["reasoning_content"], shown[1]["content"]) == ("Let me see.", "Hi.")


async def test_events_are_in_the_documented_order() -> None:
    async with speaking(THOUGHT + "Hi.\n" + CALL) as rig:
        events = await streamed(rig, tools=[WEATHER])

        kinds: list[str] = []
        for event in events:
            if not kinds or kinds[-1] != event["type"]:
                kinds.append(event["type"])
        whole = [
            *("output_item.added", "content_part.added", "{0}.delta", "{0}.done"),
            *("content_part.done", "output_item.done"),
        ]
        call = ("function_call_arguments.delta", "function_call_arguments.done")
        assert [kind.removeprefix("response.") for kind in kinds] == [
            *("created", "in_progress"),
            *(kind.format("reasoning_text") for kind in whole),
            *(kind.format("output_text") for kind in whole),
            *("output_item.added", *call, "output_item.done", "completed"),
        ]
        assert events[0]["response"]["status"] == "in_progress"
        assert events[0]["response"]["output"] == []
        items = events[-1]["response"]["output"]
        for event in events[2:-1]:
            item = items[event["output_index"]]
            assert event.get("item_id", item["id"]) == item["id"]
            assert event.get("content_index", 0) == 0
        done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
        assert done == items
        texts = [event["delta"] for event in events if event["type"].endswith("text.delta")]
        assert "".join(texts) == "Let me see.Hi."


@pytest.mark.parametrize(
    ("reply", "fields"),
    [
        ("Hello, world.", {}),
        (THOUGHT + CALL + CALL, {}),
        ("A " + CALL + " B " + CALL + " C", {"max_tool_calls": 3}),
        (CALL + CALL, {"parallel_tool_calls": False}),
        (THOUGHT + "Hi. " + CALL, {"max_output_tokens": 30}),
        (THOUGHT + "Hi. " + CALL, {"max_output_tokens": 60}),
        (THOUGHT, {"max_output_tokens": 3}),
        (THOUGHT + "Hi. " + BROKEN, {}),
        (THOUGHT + "Hi.", {"include_reasoning": False}),
        (THOUGHT + "Hi END", {"stop": "END"}),
        (THOUGHT + "Hi.", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("Hi.", {"include": ["message.output_text.logprobs"], "stop": ["Hi."]}),
        ("", {}),
    ],
    ids=range(13),
)
async def test_a_stream_ends_with_the_whole_answer(reply: str, fields: Any) -> None:
    async with speaking(reply) as rig:
        whole = await resolve_request(rig, tools=[WEATHER], **fields)
        events = await streamed(rig, tools=[WEATHER], **fields)

        last = events[-1]
        assert alike(last["response"]) == alike(whole)
        assert last["type"] == f"response.{whole['status']}"
        texts: dict[str, str] = {}
        logprobs: dict[str, list[Any]] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
                logprobs.setdefault(event["item_id"], []).extend(event.get("logprobs", []))
        for item in last["response"]["output"]:
            (part,) = item.get("content", [{"text": item.get("arguments")}])
            assert texts.get(item["id"], "") == part["text"]
            assert logprobs.get(item["id"], []) == part.get("logprobs", [])


async def test_an_output_text_has_only_the_logprobs_of_its_own_tokens() -> None:
    async with speaking(THOUGHT + "Ha ha <b> é.\n" + CALL) as rig:
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        part = (await resolve_request(rig, tools=[WEATHER], **asked))["output"][1]["content"][0]

        data = b"".join(bytes(item["bytes"]) for item in part["logprobs"])
        assert data.decode() == part["text"] == "Ha ha <b> é."
        assert all(len(item["top_logprobs"]) == 1 for item in part["logprobs"])


async def test_a_response_keeps_a_limited_number_of_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "MAX_KEPT_LOGPROBS", 20)
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with speaking("x" * 50) as rig:
        await resolve_request(rig, max_output_tokens=10, **asked)
        refused = await rig.post(ROUTE, {"input": "hi", "max_output_tokens": 11, **asked})
        events = await streamed(rig, max_output_tokens=11, **asked)

        assert refused.status_code == 400
        assert "at most 20 are allowed" in refused.json()["error"]["message"]
        assert events[-1]["type"] == "response.failed"
        assert "at most 20 are allowed" in events[-1]["response"]["error"]["message"]


async def test_an_answer_cut_by_its_length_is_incomplete() -> None:
    async with speaking("A long answer.") as rig:
        made = await resolve_request(rig, max_output_tokens=3)

        assert made["status"] == made["output"][0]["status"] == "incomplete"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_an_invalid_call_is_text_and_not_an_item() -> None:
    async with speaking("Hi. " + BROKEN) as rig:
        events = await streamed(rig, tools=[WEATHER])

        kinds = [item["type"] for item in events[-1]["response"]["output"]]
        assert kinds == ["message"]
        dones = [event for event in events if event["type"] == "response.output_item.done"]
        assert [(done["item"]["type"], done["item"]["status"]) for done in dones] == [
            ("message", "completed")
        ]


async def test_a_streamed_call_stays_in_the_output_if_its_arguments_cannot_be_parsed() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo, "x": 1}}</tool_call>'
    async with speaking(f"Hi. {call} So.") as rig:
        events = await streamed(rig, tools=[WEATHER])

        output = events[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["message", "function_call", "message"]
        arguments = [
            event["delta"]
            for event in events
            if event["type"] == "response.function_call_arguments.delta"
        ]
        assert "".join(arguments) == output[1]["arguments"] == '{"city": "Oslo, "x": 1}}'


async def test_sampling_parameters_text_format_and_reasoning_effort_reach_the_engine() -> None:
    async with speaking("{}") as rig:
        schema = {"type": "object"}
        made = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        answer = await resolve_request(
            rig, text={"format": made}, top_k=3, seed=7, max_output_tokens=9
        )
        await resolve_request(rig, reasoning={"effort": "none", "summary": "auto"}, temperature=0)

        sampling = rig.client.queues[0].sampling
        assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (3, 7, 9)
        assert sampling.structured_outputs is not None
        assert answer["text"]["format"] == made
        assert (await prompt_of(rig)).endswith("<think></think>")


async def test_a_response_continues_the_previous_response_without_its_instructions() -> None:
    async with speaking(THOUGHT + CALL) as rig:
        first = await resolve_request(rig, "Weather?", tools=[WEATHER], instructions="SECRET")
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        rig.client.reply = "It rains."
        second = await resolve_request(
            rig, [result], previous_response_id=first["id"], instructions="Rhyme."
        )
        carried = await prompt_of(rig)
        third = await resolve_request(rig, "And now?", previous_response_id=second["id"])

        prompt = await prompt_of(rig)
        assert "SECRET" not in prompt and "Rhyme." in carried and "Rhyme." not in prompt
        places = [prompt.index(word) for word in ("Weather?", "rain", "It rains.", "And now?")]
        assert places == sorted(places)
        assert third["previous_response_id"] == second["id"]
        page = (await rig.http.get(f"{ROUTE}/{third['id']}/input_items?order=asc")).json()
        kinds = ["message", "reasoning", "function_call", "function_call_output"]
        assert [item["type"] for item in page["data"]] == [*kinds, "message", "message"]


async def test_an_item_may_be_referred_to_instead_of_sent() -> None:
    async with speaking("Forty-two.") as rig:
        first = await resolve_request(rig, "What is it?")
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        await resolve_request(rig, [reference, {"role": "user", "content": "Why?"}])
        gone = await rig.post(ROUTE, {"input": [{"id": "msg_x_0"}]})

        assert "assistant\nForty-two." in await prompt_of(rig)
        assert error_of(gone)[:2] == (404, "input")


async def test_input_items_are_paginated() -> None:
    async with speaking("x") as rig:
        items = [{"role": "user", "content": str(number)} for number in range(5)]
        made = await resolve_request(rig, items)
        path = f"{ROUTE}/{made['id']}/input_items"

        first = (await rig.http.get(path, params={"limit": 3})).json()
        second = (await rig.http.get(path, params={"limit": 3, "after": first["last_id"]})).json()

        texts = [item["content"][0]["text"] for item in first["data"] + second["data"]]
        assert texts == ["4", "3", "2", "1", "0"]
        assert (first["has_more"], second["has_more"]) == (True, False)
        assert first["first_id"] == first["data"][0]["id"]
        wrong = ("limit=0", "limit=101", "order=up", "after=nothing", "limit=x")
        for query in (*wrong, "limit=1_0", "limit=%203", "limit=%2B3", "limit=3.0", "limit="):
            assert (await rig.http.get(f"{path}?{query}")).status_code == 400


async def test_a_response_is_kept_until_it_is_deleted() -> None:
    async with speaking("x") as rig:
        made = await resolve_request(rig)
        path = f"{ROUTE}/{made['id']}"

        kept = (await rig.http.get(path)).json()
        cancelled = await rig.post(f"{path}/cancel", {})
        deleted = (await rig.http.delete(path)).json()
        missing = [await rig.http.get(path), await rig.http.delete(path)]

        assert kept == made
        assert error_of(cancelled)[0] == 400
        assert deleted == {"id": made["id"], "object": "response", "deleted": True}
        assert [answer.status_code for answer in missing] == [404, 404]
        assert missing[0].json()["error"]["code"] == "not_found"


async def test_responses_with_store_false_are_not_stored() -> None:
    async with speaking("x") as rig:
        made = await resolve_request(rig, store=False)
        next_one = await rig.post(ROUTE, {"input": "y", "previous_response_id": made["id"]})

        assert made["store"] is False
        assert (await rig.http.get(f"{ROUTE}/{made['id']}")).status_code == 404
        assert error_of(next_one)[:2] == (404, "previous_response_id")


async def test_a_server_without_a_store_refuses_stored_responses() -> None:
    async with speaking("x", responses_store_max_count=0) as rig:
        made = await resolve_request(rig)

        assert made["store"] is False
        for field, value in (("store", True), ("background", True), ("previous_response_id", "r")):
            refused = await rig.post(ROUTE, {"input": "x", field: value})
            assert error_of(refused)[:2] == (400, field)


async def test_input_tokens_equal_the_usage_of_the_response() -> None:
    async with speaking("x") as rig:
        body = {"input": "Hello", "instructions": "Be kind.", "tools": [WEATHER]}
        counted = (await rig.post(f"{ROUTE}/input_tokens", body)).json()
        usage = (await rig.post(ROUTE, body)).json()["usage"]

        assert counted == {
            "object": "response.input_tokens",
            "input_tokens": usage["input_tokens"],
        }
        assert len(rig.client.queues) == 1


async def test_truncation_drops_the_oldest_turns_and_keeps_the_rules() -> None:
    turns = [{"role": "user", "content": f"turn {number} " + "x" * 50} for number in range(20)]
    async with in_memory(TalkingClient("x", max_model_len=400)) as rig:
        fields = {"input": turns, "instructions": "RULES", "max_output_tokens": 20}
        refused = await rig.post(ROUTE, fields)
        taken = await rig.post(ROUTE, {**fields, "truncation": "auto"})
        hopeless = await rig.post(ROUTE, {"input": "y" * 500, "truncation": "auto"})

        status, param, message = error_of(refused)
        assert (status, param) == (400, "input")
        assert "This model's maximum context length is 400 tokens" in message
        assert taken.status_code == 200, taken.text
        prompt = await prompt_of(rig)
        assert "RULES" in prompt and "turn 19" in prompt and "turn 0 " not in prompt
        assert 300 < len(rig.client.queues[0].prompt) <= 380
        assert error_of(hopeless)[0] == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": {}, "role": "user", "content": ""}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": {}}]}, "input[0].summary"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_tokens": 9, "max_output_tokens": 3}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "immense"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": [WEATHER]}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [5]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"model": "other"}, "model"),
        ({"stop": "x", "use_beam_search": True}, "use_beam_search"),
    ],
)
async def test_invalid_and_unsupported_fields_are_refused_by_name(fields: Any, param: str) -> None:
    async with speaking("x") as rig:
        for stream in (False, True):
            refused = await rig.post(ROUTE, {"input": "hi", "stream": stream, **fields})

            expected = 404 if param in ("model", "previous_response_id") else 400
            assert error_of(refused)[:2] == (expected, param)
            assert refused.headers["content-type"] == "application/json"
        assert not rig.client.queues


async def test_a_refusal_uses_the_field_names_of_this_api() -> None:
    async with speaking("x") as rig:
        refused = await rig.post(ROUTE, {"input": "hi", "reasoning": {"effort": "immense"}})

        assert error_of(refused)[2].startswith("reasoning.effort is ")


async def test_null_unknown_and_harmless_fields_are_accepted() -> None:
    async with speaking("x") as rig:
        names = (await rig.http.get("/openapi.json")).json()
        fields = names["components"]["schemas"]["ResponseBody"]["properties"]
        nulls = {name: None for name in fields if name != "input"}
        harmless = {
            **{"user": "u", "service_tier": "auto", "safety_identifier": "s", "tools": []},
            **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "what": 1},
            **{"prompt_cache_retention": "24h", "stream_options": None, "n": 1, "echo": False},
            **{"text": {"verbosity": "low"}, "max_tool_calls": 3, "top_logprobs": 0},
        }

        assert (await rig.post(ROUTE, {"input": "hi", **nulls})).status_code == 200
        assert (await rig.post(ROUTE, {"input": "hi", **harmless})).status_code == 200


async def test_only_allowed_tools_are_shown() -> None:
    async with speaking("x") as rig:
        other = {**WEATHER, "name": "other"}
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}
        made = await resolve_request(rig, tools=[WEATHER, other], tool_choice=allowed)

        prompt = await prompt_of(rig)
        assert "get_weather" in prompt and "other" not in prompt
        assert made["tool_choice"] == allowed and len(made["tools"]) == 2


MAIL = {"type": "namespace", "name": "mcp__mail", "tools": [{**WEATHER, "name": "send"}]}


async def test_tools_and_items_of_other_servers_are_ignored_and_named() -> None:
    async with speaking("x") as rig:
        answer = await rig.post(
            ROUTE,
            {
                "input": [
                    {"role": "user", "content": "hi"},
                    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                    {"type": "compaction", "encrypted_content": "x"},
                    {"role": "assistant", "content": [{"type": "output_audio", "data": "x"}]},
                ],
                "context_management": [{"type": "compaction", "compact_threshold": 9}],
                "tools": [
                    WEATHER,
                    {"type": "web_search", "external_web_access": False},
                    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
                    {**MAIL, "tools": [*MAIL["tools"], {"type": "custom", "name": "c"}]},
                ],
            },
        )

        assert answer.status_code == 200, answer.text
        named = answer.headers["x-gaudiserve-ignored-fields"].split(", ")
        assert named == [
            "tools[1]:web_search",
            "tools[2]:custom",
            "tools[3].tools[1]:custom",
            "context_management[0]:compaction",
            "input[1]:web_search_call",
            "input[2]:compaction",
            "input[3].content[0]:output_audio",
        ]
        prompt = await prompt_of(rig)
        assert "get_weather" in prompt and "mcp__mail__send" in prompt
        assert "apply_patch" not in prompt and "web_search" not in prompt
        offered = [entry["name"] for entry in answer.json()["tools"]]
        assert offered == ["get_weather", "mcp__mail"]
        assert [entry["name"] for entry in answer.json()["tools"][1]["tools"]] == ["send"]


async def test_a_request_with_only_ignored_tools_has_no_tools() -> None:
    async with speaking("x") as rig:
        for choice in (None, "auto", "none"):
            made = await resolve_request(rig, tools=[{"type": "web_search"}], tool_choice=choice)

            assert made["tools"] == []
            assert "web_search" not in await prompt_of(rig)


async def test_calls_of_namespaced_functions_keep_their_namespace() -> None:
    call = CALL.replace("get_weather", "mcp__mail__send")
    plain = {**WEATHER, "name": "a__b"}
    shows = "{% for m in messages for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
    template = THINKING_TEMPLATE + shows.replace(" for c", " %}{% for c") + "{% endfor %}"
    reply = call + CALL.replace("get_weather", "a__b")
    async with speaking(reply, chat_template=template) as rig:
        made = await resolve_request(rig, tools=[MAIL, plain])
        events = await streamed(rig, tools=[MAIL, plain])
        again = [*made["output"], {**OUTPUT, "call_id": made["output"][0]["call_id"]}]
        forced = {"type": "function", "namespace": "mcp__mail", "name": "send"}
        assert "'g'" in error_of(
            await rig.post(
                ROUTE, {"input": "hi", "tools": [MAIL], "tool_choice": {**forced, "name": "g"}}
            )
        )[2].replace("mcp__mail__", "")
        await resolve_request(rig, again, tools=[MAIL], store=False)
        await resolve_request(rig, "on", tools=[MAIL], previous_response_id=made["id"])

        names = [(entry["name"], entry.get("namespace")) for entry in made["output"]]
        assert names == [("send", "mcp__mail"), ("a__b", None)]
        items = [
            entry["item"] for entry in events if entry["type"].startswith("response.output_item.")
        ]
        assert [(entry["name"], entry.get("namespace")) for entry in items] == [
            *[("send", "mcp__mail")] * 2,
            *[("a__b", None)] * 2,
        ]
        for place in (-1, -2):
            assert "(mcp__mail__send)" in await prompt_of(rig, place)


async def test_a_namespace_that_is_not_a_string_is_ignored() -> None:
    async with speaking(CALL) as rig:
        made = await resolve_request(rig, tools=[{**WEATHER, "namespace": 5}])

        (call,) = made["output"]
        assert call["name"] == "get_weather"
        assert "namespace" not in call


async def test_a_failure_during_a_stream_is_a_failed_response() -> None:
    client = TalkingClient("A long answer")
    client.before = lambda queue: bool(
        queue.say(*ids("Half ")) or queue.say(finish="error", error="NaN")
    )
    async with in_memory(client) as rig:
        events = await streamed(rig)
        whole = await rig.post(ROUTE, {"input": "hi"})

        last = events[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "NaN"}
        assert last["response"]["output"][0]["content"][0]["text"] == "Half "
        assert whole.status_code == 500
        path = f"{ROUTE}/{last['response']['id']}"
        assert (await rig.http.get(path)).json() == last["response"]
        follow_events = await rig.post(
            ROUTE, {"input": "x", "previous_response_id": last["response"]["id"]}
        )
        assert error_of(follow_events)[:2] == (400, "previous_response_id")


async def test_a_disconnect_ends_the_stream_and_leaks_nothing() -> None:
    client = TalkingClient("abc", pace_s=0.005)
    client.endless = True
    async with on_port(client) as rig:
        async with rig.http.stream("POST", ROUTE, json={"input": "x", "stream": True}) as stream:
            async for line in stream.aiter_lines():
                if "output_text.delta" in line:
                    break
        for _ in range(100):
            await asyncio.sleep(0 if client.aborted else 0.01)

        assert len(client.aborted) == 1
        assert not rig.state.active_requests

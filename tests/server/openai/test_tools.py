"""Tools and thinking over HTTP: whole answers, streams, and refusals."""

import json
import threading
from typing import Any

import pytest
import text_folders
from http_rig import (
    TEMPLATE,
    THINKING_TEMPLATE,
    TOKENIZER,
    TOOLS_TEMPLATE,
    Rig,
    TalkingClient,
    events,
    ids,
    in_memory,
)

from server.openai.schema import chat, generation
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TextFiles

NO_OTHERS = {"annotations": None, "audio": None, "function_call": None}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ålesund"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


def with_tools(reply: str, **config: Any) -> Any:
    return in_memory(TalkingClient(reply), **{"chat_template": TOOLS_TEMPLATE, **config})


MANY_PROPERTIES = {f"a{n}": {"type": "string"} for n in range(3_000)}
LARGE = {"type": "object", "properties": MANY_PROPERTIES}
LARGE_TOOL = {"type": "function", "function": {"name": "f", "parameters": LARGE}}
LARGE_FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": LARGE}}
USER = [{"role": "user", "content": "hi"}]
LARGE_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [LARGE_TOOL], "tool_choice": "required"},
    ),
    (
        "/v1/chat/completions/input_tokens",
        {"messages": USER, "tools": [LARGE_TOOL], "tool_choice": "required"},
    ),
    ("/v1/chat/completions", {"messages": USER, "response_format": LARGE_FORMAT}),
    ("/v1/completions", {"prompt": "hi", "response_format": LARGE_FORMAT}),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": LARGE}}),
    (
        "/v1/responses",
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "f", "parameters": LARGE}],
            "tool_choice": "required",
        },
    ),
    (
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 4,
            "tools": [{"name": "f", "input_schema": LARGE}],
            "tool_choice": {"type": "any"},
        },
    ),
]


@pytest.mark.parametrize(("route", "body"), LARGE_REQUESTS)
async def test_the_grammar_of_a_large_schema_is_built_on_a_thread(
    monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any]
) -> None:
    are_main: list[bool] = []

    def spied(call: Any) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            if any(args):
                are_main.append(threading.current_thread() is threading.main_thread())
            return call(*args, **kwargs)

        return spy

    monkeypatch.setattr(chat, "forced_schema", spied(chat.forced_schema))
    monkeypatch.setattr(chat, "check_tools", spied(chat.check_tools))
    monkeypatch.setattr(generation, "spec_of", spied(generation.spec_of))
    async with with_tools("{}") as rig:
        answer = await rig.post(route, body)

    assert answer.status_code in (200, 400), answer.text
    assert are_main and not any(are_main)


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message and the finish reason assembled from the chunks of a choice."""
    made: dict[str, Any] = {"content": None, "reasoning": None, "calls": [], "logprobs": []}
    choices = [
        c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index
    ]
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning"):
            if delta.get(name):
                made[name] = (made[name] or "") + delta[name]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(made["calls"]) and call["type"] == "function"
                assert call["function"]["arguments"] == ""
                made["calls"].append([call["id"], call["function"]["name"], ""])
            else:
                assert list(call["function"]) == ["arguments"]
                made["calls"][call["index"]][2] += call["function"]["arguments"]
        made["logprobs"] += (choice["logprobs"] or {}).get("content", [])
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    made["finish_reason"] = choices[-1]["finish_reason"]
    return made


def whole(answer: dict[str, Any], index: int = 0) -> dict[str, Any]:
    choice = answer["choices"][index]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    return {
        "content": message["content"] or None,
        "reasoning": message.get("reasoning"),
        "calls": [[c["id"], *c["function"].values()] for c in calls],
        "logprobs": (choice["logprobs"] or {}).get("content", []),
        "finish_reason": choice["finish_reason"],
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "calls": [call[1:] for call in message["calls"]]}


async def both(rig: Rig, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The answer to the same request, whole and streamed."""
    answer = await rig.chat(**fields)
    assert answer.status_code == 200, answer.text
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await rig.chat(**fields, stream=True, stream_options=options)
    return answer.json(), events(stream.content)


async def test_calls_are_in_the_message_and_text_before_them_is_kept() -> None:
    async with with_tools("One moment.\n" + CALLS) as rig:
        choice = (await rig.chat(tools=[WEATHER, NOW])).json()["choices"][0]

        calls = choice["message"].pop("tool_calls")
        assert choice["message"] == {
            "role": "assistant",
            "content": "One moment.",
            "refusal": None,
            **NO_OTHERS,
        }
        assert [call["function"] for call in calls] == [
            {"name": "get_weather", "arguments": '{"city": "Ålesund"}'},
            {"name": "now", "arguments": "{}"},
        ]
        assert len({call["id"] for call in calls}) == 2
        assert all(call["id"].startswith("call_") for call in calls)
        assert choice["finish_reason"] == "tool_calls"
        prompt = TOKENIZER.decode(rig.client.queues[0].prompt, skip_special_tokens=False)
        assert json.loads(prompt[: prompt.index("<tool_call>")]) == [WEATHER, NOW]


@pytest.mark.parametrize(
    ("reply", "fields"),
    [
        (CALLS, {}),
        ("Hm. " + CALLS + " Done.", {"n": 2, "logprobs": True, "top_logprobs": 1}),
        ("No call <tool", {"return_token_ids": True}),
        (CALLS, {"max_tokens": 40}),
        (CALLS, {"stop": ["Ålesund"]}),
        ("Well END " + CALLS, {"stop": "END"}),
        (CALLS, {"parallel_tool_calls": False}),
        (THOUGHT + CALLS, {"n": 2, "logprobs": True}),
        ("<think>Hm. " + CALLS, {}),
        (THOUGHT + "Yes.", {"max_tokens": 12}),
        (THOUGHT + "Yes.", {"include_reasoning": False}),
        (THOUGHT + "Yes.", {"echo": True}),
    ],
)
async def test_a_stream_equals_the_whole_answer(reply: str, fields: Any) -> None:
    async with with_tools(reply, chat_template=THINKING_TEMPLATE) as rig:
        answer, chunks = await both(rig, tools=[WEATHER, NOW], **fields)

        for index in range(fields.get("n", 1)):
            assert without_ids(joined(chunks, index)) == without_ids(whole(answer, index))
        assert chunks[-1]["usage"] == answer["usage"]
        num_tokens = answer["usage"]["completion_tokens"]
        if fields.get("logprobs"):
            assert len(joined(chunks)["logprobs"]) * fields["n"] == num_tokens
        if fields.get("return_token_ids"):
            sent = [i for c in chunks if c["choices"] for i in c["choices"][0].get("token_ids", ())]
            assert sent == answer["choices"][0]["token_ids"]


async def test_a_call_cut_by_length_has_finish_reason_length() -> None:
    async with with_tools(CALLS) as rig:
        choice = (await rig.chat(tools=[WEATHER], max_tokens=60)).json()["choices"][0]

        (call,) = choice["message"]["tool_calls"]
        assert '{"city": "Ålesund"}'.startswith(call["function"]["arguments"])
        assert choice["finish_reason"] == "length"


async def test_a_malformed_call_is_content() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>'
    async with with_tools(text) as rig:
        message = whole((await rig.chat(tools=[NOW])).json())

        assert (message["content"], message["calls"]) == (text, [])
        assert message["finish_reason"] == "stop"


async def test_without_parallel_calls_there_is_a_single_call() -> None:
    async with with_tools(CALLS) as rig:
        answer = await rig.chat(tools=[WEATHER, NOW], parallel_tool_calls=False)

        assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_tool_choice_none_renders_no_tools_and_parses_no_calls() -> None:
    async with with_tools(CALLS) as rig:
        choice = (await rig.chat(tools=[WEATHER], tool_choice="none")).json()["choices"][0]

        assert choice["message"]["content"] == CALLS
        assert choice["finish_reason"] == "stop"
        assert "get_weather" not in TOKENIZER.decode(rig.client.queues[0].prompt)


async def test_tokenize_counts_tools_like_a_chat() -> None:
    async with with_tools("Hello") as rig:
        messages = [{"role": "user", "content": "hi"}]
        counted = await rig.post("/tokenize", {"messages": messages, "tools": [WEATHER]})
        answer = await rig.chat(tools=[WEATHER])

        assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]


async def test_reasoning_is_returned_under_both_names_and_its_tokens_are_counted() -> None:
    async with with_tools(THOUGHT + "Yes.", chat_template=THINKING_TEMPLATE) as rig:
        answer = (await rig.chat()).json()
        hidden = (await rig.chat(include_reasoning=False)).json()
        off = (await rig.chat(reasoning_effort="none")).json()

        assert answer["choices"][0]["message"] == {
            "role": "assistant",
            "content": "Yes.",
            "refusal": None,
            "reasoning": "Let me see.",
            "reasoning_content": "Let me see.",
            **NO_OTHERS,
        }
        count = len(ids(THOUGHT.rstrip()))
        for item in (answer, hidden):
            assert item["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
        assert "reasoning" not in hidden["choices"][0]["message"]
        prompt = TOKENIZER.decode(rig.client.queues[2].prompt, skip_special_tokens=False)
        assert prompt.endswith("<think></think>")
        assert off["choices"][0]["message"]["reasoning"] == "Let me see."


async def test_reasoning_tokens_of_a_single_update_are_counted_the_same() -> None:
    text = "<think>" + "word " * 200 + "</think>Yes."

    class AtOnce(TalkingClient):
        """Sends all output in a single update."""

        async def _talk(self, queue: Any) -> None:
            queue.say(*ids(text), finish="stop")

    counts = []
    for client in (TalkingClient(text), AtOnce()):
        async with in_memory(client, chat_template=THINKING_TEMPLATE) as rig:
            usage = (await rig.chat()).json()["usage"]
            counts.append(usage["completion_tokens_details"]["reasoning_tokens"])

    assert counts == [len(ids(text.removesuffix("Yes.")))] * 2


async def test_a_call_in_the_reasoning_is_parsed_as_a_call() -> None:
    async with with_tools(f"<think>Hm. {CALLS}\n</think>", chat_template=THINKING_TEMPLATE) as rig:
        answer = (await rig.chat(tools=[WEATHER, NOW])).json()

        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (None, "Hm.")
        assert [call["function"]["name"] for call in message["tool_calls"]] == [
            "get_weather",
            "now",
        ]
        count = len(ids("<think>Hm. <tool_call>"))
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == count


async def test_a_call_in_the_reasoning_is_text_if_a_grammar_constrains_calls() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    async with with_tools(f"<think>Hm. {CALLS}", chat_template=THINKING_TEMPLATE) as rig:
        answer = (await rig.chat(tools=[strict, NOW])).json()

        assert "tool_calls" not in answer["choices"][0]["message"]
        assert CALLS in answer["choices"][0]["message"]["reasoning"]


async def test_thinking_that_never_ends_is_the_whole_answer() -> None:
    async with with_tools("<think>Hm", chat_template=THINKING_TEMPLATE) as rig:
        answer = (await rig.chat()).json()

        assert answer["choices"][0]["message"]["content"] is None
        assert answer["choices"][0]["message"]["reasoning"] == "Hm"
        usage = answer["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]


async def test_special_token_markers_are_parsed_and_other_special_tokens_are_hidden() -> None:
    encoder = text_folders.byte_level()
    encoder.add_special_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", "<noise>"])
    tokenizer = Tokenizer(TextFiles(encoder, {}, None))
    client = TalkingClient(vocab_size=tokenizer.vocab_size)
    said = '<think>a</think>b<noise><tool_call>{"name": "now"}</tool_call>'
    client.reply_ids = tokenizer.encode_now(said, False)
    async with in_memory(client, tokenizer=tokenizer, chat_template=THINKING_TEMPLATE) as rig:
        answer, chunks = await both(rig, tools=[NOW])
        plain = (await rig.complete(max_tokens=100)).json()

        assert without_ids(whole(answer)) == without_ids(joined(chunks))
        assert whole(answer)["reasoning"] == "a"
        assert whole(answer)["content"] == "b"
        assert [call[1:] for call in whole(answer)["calls"]] == [["now", "{}"]]
        assert plain["choices"][0]["text"] == 'ab{"name": "now"}'
    tokenizer.close()


@pytest.mark.parametrize(
    ("template", "marks", "said", "thinking"),
    [
        (
            "<|constrain|>",
            ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"],
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.now <|constrain|>json<|message|>{}",
            "<|channel|>analysis<|message|>a<|end|>",
        ),
        (
            "<|tool_call><|channel>",
            ["<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'],
            "<|channel>thought\na<channel|><|tool_call>call:now{}<tool_call|>",
            "<|channel>thought\na<channel|>",
        ),
    ],
)
async def test_a_channel_template_selects_the_channel_parser(
    template: str, marks: list[str], said: str, thinking: str
) -> None:
    encoder = text_folders.byte_level()
    encoder.add_special_tokens(marks)
    tokenizer = Tokenizer(TextFiles(encoder, {}, None))
    client = TalkingClient(vocab_size=tokenizer.vocab_size)
    client.reply_ids = tokenizer.encode_now(said, False)
    chosen = TOOLS_TEMPLATE.replace("<tool_call>", template)
    async with in_memory(client, tokenizer=tokenizer, chat_template=chosen) as rig:
        answer, chunks = await both(rig, tools=[NOW])

        assert without_ids(whole(answer)) == without_ids(joined(chunks))
        assert (whole(answer)["reasoning"], whole(answer)["content"]) == ("a", None)
        assert [call[1:] for call in whole(answer)["calls"]] == [["now", "{}"]]
        count = len(tokenizer.encode_now(thinking, False))
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    tokenizer.close()


async def test_parsers_can_be_chosen_and_switched_off() -> None:
    async with with_tools('[TOOL_CALLS]now[ARGS]{"a": 1}', tool_call_parser="mistral") as rig:
        answer = (await rig.chat(tools=[NOW])).json()

        (call,) = whole(answer)["calls"]
        assert len(call[0]) == 9 and call[0].isalnum()
        assert call[1:] == ["now", '{"a": 1}']
    async with with_tools(THOUGHT, chat_template=THINKING_TEMPLATE, reasoning_parser="none") as rig:
        message = (await rig.chat()).json()["choices"][0]["message"]

        assert message == {
            **{"role": "assistant", "content": THOUGHT, "refusal": None},
            **NO_OTHERS,
        }


NAMED = {"type": "function", "function": {"name": "get_weather"}}
REQUIRED_REPLY = (
    '[{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]'
)
OSLO = ["get_weather", '{"city": "Oslo"}']


@pytest.mark.parametrize(
    ("choice", "reply", "calls", "reason"),
    [
        ("required", REQUIRED_REPLY, [OSLO, ["now", "{}"]], "tool_calls"),
        (NAMED, '{"city": "Oslo"}', [OSLO], "stop"),
    ],
)
async def test_forced_calls_are_parsed_from_constrained_output(
    choice: Any, reply: str, calls: Any, reason: str
) -> None:
    # Forced calls need no tool parser and no thinking, even if the template supports thinking.
    config = {"chat_template": THINKING_TEMPLATE, "tool_call_parser": "none"}
    async with with_tools(reply, **config) as rig:
        answer, chunks = await both(rig, tools=[STRICT_WEATHER, NOW], tool_choice=choice)

        assert without_ids(whole(answer)) == without_ids(joined(chunks))
        assert without_ids(whole(answer))["calls"] == calls
        assert whole(answer)["content"] is None
        assert whole(answer)["finish_reason"] == reason
        assert rig.client.queues[0].sampling.structured_outputs.kind == "json"


async def test_calls_are_parsed_without_tool_support_in_the_template() -> None:
    function = {"type": "function", "name": "now"}
    async with with_tools(CALLS, chat_template=TEMPLATE) as rig:
        answer, chunks = await both(rig, tools=[WEATHER, NOW])
        response = await rig.post("/v1/responses", {"input": "hi", "tools": [function]})
        message = await rig.post(
            "/v1/messages",
            {
                "max_tokens": 200,
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"name": "now", "input_schema": {"type": "object"}}],
            },
        )

        assert without_ids(whole(answer)) == without_ids(joined(chunks))
        assert whole(answer)["finish_reason"] == "tool_calls"
        names = ["get_weather", "now"]
        assert [call[1] for call in whole(answer)["calls"]] == names
        assert [item["name"] for item in response.json()["output"]] == names
        assert [block["name"] for block in message.json()["content"]] == names
        for sequence in rig.client.queues:
            assert "<tools>" in TOKENIZER.decode(sequence.prompt, False)


STRICT_WEATHER = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
UNHELD = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {"properties": {"a": {"type": "string", "maxLength": 3}}},
    },
}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
async def test_tools_and_earlier_parts_of_other_servers_are_ignored_and_named(route: str) -> None:
    parts = [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "yes"}]
    foreign = {"id": "c1", "type": "mcp", "mcp": {"name": "search"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [foreign]},
        {"role": "user", "content": "hi"},
    ]
    ignored = "messages[1].content[0]:reasoning, messages[3].tool_calls[0]:mcp"
    async with with_tools("x") as rig:
        answers = [
            await rig.post(route, {"messages": messages, "tools": tools})
            for tools in ([{"type": "web_search"}, NOW], [NOW], [{"type": "web_search"}], None)
        ]

        assert [answer.status_code for answer in answers] == [200] * 4, answers[0].text
        assert [answer.headers["x-gaudiserve-ignored-fields"] for answer in answers] == [
            f"tools[0]:web_search, {ignored}",
            ignored,
            f"tools[0]:web_search, {ignored}",
            ignored,
        ]
        counts = [answer.json().get("count") for answer in answers]
        if route == "/tokenize":
            assert counts[0] == counts[1] > counts[2] == counts[3]


async def test_a_tool_and_a_choice_without_a_type_are_functions() -> None:
    untyped = {"function": NOW["function"]}
    async with with_tools(CALLS) as rig:
        for tool, choice in (
            (NOW, {"type": "function", **untyped}),
            (untyped, untyped),
            ({**untyped, "type": None}, {**untyped, "type": None}),
        ):
            answer = await rig.chat(tools=[tool], tool_choice=choice)
            assert answer.status_code == 200, answer.text

        typed, *others = [queue.prompt for queue in rig.client.queues]
        assert others == [typed, typed]


def allowed(mode: str = "auto", tools: object = (NOW,)) -> dict[str, object]:
    listed = list(tools) if isinstance(tools, tuple) else tools
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
async def test_only_allowed_tools_are_shown(route: str) -> None:
    async with with_tools(CALLS) as rig:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, NOW]}
        listed = allowed(tools=({"type": "mcp", "server_label": "x"}, NOW))
        prompts = []
        for fields in ({"tool_choice": listed}, {"tools": [NOW]}, {}):
            answer = await rig.post(route, {**body, **fields})
            assert answer.status_code == 200, answer.text
            prompts.append(answer.json().get("tokens") or rig.client.queues[-1].prompt)

    assert prompts[0] == prompts[1] != prompts[2]


async def test_allowed_tools_in_required_mode_force_a_call() -> None:
    reply = '[{"name": "now", "parameters": {}}]'
    async with with_tools(reply) as rig:
        answers = []
        for tools, choice in (
            ([WEATHER, NOW], allowed("required")),
            ([NOW], "required"),
            ([WEATHER, NOW], "required"),
        ):
            answer = await rig.chat(tools=tools, tool_choice=choice)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0])
        grammars = [queue.sampling.structured_outputs for queue in rig.client.queues]

    assert answers[0]["finish_reason"] == "tool_calls"
    assert answers[0]["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert grammars[0] == grammars[1] != grammars[2]


@pytest.mark.parametrize(
    ("fields", "config", "param", "word"),
    [
        *(
            ({"tools": [NOW], "tool_choice": choice}, {}, "tool_choice", word)
            for choice, word in (
                (allowed("none"), "mode 'none'"),
                (allowed(tools=(WEATHER,)), "1 of them not in tools"),
                (allowed(tools=()), "at least 1"),
                (allowed(tools=(5,)), "allowed_tools.tools[0]"),
                (allowed(tools=({"type": "function", "name": "now"},)), "allowed_tools.tools[0]"),
                (allowed(tools=7), "a list of tools"),
                ({"type": "allowed_tools", "mode": "auto", "tools": [NOW]}, "allowed_tools"),
            )
        ),
        ({"tool_choice": allowed()}, {}, "tool_choice", "not in tools"),
        (
            {"tools": [NOW], "tool_choice": allowed()},
            {"enable_auto_tool_choice": False},
            "tool_choice",
            "disabled",
        ),
        ({"tools": [NOW]}, {"chat_template": "{{ tools }}"}, "tools", "--tool-call-parser"),
        ({"tools": [NOW]}, {"tool_call_parser": "none"}, "tools", "--tool-call-parser"),
        ({"tools": [NOW]}, {"enable_auto_tool_choice": False}, "tool_choice", "disabled"),
        (
            {"tools": [NOW]},
            {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "tool_template": "none"},
            "tools",
            "does not render tools",
        ),
        ({"tools": [NOW], "guided_grammar": "start: A"}, {}, "guided_grammar", "tools"),
        (
            {"tools": [NOW], "guided_regex": "a"},
            {"tool_call_parser": "llama3_json"},
            "guided_regex",
            "start without a marker",
        ),
        ({"tools": [NOW], "tool_choice": "any"}, {}, "tool_choice", "'any'"),
        ({"tool_choice": "required"}, {}, "tool_choice", "no tools to call"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            {},
            "tool_choice",
            "'g'",
        ),
        (
            {"tools": [NOW], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            {},
            "tool_choice",
            "has type 'custom', it must be function or allowed_tools",
        ),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {}}},
            {},
            "tool_choice",
            "names a function",
        ),
        (
            {"tools": [NOW], "tool_choice": "required", "guided_regex": "a"},
            {},
            "guided_regex",
            "tool_choice",
        ),
        ({"tools": [UNHELD]}, {"tool_call_parser": "qwen3_coder"}, "tools", "strict"),
        ({"tools": [5]}, {}, "tools[0]", "tools[0]"),
        ({"tools": [{**NOW, "type": 5}]}, {}, "tools[0].type", "tools[0]"),
        ({"tools": [{"name": "f"}]}, {}, "tools[0].function", "tools[0]"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            {},
            "tool_choice",
            "no tools to call",
        ),
        (
            {"tools": [{"type": "web_search"}, {"type": "function"}]},
            {},
            "tools[1].function",
            "tools[1]",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, {}, "tools[0].function.name", "name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            {},
            "tools[0].function.parameters",
            "parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
            {},
            "tools[0].function.description",
            "description",
        ),
    ],
)
async def test_invalid_and_unsupported_tool_settings_are_refused(
    fields: Any, config: Any, param: str, word: str
) -> None:
    async with with_tools("x", **config) as rig:
        for stream in (False, True):
            response = await rig.chat(**fields, stream=stream)

            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param and word in error["message"]


async def test_a_continued_answer_is_reasoning_only_if_it_began_as_reasoning() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    async with with_tools("so.", reasoning_parser="deepseek_r1") as rig:
        answer = await rig.post("/v1/chat/completions", {"messages": messages, **goes_on})

        assert answer.json()["choices"][0]["message"]["content"] == "so."

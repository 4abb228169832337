"""POST /v1/chat/completions: the request to the engine, and whole answers."""

import threading
from typing import Any

import pytest
from http_rig import EOS, TOKENIZER, TalkingClient, events, ids, in_memory
from scripted_client import columns
from text_folders import id_of

from config.errors import UserError
from server.openai.chunks import ChatChunks, CompletionChunks
from server.openai.schema.chat import MAX_ECHO_CHARACTERS, ChatBody, check_messages
from server.serving import job


def prompt_of(client: Any, place: int = 0) -> str:
    return TOKENIZER.decode(client.queues[place].prompt, skip_special_tokens=False)


async def test_an_answer_has_every_documented_key() -> None:
    async with in_memory(TalkingClient("Hello")) as rig:
        answer = (await rig.chat(model="org/demo")).json()

        number, created = answer.pop("id"), answer.pop("created")
        assert number.startswith("chatcmpl-") and isinstance(created, int)
        assert answer == {
            "object": "chat.completion",
            "model": "org/demo",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        **{"role": "assistant", "content": "Hello", "refusal": None},
                        **{"annotations": None, "audio": None, "function_call": None},
                    },
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": None,
                }
            ],
            "usage": {
                "prompt_tokens": len(rig.client.queues[0].prompt),
                "completion_tokens": len(ids("Hello")) + 1,
                "total_tokens": len(rig.client.queues[0].prompt) + len(ids("Hello")) + 1,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "service_tier": None,
            "system_fingerprint": rig.state.fingerprint,
            "kv_transfer_params": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }


async def test_an_empty_name_is_the_served_model() -> None:
    async with in_memory() as rig:
        assert (await rig.chat(model="")).json()["model"] == "demo"


async def test_guided_decoding_backend_is_ignored_and_named() -> None:
    async with in_memory(TalkingClient("a")) as rig:
        fields = {"guided_regex": "a", "guided_decoding_backend": "xgrammar"}
        for answer in (await rig.chat(**fields), await rig.complete(**fields)):
            assert answer.status_code == 200
            assert answer.headers["x-gaudiserve-ignored-fields"] == "guided_decoding_backend"


async def test_the_first_chunk_of_a_stream_counts_no_output() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with in_memory() as rig:
        stream = events((await rig.chat(stream=True, stream_options=options)).content)

        usages = [chunk["usage"] for chunk in stream]
        prompt = usages[0]["prompt_tokens"]
        assert usages[0]["completion_tokens"] == 0
        assert usages[0]["total_tokens"] == prompt == len(rig.client.queues[0].prompt)
        assert usages[1]["completion_tokens"] >= 1


async def test_parts_are_joined_and_developer_messages_are_system_messages() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    async with in_memory() as rig:
        await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
        await rig.chat("Hello")
        developer = {"messages": [{"role": "developer", "content": "x"}]}
        await rig.post("/v1/chat/completions", developer)

        assert prompt_of(rig.client, 0) == prompt_of(rig.client, 1)
        assert prompt_of(rig.client, 2).startswith("<|im_start|>system\nx<|im_end|>")


async def test_sampling_fields_reach_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 42,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    async with in_memory() as rig:
        response = await rig.chat(
            **fields,
            max_tokens=50,
            max_completion_tokens=9,
            logit_bias={"5": 3},
            stop_token_ids=[4],
            allowed_token_ids=ids("Hello world"),
            bad_words=["bad"],
            cache_salt="salt",
        )

        assert response.status_code == 200, response.text
        queue = rig.client.queues[0]
        for name, value in fields.items():
            assert getattr(queue.sampling, name) == value, name
        assert queue.sampling.max_tokens == 9
        assert queue.sampling.logit_bias == {5: 3.0}
        assert queue.sampling.stop_token_ids == (4,)
        assert queue.sampling.allowed_token_ids == tuple(ids("Hello world"))
        assert tuple(ids("bad")) in queue.sampling.bad_words_token_ids
        assert queue.cache_salt == "salt"


async def test_without_max_tokens_the_rest_of_the_context_is_used() -> None:
    async with in_memory(TalkingClient(max_model_len=200)) as rig:
        await rig.chat()

        queue = rig.client.queues[0]
        assert queue.sampling.max_tokens == 200 - len(queue.prompt)


async def test_max_tokens_of_the_generation_config_limits_requests_without_a_limit() -> None:
    client = TalkingClient(max_model_len=200)
    async with in_memory(client, override_generation_config='{"max_tokens": 50}') as rig:
        answers = [
            await rig.chat(),
            await rig.chat(max_tokens=90),
            await rig.chat(min_tokens=60),
            await rig.chat("a" * 160),
        ]

        assert [answer.status_code for answer in answers] == [200] * 4
        *limits, last = [queue.sampling.max_tokens for queue in client.queues]
        assert limits == [50, 90, 60]
        # The rest of the context is smaller.
        assert last == 200 - len(client.queues[3].prompt) < 50


async def test_request_fields_override_the_models_defaults() -> None:
    async with in_memory() as rig:
        rig.state.sampling_defaults = {"temperature": 0.6, "top_k": 20.0, "zzz": 1.0}
        await rig.chat()
        await rig.chat(temperature=1)

        first, second = (queue.sampling for queue in rig.client.queues)
        assert (first.temperature, first.top_k) == (0.6, 20)
        assert (second.temperature, second.top_k) == (1.0, 20)


async def test_logprobs_have_one_entry_a_token_with_its_own_bytes() -> None:
    client = TalkingClient("é")
    async with in_memory(client) as rig:
        with_two = (await rig.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
        with_none = (await rig.chat(logprobs=True)).json()["choices"][0]

        content = with_two["logprobs"]["content"]
        assert with_two["logprobs"]["refusal"] is None
        assert content[0]["token"] == "é" and content[0]["bytes"] == [195, 169]
        assert content[0]["logprob"] == -1.0
        assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-1.0, -2.0]
        assert list(content[0]["top_logprobs"][0]) == ["token", "logprob", "bytes"]
        assert len(content) == 2
        assert [entry["top_logprobs"] for entry in with_none["logprobs"]["content"]] == [[], []]


async def test_partial_characters_and_minus_infinity_are_valid_json() -> None:
    client = TalkingClient()
    half = id_of(TOKENIZER, "ð")

    def say(queue: Any) -> bool:
        rows = columns([([half, 70], [float("-inf"), -0.5], 9)])
        queue.say(half, finish="length", logprobs=[rows])
        return False

    client.before = say
    async with in_memory(client) as rig:
        answer = (await rig.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]

        (entry,) = answer["logprobs"]["content"]
        assert entry["bytes"] == [240] and entry["token"] == "\ufffd"
        assert entry["logprob"] == -9999.0


async def test_tokens_may_be_named_by_their_ids() -> None:
    async with in_memory(TalkingClient("a")) as rig:
        answer = await rig.chat(
            logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
        )

        choice = answer.json()["choices"][0]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert tokens == [f"token_id:{i}" for i in (*ids("a"), EOS)]
        assert choice["token_ids"] == [*ids("a"), EOS]
        assert answer.json()["prompt_token_ids"] == rig.client.queues[0].prompt


async def test_a_request_overrides_return_tokens_as_token_ids_of_the_server() -> None:
    async with in_memory(TalkingClient("a"), return_tokens_as_token_ids=True) as rig:
        answers = [
            await rig.chat(logprobs=True, return_tokens_as_token_ids=asked)
            for asked in (None, False, True)
        ]

        firsts = [
            answer.json()["choices"][0]["logprobs"]["content"][0]["token"] for answer in answers
        ]
        assert firsts == [f"token_id:{ids('a')[0]}", "a", f"token_id:{ids('a')[0]}"]


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
async def test_a_server_may_end_every_stream_with_the_usage(options: Any) -> None:
    async with in_memory(enable_force_include_usage=True) as rig:
        chats = events((await rig.chat(stream=True, stream_options=options)).content)
        texts = events((await rig.complete(stream=True, stream_options=options)).content)

        for stream in (chats, texts):
            assert stream[-1]["usage"]["completion_tokens"] > 0
            assert not any(chunk.get("usage") for chunk in stream[:-1])


async def test_variables_of_the_template_have_defaults_that_a_request_overrides() -> None:
    template = "{{ enable_thinking }}-{{ colour }}-{{ messages[0].content }}"
    defaults = '{"enable_thinking": false, "colour": "red"}'
    async with in_memory(chat_template=template, default_chat_template_kwargs=defaults) as rig:
        await rig.chat("a")
        await rig.chat("b", chat_template_kwargs={"colour": "blue"})
        await rig.chat("c", reasoning_effort="low")

        prompts = [prompt_of(rig.client, index) for index in range(3)]
        assert prompts == ["False-red-a", "False-blue-b", "True-red-c"]


async def test_prompt_logprobs_begin_with_null() -> None:
    async with in_memory(TalkingClient("a")) as rig:
        answer = (await rig.chat("x", prompt_logprobs=1, n=2)).json()

        prompt = rig.client.queues[0].prompt
        assert answer["prompt_logprobs"][0] is None
        assert len(answer["prompt_logprobs"]) == len(prompt)
        entry = answer["prompt_logprobs"][1][str(prompt[1])]
        assert entry["rank"] == 1 and entry["logprob"] == -1.0 and "decoded_token" in entry


async def test_the_prompt_of_several_choices_is_counted_once() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        answer = (await rig.chat(n=4, seed=1, temperature=1)).json()

        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == len(rig.client.queues[0].prompt)
        assert answer["usage"]["completion_tokens"] == 16
        assert len({queue.sampling.seed for queue in rig.client.queues}) == 4


async def test_a_stop_string_and_the_length_end_the_text_and_are_reported() -> None:
    async with in_memory(TalkingClient("Hello world")) as rig:
        by_text = (await rig.chat(stop="o w")).json()["choices"][0]
        by_length = (await rig.chat(max_tokens=1)).json()["choices"][0]

        assert by_text["message"]["content"] == "Hell"
        assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", "o w")
        assert by_length["finish_reason"] == "length"


def test_the_echoed_characters_of_all_choices_are_limited() -> None:
    def check(num_characters: int) -> None:
        messages = [{"role": "user", "content": "x" * num_characters}]
        body = ChatBody(messages=messages, echo=True, n=16)
        body.check_conversation(trust_template=False)

    check(MAX_ECHO_CHARACTERS // 16)
    with pytest.raises(UserError, match=r"16777232 for 16 choices with echo, at most 16777216"):
        check(MAX_ECHO_CHARACTERS // 16 + 1)


async def test_the_last_message_may_be_continued_and_echoed() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    async with in_memory(TalkingClient(" so")) as rig:
        answer = (await rig.post("/v1/chat/completions", body)).json()
        both = await rig.post("/v1/chat/completions", {**body, "add_generation_prompt": True})

        assert prompt_of(rig.client).endswith("<|im_start|>assistant\nIt is")
        assert answer["choices"][0]["message"]["content"] == "It is so"
        assert both.status_code == 400
        assert both.json()["error"]["param"] == "continue_final_message"


async def test_a_prompt_may_be_cut_to_its_last_tokens() -> None:
    async with in_memory(TalkingClient(max_model_len=50)) as rig:
        last = await rig.chat("x" * 100, truncate_prompt_tokens=5)
        fitting = await rig.chat("x" * 100, truncate_prompt_tokens=-1, max_tokens=8)

        assert last.status_code == fitting.status_code == 200
        assert [len(queue.prompt) for queue in rig.client.queues] == [5, 42]
        assert fitting.json()["usage"]["prompt_tokens"] == 42


async def test_truncation_side_chooses_the_kept_end_of_a_prompt() -> None:
    sides: tuple[dict[str, str], ...] = (
        {},
        {"truncation_side": "left"},
        {"truncation_side": "right"},
    )
    async with in_memory(TalkingClient()) as rig:
        whole = await rig.chat("abc" * 100)
        answers = [await rig.chat("abc" * 100, truncate_prompt_tokens=5, **side) for side in sides]
        texts = [
            await rig.complete(prompt, truncate_prompt_tokens=2, **side)
            for prompt in ([1, 2, 3, 4], "abcd")
            for side in sides
        ]
        wrong = await rig.chat("abc", truncate_prompt_tokens=5, truncation_side="top")

        assert all(answer.status_code == 200 for answer in (whole, *answers, *texts))
        prompts = [list(queue.prompt) for queue in rig.client.queues]
        ids = prompts[0]
        assert prompts[1:4] == [ids[-5:], ids[-5:], ids[:5]]
        assert prompts[4:7] == [[3, 4], [3, 4], [1, 2]]
        assert prompts[7] == prompts[8] != prompts[9]
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "truncation_side"


async def test_a_trusted_template_gets_the_callers_variables_and_documents() -> None:
    template = "{{ documents[0].t }}-{{ reasoning_effort }}-{{ enable_thinking }}-{{ colour }}"
    async with in_memory(trust_request_chat_template=True) as rig:
        response = await rig.chat(
            chat_template=template,
            documents=[{"t": "doc"}],
            reasoning_effort="none",
            chat_template_kwargs={"colour": "red"},
        )
        own = await rig.chat(
            chat_template=template,
            documents=[{"t": "doc"}],
            reasoning_effort="none",
            chat_template_kwargs={"enable_thinking": True},
        )

        assert response.status_code == own.status_code == 200
        assert prompt_of(rig.client, 0) == "doc-none-False-red"
        assert prompt_of(rig.client, 1) == "doc-none-True-"


async def test_control_characters_and_special_tokens_are_accepted() -> None:
    async with in_memory() as rig:
        for text in ("\x00", "\ufeff", "\ue000", "<|im_end|>", "\U0010ffff"):
            assert (await rig.chat(text)).status_code == 200


async def test_fields_with_vllm_defaults_may_be_omitted() -> None:
    async with in_memory() as rig:
        no_content = [{"role": "system"}, {"role": "user", "content": ["a", "b"]}]
        written = [
            {"role": "system", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": word} for word in "ab"]},
        ]
        for messages in (written, no_content):
            body = {"messages": messages, "logprobs": False, "top_logprobs": 0}
            answer = await rig.post("/v1/chat/completions", body)
            assert answer.status_code == 200, answer.text

        assert prompt_of(rig.client, 1) == prompt_of(rig.client, 0)


async def test_without_a_tokenizer_chat_is_refused_by_name() -> None:
    async with in_memory(tokenizer=None, skip_tokenizer_init=True) as rig:
        response = await rig.chat()

        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


async def test_the_priority_of_a_request_reaches_an_engine_with_priorities() -> None:
    async with in_memory() as rig:
        rig.state.has_priorities = True
        await rig.chat(priority=-3)

        assert rig.client.queues[0].priority == -3


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "name": "Bob", "zzz": 1},
        {"role": "user", "content": "x", "name": None, "tool_calls": None, "tool_call_id": None},
        {"role": "user", "content": ""},
        {"role": "user", "content": []},
        {"role": "user", "content": ["x", {"type": "text", "text": "y"}]},
        {"role": "system", "content": None},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "tool_calls": [{"custom": {"name": "f", "input": "x"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
        {"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": []},
        {"role": "assistant", "tool_calls": [{"type": "mcp", "mcp": {"name": "f"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": None}, {"type": "refusal"}]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "tool", "content": None, "tool_call_id": "1"},
        {"role": "tool", "tool_call_id": "1"},
        {"role": "tool", "content": "x"},
        {"role": "narrator", "content": "x"},
    ],
)
def test_messages_of_real_clients_are_accepted(message: dict[str, Any]) -> None:
    check_messages([message])


def test_the_error_has_the_index_of_a_refused_message() -> None:
    with pytest.raises(UserError, match=r"messages\[1\]\.content is 5, it must be"):
        check_messages([{"role": "user", "content": "x"}, {"role": "user", "content": 5}])


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_a_name_other_than_a_string_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=rf"messages\[0\]\.{field} is an object, it must be"):
        check_messages([{"role": "user", "content": "x", field: {"a": 1}}])


def test_max_completion_tokens_takes_precedence_over_max_tokens() -> None:
    body = ChatBody.model_validate({"messages": [], "max_tokens": 5, "max_completion_tokens": 7})

    assert body.limit == 7


async def test_counted_tokens_equal_the_answers_usage() -> None:
    async with in_memory() as rig:
        body = {"messages": [{"role": "user", "content": "hi " * 3_000}], "max_tokens": 9}
        short = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        counts = [
            (await rig.post("/v1/chat/completions/input_tokens", item)).json()
            for item in (body, short, {**short, "truncate_prompt_tokens": 3})
        ]
        answer = await rig.post("/v1/chat/completions", short)

        usage = answer.json()["usage"]
        assert counts[1] == {
            "object": "response.input_tokens",
            "input_tokens": usage["prompt_tokens"],
        }
        assert counts[0]["input_tokens"] > rig.state.max_model_len
        assert counts[2]["input_tokens"] == 3


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_prompt_ids_of_many_choices_are_encoded_on_a_thread(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChatChunks if kind == "chat" else CompletionChunks
    feed, are_main = writer.feed, list[bool]()

    def watched(chunks: Any, deltas: Any) -> bytes:
        are_main.append(threading.current_thread() is threading.main_thread())
        return feed(chunks, deltas)

    monkeypatch.setattr(writer, "feed", watched)
    monkeypatch.setattr(job, "INLINE_IDS", 10)
    fields = {"n": 4, "stream": True, "return_token_ids": True}
    async with in_memory(TalkingClient("Hello you")) as rig:
        if kind == "chat":
            answer = await rig.chat(**fields)
        else:
            answer = await rig.complete([1, 2, 3, 4, 5, 6], **fields)

    assert answer.text.count('"prompt_token_ids"') == 4
    assert not are_main[0]
    assert are_main[-1]

"""POST /v1/chat/completions/render, /v1/completions/render and /inference/v1/generate."""

import threading
from typing import Any

import pytest
from http_rig import EOS, THINKING_TEMPLATE, TalkingClient, events, ids, in_memory

from config.params.structured_output import GrammarSpec, fields_of
from server.openai import render
from server.openai.schema.generate import SAMPLING_FIELDS
from server.openai.schema.generation import INLINE_IDS

CHAT, TEXT, GENERATE = (
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/inference/v1/generate",
)
HI = [{"role": "user", "content": "hi"}]


async def test_a_rendered_chat_generates_the_same_answer() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        fields = {"messages": HI, "temperature": 0.5, "top_p": 1.0, "seed": 7, "stop": ["zz"]}
        rendered = (await rig.post(CHAT, {**fields, "cache_salt": "s"})).json()

        assert not rig.client.queues, "nothing is generated yet"
        assert rendered["request_id"].startswith("chatcmpl-")
        assert (rendered["model"], rendered["cache_salt"], rendered["priority"]) == ("demo", "s", 0)
        assert (rendered["stream"], rendered["features"]) == (False, None)
        sampling = rendered["sampling_params"]
        left = rig.state.max_model_len - len(rendered["token_ids"])
        assert (sampling["temperature"], sampling["max_tokens"]) == (0.5, left)
        assert (sampling["top_p"], sampling["stop"]) == (1.0, ["zz"])

        answer = (await rig.post(GENERATE, rendered)).json()
        await rig.post("/v1/chat/completions", fields)

        rendered_queue, chat_queue = rig.client.queues
        assert rendered_queue.prompt == chat_queue.prompt == rendered["token_ids"]
        assert rendered_queue.sampling == chat_queue.sampling
        assert answer["request_id"] == f"generate-tokens-{rendered['request_id']}"
        assert answer["choices"][0]["token_ids"] == [*ids("abc"), EOS]


async def test_an_answer_of_token_ids_has_every_key_of_vllm() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}, "request_id": "r"}
        answer = (await rig.post(GENERATE, body)).json()

        assert answer.pop("created")
        assert answer == {
            "request_id": "generate-tokens-r",
            "model": "demo",
            "choices": [
                {
                    "index": 0,
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": ids("ab"),
                    "routed_experts": None,
                    "sampling_mask": None,
                }
            ],
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": 2,
                "total_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }


async def test_streamed_token_ids_joined_are_the_whole_answer() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        body = {
            "token_ids": [5],
            "sampling_params": {"n": 2},
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        response = await rig.post(GENERATE, body)

        *chunks, last = events(response.content)
        assert response.headers["content-type"].startswith("text/event-stream")
        for index in range(2):
            choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [i for c in choices for i in c["token_ids"]] == [*ids("abc"), EOS]
            assert all(c["token_ids"] for c in choices)
            assert [c["finish_reason"] for c in choices][-1] == "stop"
        assert all(chunk["usage"]["prompt_tokens"] == 1 for chunk in chunks)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(("count", "num_top"), [(0, 1), (1, 1), (3, 3)])
async def test_logprobs_of_token_ids_name_tokens_by_id(count: int, num_top: int) -> None:
    async with in_memory(TalkingClient("a")) as rig:
        sampling = {"logprobs": count, "prompt_logprobs": 1}
        body = {"token_ids": [5, 6], "sampling_params": sampling}
        answer = (await rig.post(GENERATE, body)).json()

        entries = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in [*ids("a"), EOS]]
        assert [len(entry["top_logprobs"]) for entry in entries] == [num_top] * 2
        assert answer["prompt_logprobs"][0] is None and "6" in answer["prompt_logprobs"][1]


async def test_token_ids_are_sampled_without_server_defaults() -> None:
    # The sender has already applied the model's defaults, as in vLLM.
    async with in_memory(TalkingClient("abc")) as rig:
        rig.state.sampling_defaults = {"temperature": 0.1}
        await rig.post(GENERATE, {"token_ids": [5], "sampling_params": {}})
        rendered = (await rig.post(CHAT, {"messages": HI})).json()

        assert rig.client.queues[0].sampling.temperature == 1.0
        assert rig.client.queues[0].sampling.max_tokens == rig.state.max_model_len - 1
        assert rendered["sampling_params"]["temperature"] == 0.1


async def test_rendered_completions_are_a_list_for_texts_and_token_ids() -> None:
    async with in_memory() as rig:
        texts = (await rig.post(TEXT, {"prompt": ["a", "bc"], "stream": True})).json()
        tokens = (await rig.post(TEXT, {"prompt": [5, 6], "max_tokens": 3})).json()

        assert [item["token_ids"] for item in texts] == [ids("a"), ids("bc")]
        assert all(item["stream"] and item["request_id"].startswith("cmpl-") for item in texts)
        assert texts[0]["sampling_params"]["max_tokens"] == 16
        assert tokens[0]["token_ids"] == [5, 6]
        assert tokens[0]["sampling_params"]["max_tokens"] == 3


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("response_format", {"type": "json_object"}, {"json_object": True}),
        ("guided_regex", "a+", {"regex": "a+"}),
        ("guided_choice", ["a", "b"], {"choice": ["a", "b"]}),
        ("guided_json", {"type": "object"}, {"json": {"type": "object"}}),
    ],
)
async def test_a_rendered_grammar_applies_when_the_request_generates(
    field: str, value: Any, wanted: Any
) -> None:
    async with in_memory() as rig:
        rendered = (await rig.post(CHAT, {"messages": HI, field: value})).json()
        assert rendered["sampling_params"]["structured_outputs"] == wanted

        assert (await rig.post(GENERATE, rendered)).status_code == 200
        await rig.post("/v1/chat/completions", {"messages": HI, field: value})

        sampled = [queue.sampling.structured_outputs for queue in rig.client.queues]
        assert isinstance(sampled[0], GrammarSpec) and sampled[0] == sampled[1]


async def test_a_rendered_grammar_leaves_room_for_the_reasoning() -> None:
    config: dict[str, Any] = {"chat_template": THINKING_TEMPLATE, "reasoning_parser": "qwen3"}
    for variables in ({}, {"enable_thinking": False}):
        async with in_memory(**config) as rig:
            body = {
                "messages": HI,
                "guided_regex": "a+",
                "chat_template_kwargs": variables,
            }
            rendered = (await rig.post(CHAT, body)).json()
            await rig.post(GENERATE, rendered)
            await rig.post("/v1/chat/completions", body)

            ours, chats = (queue.sampling.structured_outputs for queue in rig.client.queues)
            assert ours is not None
            assert ours == chats and (ours.thinking is None) == bool(variables)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "token_ids", "missing"),
        ({"token_ids": [5]}, "sampling_params", "missing"),
        ({"token_ids": []}, "token_ids", "at least 1"),
        ({"token_ids": [-1]}, "token_ids", "-1"),
        ({"token_ids": [10**7]}, "token_ids", "10000000"),
        ({"token_ids": ["a"]}, "token_ids", "'a'"),
        ({"token_ids": [5], "sampling_params": []}, "sampling_params", "object"),
        ({"temperature": 3}, "sampling_params.temperature", "between 0 and 2"),
        ({"temperature": "x"}, "sampling_params.temperature", "number"),
        ({"max_tokens": 10**6}, "sampling_params.max_tokens", "context"),
        ({"stop": ["x"], "detokenize": False}, "sampling_params.stop", "stop_token_ids"),
        ({"thinking_token_budget": 5}, "sampling_params.thinking_token_budget", "not supported"),
        ({"structured_outputs": {"regex": 5}}, "sampling_params.structured_outputs", "regex"),
        ({"token_ids": [5], "features": {"mm_hashes": {}}}, "features", "not supported"),
        ({"token_ids": [5], "model": "none"}, "model", "none"),
    ],
)
async def test_a_bad_request_for_token_ids_names_its_field(
    body: dict[str, Any], param: str, words: str
) -> None:
    if param.startswith("sampling_params."):
        body = {"token_ids": [5], "sampling_params": body}
    elif param not in ("sampling_params",) and body:
        body = {"sampling_params": {}, **body}
    async with in_memory() as rig:
        response = await rig.post(GENERATE, body)

        error = response.json()["error"]
        assert response.status_code == (404 if param == "model" else 400), error
        assert error["param"] == param and words in error["message"], error
        assert not rig.client.queues


async def test_unknown_sampling_parameters_are_ignored_and_named() -> None:
    async with in_memory() as rig:
        sampling = {"output_kind": 2, "stop": None, "skip_clone": None, "echo": True}
        response = await rig.post(GENERATE, {"token_ids": [5], "sampling_params": sampling})

        assert response.status_code == 200, response.text
        named = response.headers["x-gaudiserve-ignored-fields"]
        assert named == "sampling_params.output_kind, sampling_params.echo"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_rendering_a_field_that_generate_does_not_accept_is_refused(path: str) -> None:
    async with in_memory(reasoning_parser="qwen3") as rig:
        prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        other = {"thinking_token_budget": 5} if path == CHAT else {"best_of": 3}
        fields: list[dict[str, Any]] = [{"use_beam_search": True, "n": 2}, other]
        for more in fields:
            error = (await rig.post(path, {**prompt, **more})).json()["error"]
            assert error["param"] == next(iter(more)) and "cannot be rendered" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_rendering_an_invalid_request_is_refused(path: str) -> None:
    async with in_memory() as rig:
        prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        for more, status, param in (
            ({"max_tokens": 10**6}, 400, "max_tokens"),
            ({"logit_bias": {str(10**7): 1}}, 400, "logit_bias"),
            ({"model": "none"}, 404, "model"),
        ):
            response = await rig.post(path, {**prompt, **more})
            assert response.status_code == status
            assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
async def test_an_unknown_token_id_is_refused_before_a_grammar_reads_the_prompt(
    token_id: int,
) -> None:
    async with in_memory() as rig:
        sampling = {"structured_outputs": {"choice": ["a"]}}
        refused = await rig.post(GENERATE, {"token_ids": [token_id], "sampling_params": sampling})

        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "token_ids"
        assert str(token_id) in refused.json()["error"]["message"]


SET_FIELDS = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    "max_tokens": 3, "min_tokens": 1, "stop": ["zz"], "stop_token_ids": [7], "logit_bias": {"5": 3},
    "bad_words": ["no"], "allowed_token_ids": [5, 6, 7], "ignore_eos": True, "logprobs": 1,
    "prompt_logprobs": 1, "skip_special_tokens": False, "include_stop_str_in_output": True,
    "spaces_between_special_tokens": False,
}  # fmt: skip


async def test_every_rendered_sampling_parameter_is_accepted_by_generate() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        (rendered,) = (await rig.post(TEXT, {"prompt": "hi", **SET_FIELDS})).json()
        sampling = rendered["sampling_params"]
        answer = await rig.post(GENERATE, rendered)

        assert {name: sampling[name] for name in SET_FIELDS if name in sampling} == {
            name: value for name, value in SET_FIELDS.items() if name in sampling
        }
        left_out = set(SAMPLING_FIELDS) - set(SET_FIELDS) - {"structured_outputs", "detokenize"}
        assert not {name for name in left_out if sampling[name]}, "a new field is set here"
        assert answer.status_code == 200, answer.text
        assert rig.client.queues[0].sampling.logit_bias == {5: 3.0}


async def test_the_bytes_of_parameters_repeated_for_many_prompts_are_limited() -> None:
    async with in_memory() as rig:
        fields = {"stop": ["\x01" * 1000 + str(number) for number in range(4)]}
        given = await rig.post(TEXT, {"prompt": [[5]] * 100, **fields})
        refused = await rig.post(TEXT, {"prompt": [[5]] * 1000, **fields})

        assert given.status_code == 200
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert "are repeated for 1000 prompts, at most 8388608 bytes may be" in error["message"]
        assert error["param"] == "prompt"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_parameters_of_a_large_body_are_rendered_on_a_thread(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_main: list[bool] = []

    def watched(grammar: GrammarSpec) -> dict[str, object]:
        are_main.append(threading.current_thread() is threading.main_thread())
        return fields_of(grammar)

    monkeypatch.setattr(render, "fields_of", watched)
    body: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    small = {**body, "guided_choice": ["a", "b"]}
    async with in_memory() as rig:
        for more in ({}, {"allowed_token_ids": [5] * (INLINE_IDS + 1)}):
            assert (await rig.post(path, {**small, **more})).status_code == 200

    assert are_main == [True, False]

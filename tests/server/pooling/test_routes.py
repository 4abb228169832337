"""The pooling routes, with a fake engine whose vectors identify their tokens."""

import asyncio
import base64
import itertools
from typing import Any

import httpx
import numpy as np
import pytest
from http_rig import VOCAB_SIZE, Rig, ids, in_memory, on_port
from pooling_client import EMBEDDER, PoolingClient, pooled
from scripted_client import ScriptedQueue
from waits import until

from config.errors import Overloaded
from config.params.pooling import PoolingFacts, PoolingParams
from server.generation.pipeline import MAX_TOKENS_AT_ONCE
from server.http import access_log
from server.pooling.pipeline import MAX_CONCURRENT_INPUTS, PoolingInput, PoolingStream

CROSS_ENCODER = PoolingFacts(tasks=("score",), width=1, token_width=1)
CLASSIFIER = PoolingFacts(
    tasks=("classify", "token_embed"), width=3, token_width=8, labels=("bad", "fair", "good")
)
EMBED = PoolingParams(task="embed")
CHAT = [{"role": "user", "content": "hi"}]


def client(facts: PoolingFacts = EMBEDDER, **ready_of: Any) -> PoolingClient:
    return PoolingClient(facts, **{"vocab_size": VOCAB_SIZE, **ready_of})


def expected(text: str, params: PoolingParams = EMBED, facts: PoolingFacts = EMBEDDER) -> Any:
    return pytest.approx(pooled(ids(text), params, facts)[0])


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return dict(found)


async def embed(rig: Rig, given: Any, **fields: Any) -> httpx.Response:
    return await rig.post("/v1/embeddings", {"input": given, **fields})


async def test_a_text_a_list_and_token_ids_have_the_same_vectors() -> None:
    async with in_memory(client()) as rig:
        single = (await embed(rig, "hello")).json()
        many = (await embed(rig, ["hello", "world"])).json()
        tokens = (await embed(rig, [ids("world"), ids("hello")])).json()
        bare = (await embed(rig, ids("hello"))).json()

    assert single["object"] == "list"
    assert single["model"] == "demo"
    assert single["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [(entry["index"], entry["object"]) for entry in many["data"]] == [
        (0, "embedding"),
        (1, "embedding"),
    ]
    hello, world = expected("hello"), expected("world")
    assert single["data"][0]["embedding"] == hello
    assert bare["data"] == single["data"]
    assert [entry["embedding"] for entry in many["data"]] == [hello, world]
    assert [entry["embedding"] for entry in tokens["data"]] == [world, hello]


async def test_base64_is_little_endian_float32_and_dimensions_truncates_it() -> None:
    async with in_memory(client()) as rig:
        answer = await embed(rig, "hello", encoding_format="base64", dimensions=3)

    data = base64.b64decode(answer.json()["data"][0]["embedding"])
    params = PoolingParams(task="embed", dimensions=3)
    assert np.frombuffer(data, "<f4") == expected("hello", params)


async def test_request_fields_reach_the_engine() -> None:
    engine = client()
    async with in_memory(engine) as rig:
        await embed(rig, "hello", use_activation=False, truncate_prompt_tokens=2, cache_salt="s")
        await embed(rig, "hello", normalize=True, truncate_prompt_tokens=2, truncation_side="left")

    first, second = engine.queues
    assert (first.prompt, first.cache_salt) == (ids("hello")[:2], "s")
    assert first.pooling == PoolingParams(task="embed", normalize=False)
    assert second.prompt == ids("hello")[-2:]
    assert second.pooling == PoolingParams(task="embed", normalize=True)


async def test_a_conversation_is_embedded_with_its_template() -> None:
    engine = client()
    async with in_memory(engine) as rig:
        plain = await rig.post("/v1/embeddings", {"messages": CHAT})
        opened = await rig.post("/pooling", {"messages": CHAT, "add_generation_prompt": True})

    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert plain.json()["data"][0]["embedding"] == expected(text)
    assert opened.json()["data"][0]["data"] == expected(text + "<|im_start|>assistant\n")


async def test_pooling_returns_the_output_of_the_task() -> None:
    async with in_memory(client()) as rig:
        default = (await rig.post("/pooling", {"input": "hello"})).json()
        tokens = (await rig.post("/pooling", {"input": "hello", "task": "token_embed"})).json()
        coded = {"input": "hello", "task": "token_embed", "encoding_format": "base64"}
        data = (await rig.post("/pooling", coded)).json()["data"][0]["data"]

    rows = pooled(ids("hello"), PoolingParams(task="token_embed"), EMBEDDER)
    assert default["data"][0]["object"] == "pooling"
    assert default["data"][0]["data"] == expected("hello")
    assert np.array(tokens["data"][0]["data"]) == pytest.approx(rows)
    assert np.frombuffer(base64.b64decode(data), "<f4") == pytest.approx(rows.ravel())


async def test_classes_are_returned_with_their_names() -> None:
    async with in_memory(client(CLASSIFIER)) as rig:
        answer = (await rig.post("/classify", {"input": ["hello", "good"]})).json()

    first, second = answer["data"]
    params = PoolingParams(task="classify")
    assert first["probs"] == expected("hello", params, CLASSIFIER)
    assert first["label"] == CLASSIFIER.labels[int(np.argmax(first["probs"]))]
    assert (second["index"], second["num_classes"]) == (1, 3)
    assert answer["usage"]["prompt_tokens"] == len(ids("hello") + ids("good"))


async def test_an_empty_list_has_no_classes() -> None:
    engine = client(CLASSIFIER)
    async with in_memory(engine) as rig:
        answer = (await rig.post("/classify", {"input": []})).json()

    assert (answer["object"], answer["data"]) == ("list", [])
    assert answer["usage"] == {"prompt_tokens": 0, "total_tokens": 0}
    assert not engine.queues


async def test_a_cross_encoder_reads_both_texts_together() -> None:
    engine = client(CROSS_ENCODER)
    async with in_memory(engine) as rig:
        answer = (await rig.post("/score", {"text_1": "he", "text_2": ["llo", "y"]})).json()

    assert [queue.prompt for queue in engine.queues] == [
        ids("he") + ids("llo"),
        ids("he") + ids("y"),
    ]
    params = PoolingParams(task="score")
    scores = [pooled(queue.prompt, params, CROSS_ENCODER)[0, 0] for queue in engine.queues]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(scores)
    assert answer["usage"]["prompt_tokens"] == sum(len(queue.prompt) for queue in engine.queues)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"),
              ("data_1", "data_2")]
)  # fmt: skip
async def test_an_embedding_model_scores_by_cosine(names: tuple[str, str]) -> None:
    first, second = names
    engine = client()
    async with in_memory(engine) as rig:
        answer = await rig.post("/v1/score", {first: "a", second: ["b", {"text": "a"}]})
        each = await rig.post("/score", {first: ["a", "b"], second: ["b", "b"]})

    a, b = (pooled(ids(text), EMBED, EMBEDDER)[0] for text in "ab")
    assert [entry["score"] for entry in answer.json()["data"]] == pytest.approx([a @ b, 1.0])
    assert [entry["score"] for entry in each.json()["data"]] == pytest.approx([a @ b, 1.0])
    assert answer.json()["usage"]["prompt_tokens"] == 3
    assert len(engine.queues) == 3 + 4


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_sorted_by_score(path: str) -> None:
    body = {"query": "a", "documents": ["b", {"text": "a"}, "c"]}
    async with in_memory(client()) as rig:
        whole = (await rig.post(path, body)).json()
        best = (await rig.post(path, {**body, "top_n": 1, "return_documents": False})).json()

    assert whole["results"][0] == {
        "index": 1,
        "document": {"text": "a"},
        "relevance_score": pytest.approx(1.0),
    }
    scores = [entry["relevance_score"] for entry in whole["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(entry["index"] for entry in whole["results"]) == [0, 1, 2]
    assert whole["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert best["results"] == [{"index": 1, "relevance_score": pytest.approx(1.0)}]


BAD = [
    ("/v1/embeddings", {}, "input", "input is missing"),
    ("/v1/embeddings", {"input": []}, "input", "empty list"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input", "input[1] is '', it must"),
    ("/v1/embeddings", {"input": ["a", 1]}, "input", "input[1] is 1, it must be a string"),
    ("/v1/embeddings", {"input": [[1], [10**6]]}, "input", "input[1] has token id 1000000"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "2049 entries, it may have at most 2048"),
    ("/v1/embeddings", {"input": ["a", "b" * 65]}, "input", "context length is 64 tokens"),
    ("/v1/embeddings", {"input": "a", "messages": CHAT}, "input", "cannot both"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "'base64'"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
    ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions", "at most 8"),
    ("/v1/embeddings", {"input": "a", "priority": 1}, "priority", "must be 0"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
    (
        "/v1/embeddings",
        {"input": "a", "truncate_prompt_tokens": 65},
        "truncate_prompt_tokens",
        "between 1 and 64",
    ),
    (
        "/v1/embeddings",
        {"input": "a", "normalize": True, "use_activation": False},
        "use_activation",
        "older name",
    ),
    ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", "no prompts"),
    ("/classify", {"input": "a"}, "model", "this model supports embed, token_embed"),
    ("/classify", {"input": []}, "model", "this model supports embed, token_embed"),
    ("/pooling", {"input": "a", "task": "score"}, "task", "this model supports embed, token_embed"),
    ("/score", {"text_1": "a"}, "text_2", "text_2 is missing"),
    ("/score", {}, "text_1", "text_1 and text_2 are missing"),
    ("/score", {"text_1": "a", "documents": "b"}, "documents", "cannot be combined"),
    (
        "/score",
        {"text_1": ["a", "b"], "text_2": ["c"] * 3},
        "text_1",
        "2 texts, it must have 1 or 3",
    ),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", "empty list"),
    ("/rerank", {"query": ["a"], "documents": ["b"]}, "query", "must be a string"),
    ("/rerank", {"query": "a", "documents": ["b", {"image": "c"}]}, "documents", "documents[1]"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
    ("/v1/chat/completions", {"messages": CHAT}, "model", "does not generate"),
    ("/v1/completions", {"prompt": "a"}, "model", "does not generate"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
async def test_bad_requests_are_refused_by_field(path, body, param, words) -> None:  # type: ignore[no-untyped-def]
    engine = client()
    async with in_memory(engine) as rig:
        found = error(await rig.post(path, body))

    assert found["param"] == param
    assert words in found["message"]
    assert not engine.queues


async def test_the_size_of_an_answer_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.pooling.inputs.MAX_NUMBERS", 8 * 4)
    async with in_memory(client()) as rig:
        fits = await rig.post("/pooling", {"input": ["abc", "d"], "task": "token_embed"})
        found = error(await rig.post("/pooling", {"input": "abcde", "task": "token_embed"}))

    assert fits.status_code == 200
    assert found["param"] == "input"
    assert "would have 40 numbers, at most 32" in found["message"]


async def test_the_error_of_a_too_long_input_has_the_words_that_clients_match() -> None:
    async with in_memory(client()) as rig:
        found = error(await embed(rig, ["a", "b" * 65]))

    assert found["code"] == "context_length_exceeded"
    assert "65 tokens in input[1]" in found["message"]


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank"]
)
async def test_a_generating_model_refuses_pooling(path: str) -> None:
    async with in_memory() as rig:
        found = error(await rig.post(path, {"input": "a"}))

    assert found["param"] == "model"
    assert "generates text" in found["message"]
    assert found["message"].endswith(
        "or serve this model with --runner pooling or --convert embed."
    )


async def test_many_inputs_are_sent_in_groups_and_answered_in_order() -> None:
    engine = client()
    engine_add, most_open = engine.add, 0

    def add(*args: Any, **kwargs: Any) -> ScriptedQueue:
        nonlocal most_open
        queue = engine_add(*args, **kwargs)
        most_open = max(most_open, sum(not queue.updates.empty() for queue in engine.queues))
        return queue

    engine.add = add  # type: ignore[method-assign]
    texts = [f"text {number}" for number in range(600)]
    async with in_memory(engine) as rig:
        answer = (await embed(rig, texts)).json()

    assert [entry["embedding"] for entry in answer["data"]] == [expected(text) for text in texts]
    assert most_open == MAX_CONCURRENT_INPUTS


async def test_the_inputs_of_a_request_name_its_first_input_to_the_engine() -> None:
    engine = client()
    async with in_memory(engine) as rig:
        await embed(rig, ["a", "b", "c"])
        await rig.post("/rerank", {"query": "a", "documents": ["b", "c"]})

    first, second = (queue.key for queue in engine.queues if not queue.group)
    assert [queue.group for queue in engine.queues] == [0, first, first, 0, second, second]


async def test_a_full_queue_refuses_only_a_request_with_nothing_in_the_engine() -> None:
    engine = client()
    engine_add, room = engine.add, 2

    def add(*args: Any, **kwargs: Any) -> ScriptedQueue:
        if sum(not queue.updates.empty() for queue in engine.queues) >= room:
            raise Overloaded(f"{room} requests are waiting")
        return engine_add(*args, **kwargs)

    engine.add = add  # type: ignore[method-assign]
    async with in_memory(engine) as rig:
        slow = await embed(rig, ["a", "b", "c", "d", "e"])
        room = 0
        refused = await embed(rig, "a")
        rejections = await rig.metric("vllm:admission_rejections_total")

    assert [entry["embedding"] for entry in slow.json()["data"]] == [expected(t) for t in "abcde"]
    assert error(refused, 503)["type"] == "server_overloaded"
    assert refused.headers["retry-after"] == "1"
    assert rejections == 1


async def test_metrics_grow_by_the_usage() -> None:
    async with in_memory(client()) as rig:
        await embed(rig, ["hello", "world"])
        await embed(rig, "")
        await rig.post("/score", {"text_1": "a", "text_2": ["b", "c"]})

        num_tokens = len(ids("hello") + ids("world")) + 3
        assert await rig.metric("vllm:prompt_tokens_total") == num_tokens
        assert await rig.metric("vllm:generation_tokens_total") == 0
        assert await rig.metric("vllm:request_success_total") == 2 + 3
        for name in ("e2e_request_latency_seconds", "request_prefill_time_seconds"):
            assert await rig.metric(f"vllm:{name}_count") == 2
        assert await rig.metric("vllm:request_prompt_tokens_sum") == num_tokens


async def test_a_disconnect_aborts_all_inputs_in_the_engine() -> None:
    engine = client()
    engine.answers = False
    async with on_port(engine) as rig:
        asking = asyncio.ensure_future(embed(rig, ["a"] * 300))
        await sent(engine, MAX_CONCURRENT_INPUTS)
        asking.cancel()
        await until(lambda: not rig.state.active_requests)

        assert len(engine.aborted) == MAX_CONCURRENT_INPUTS == len(engine.queues)
        assert not rig.state.active_requests
        assert await rig.metric("vllm:request_success_total") == 300
        assert await rig.metric("vllm:prompt_tokens_total") == 0


async def sent(engine: PoolingClient, count: int) -> None:
    await until(lambda: len(engine.queues) == count)


async def test_a_vector_with_a_nan_fails_the_request() -> None:
    engine = client()
    engine.answers = False
    async with in_memory(engine) as rig:
        asking = asyncio.ensure_future(embed(rig, ["a", "b"]))
        await sent(engine, 2)
        engine.queues[0].say(finish="stop", vectors=np.array([[np.nan]], "<f4"))
        found = error(await asking, 500)

    assert "input 0" in found["message"]
    assert engine.aborted == [engine.queues[1].key]


async def test_a_shutdown_is_reported_to_waiting_requests() -> None:
    engine = client()
    engine.answers = False
    async with in_memory(engine) as rig:
        asking = asyncio.ensure_future(embed(rig, ["a", "b"]))
        await sent(engine, 2)
        for tracker in list(rig.state.active_requests):
            tracker.cancel("The server is shutting down.")
        found = error(await asking, 503)

    assert found["message"] == "The server is shutting down."
    assert len(engine.aborted) == 2


async def test_an_interrupted_request_counts_its_completed_tokens() -> None:
    engine = client()
    engine.answers = False
    async with in_memory(engine) as rig:
        asking = asyncio.ensure_future(embed(rig, ["hello", "b"]))
        await sent(engine, 2)
        engine.queues[0].say(finish="stop", vectors=np.ones((1, 8), "<f4"))
        await asyncio.sleep(0.05)
        for tracker in list(rig.state.active_requests):
            tracker.cancel("The server is shutting down.")
        error(await asking, 503)

        assert await rig.metric("vllm:prompt_tokens_total") == len(ids("hello"))
        assert await rig.metric("vllm:request_success_total") == 2


async def test_an_engine_that_dies_is_a_500() -> None:
    engine = client()
    engine.answers = False
    async with in_memory(engine) as rig:
        asking = asyncio.ensure_future(embed(rig, "a"))
        await sent(engine, 1)
        engine.queues[0].die()
        found = error(await asking, 500)

    assert found["type"] == "server_error"


async def test_long_inputs_are_sent_in_several_iterations_of_the_event_loop() -> None:
    engine = client(max_model_len=MAX_TOKENS_AT_ONCE)
    engine.answers = False
    inputs = [PoolingInput([1] * (MAX_TOKENS_AT_ONCE // 2), EMBED) for _ in range(7)]
    stream = PoolingStream(engine, inputs)
    sent = [len(engine.queues)]
    first = asyncio.ensure_future(anext(stream))
    while sent[-1] < len(inputs):
        await asyncio.sleep(0)
        sent.append(len(engine.queues))
    stream.abort()
    with pytest.raises(StopAsyncIteration):
        await first

    steps = [after - before for before, after in itertools.pairwise([0, *sent])]
    assert 1 <= max(steps) <= 2


async def test_a_request_aborted_while_inputs_are_sent_sends_no_more() -> None:
    engine = client()
    inputs = [PoolingInput([1] * MAX_TOKENS_AT_ONCE, EMBED) for _ in range(5)]
    engine.answers = False
    stream = PoolingStream(engine, inputs)
    first = asyncio.ensure_future(anext(stream))
    stream.abort()
    with pytest.raises(StopAsyncIteration):
        await first

    assert len(engine.queues) == 1


async def test_only_the_logged_part_of_token_ids_is_formatted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[object] = []
    monkeypatch.setattr(access_log, "log_prompt", lambda record, prompt: logged.append(prompt))
    async with in_memory(client(), enable_log_requests=True) as rig:
        await embed(rig, [[1, 2], [3]])
        await embed(rig, "hello")

    assert logged == [[1, 2], [3], "hello"], "log_prompt cuts token ids before it formats them"


async def test_other_tasks_run_while_many_prompts_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[object] = []
    monkeypatch.setattr(access_log, "log_prompt", lambda record, prompt: logged.append(prompt))
    record: Any = None
    task = asyncio.ensure_future(access_log.log_prompts(record, ["hello"] * 2_000))
    seen = [0]
    while not task.done():
        await asyncio.sleep(0)
        seen.append(len(logged))

    assert len(logged) == 2_000
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 64

"""Memory of requests with large bodies: it is freed when the request ends, without the garbage
collector, which would stop the event loop."""

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import pytest
from http_rig import TEMPLATE, VOCAB_SIZE, TalkingClient, in_memory, on_port
from scripted_client import ScriptedClient, ready
from waits import until

from config.error_frames import release_frames
from config.errors import UserError
from config.params.pooling import PoolingFacts
from server.http import body
from server.http.held_bodies import MAX_VALUES_BYTES, decoded_bytes, memory_of
from server.openai.schema import generation
from server.openai.schema.generation import BIAS_BYTES
from server.serving import job

TEXTS: list[weakref.ref[object]] = []


LONG = "word " * 60_000


class Text(str):
    """A text that supports weak references."""

    __slots__ = ("__weakref__",)


class Ids(list[object]):
    """A list that supports weak references."""

    __slots__ = ("__weakref__",)


def as_texts(value: Any) -> Any:
    """`value` with its long texts as Text, and its long lists as Ids."""
    if isinstance(value, dict):
        return {key: as_texts(item) for key, item in value.items()}
    if isinstance(value, list) and len(value) >= 1_000:
        ids = Ids(value)
        TEXTS.append(weakref.ref(ids))
        return ids
    if isinstance(value, list):
        return [as_texts(item) for item in value]
    if not isinstance(value, str) or len(value) < 1_000:
        return value
    text = Text(value)
    TEXTS.append(weakref.ref(text))
    return text


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


Fields = dict[str, Any]


class Case(NamedTuple):
    """A body that is refused, and the server's settings."""

    path: str
    fields: Fields
    chat_template: str | None = None
    status: int = 400


LONG_IDS = [7] * 60_000
CHAT = {"messages": [{"role": "user", "content": LONG}]}
JUNK = {"messages": [{"role": "user", "content": "a", "junk": LONG_IDS}]}
"""A message with a field that only the template reads."""
RAISING = "{{ raise_exception('no') }}"
RAISING_LATE = "{% for m in messages %}{{ m.content }}{{ raise_exception('no') }}{% endfor %}"
PICKY = "{% if messages[0].content is string %}{{ raise_exception('parts') }}{% endif %}" + TEMPLATE
"""A template that fails at the start-up probes."""
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WORDY = "{% for m in messages %}{% for i in range(999) %}{{ m.content }}{% endfor %}{% endfor %}"
RESPONSE = {"input": [{"role": "user", "content": LONG}]}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")

BODIES: dict[str, Case] = {
    "wrong type": Case("/v1/completions", {"prompt": LONG, "n": "x"}),
    "too many tokens": Case("/v1/completions", {"prompt": LONG}),
    "too many tokens in a list": Case("/v1/completions", {"prompt": [LONG, "b"]}),
    "too many ids": Case("/v1/completions", {"prompt": LONG_IDS}),
    "wrong message": Case("/v1/chat/completions", {"messages": [{"role": "x", "content": LONG}]}),
    "long chat": Case("/v1/chat/completions", CHAT),
    "long text for a template": Case("/v1/chat/completions", CHAT, WORDY),
    "raising template": Case("/v1/chat/completions", CHAT, RAISING),
    "late raising template": Case("/v1/chat/completions", CHAT, RAISING_LATE),
    "field for a raising template": Case("/v1/chat/completions", JUNK, RAISING),
    "failing probes": Case("/v1/chat/completions", CHAT, PICKY),
    "slow template": Case("/v1/chat/completions", JUNK, SLOW),
    "wrong schema": Case(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": LONG}},
    ),
    "long input": Case("/v1/responses", {"input": LONG}),
    "raising template of items": Case("/v1/responses", RESPONSE, RAISING),
    "items to cut": Case("/v1/responses", {**RESPONSE, "truncation": "auto"}, RAISING),
    "long message": Case("/v1/messages", {**CHAT, "max_tokens": 4}),
    "raising template of blocks": Case("/v1/messages", {**CHAT, "max_tokens": 4}, RAISING),
    "wrong number of tokens": Case("/v1/messages", {**CHAT, "max_tokens": LONG_IDS}),
    "chat to count": Case("/v1/chat/completions/input_tokens", CHAT, RAISING),
    "messages to count": Case("/v1/messages/count_tokens", CHAT, RAISING),
    "items to count": Case("/v1/responses/input_tokens", RESPONSE, RAISING),
    "chat to tokenize": Case("/tokenize", CHAT, RAISING),
    "chat to render": Case("/v1/chat/completions/render", CHAT, RAISING),
    "text to render": Case("/v1/completions/render", {"prompt": LONG}),
    "ids to continue": Case(
        "/inference/v1/generate", {"token_ids": LONG_IDS, "sampling_params": {}}
    ),
    "text to tokenize": Case("/tokenize", {"prompt": LONG, "model": "none"}, status=404),
    "ids to decode": Case("/detokenize", {"tokens": [-1, *LONG_IDS]}),
    "path of an adapter": Case("/v1/load_lora_adapter", {"lora_name": LONG, "lora_path": "a"}),
    "name of an adapter": Case("/v1/unload_lora_adapter", {"lora_name": LONG}, status=404),
    "text to embed": Case("/v1/embeddings", {"input": LONG}),
    "text to embed in Cohere's form": Case("/v2/embed", {"texts": [LONG]}),
    "text to pool": Case("/pooling", {"input": LONG}),
    "text to classify": Case("/classify", {"input": LONG}),
    "texts to score": Case("/score", {"text_1": LONG, "text_2": LONG}),
    "texts to score in v1": Case("/v1/score", {"text_1": LONG, "text_2": LONG}),
    "texts to rank": Case("/rerank", {"query": LONG, "documents": [LONG]}),
    "texts to rank in v1": Case("/v1/rerank", {"query": LONG, "documents": [LONG]}),
    "texts to rank in v2": Case("/v2/rerank", {"query": LONG, "documents": [LONG]}),
}


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record weak references to long values of bodies in TEXTS."""
    decode = body._decode_chunks
    TEXTS.clear()
    monkeypatch.setattr(body, "_decode_chunks", lambda chunks: as_texts(decode(chunks)))


async def assert_freed() -> None:
    # A thread that processed the text may not have dropped it yet.
    await until(lambda: not any(text() is not None for text in TEXTS))


POOLING = {
    **dict.fromkeys(("/v1/embeddings", "/v2/embed"), "embed"),
    "/pooling": "embed",
    "/classify": "classify",
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), "score"),
}
"""Pooling routes, and their tasks."""


def client_for(path: str) -> ScriptedClient:
    """A client for a model that accepts requests of `path`."""
    if (task := POOLING.get(path)) is None:
        return TalkingClient(max_model_len=512)
    width = 1 if task == "score" else 8
    facts = PoolingFacts(tasks=(task,), width=width, token_width=width)
    return ScriptedClient(ready(vocab_size=VOCAB_SIZE, max_model_len=512, pooling=facts))


async def test_each_route_with_a_body_is_tested() -> None:
    async with in_memory(lora_dir="/tmp", api_keys=("a",), allow_runtime_lora_updating=True) as rig:
        described = (await rig.http.get("/openapi.json")).json()["paths"]
    taking = {path for path, routes in described.items() if "requestBody" in routes.get("post", {})}

    assert taking == {case.path for case in BODIES.values()}


@pytest.mark.parametrize("name", BODIES)
async def test_the_body_of_a_refused_request_is_freed_without_the_garbage_collector(
    name: str, spied: None, without_collector: None
) -> None:
    case = BODIES[name]
    config = {"chat_template": case.chat_template} if case.chat_template else {}
    if "adapter" in case.path:
        config |= {"lora_dir": "/tmp", "api_keys": ("key",), "allow_runtime_lora_updating": True}
    async with on_port(client_for(case.path), **config) as rig:
        headers = {"authorization": "Bearer key"}
        answer = await rig.http.post(case.path, json=case.fields, headers=headers)

        assert answer.status_code == case.status, answer.text
        assert len(TEXTS) > 0
        await assert_freed()
        assert rig.state.bodies._held.num_bytes == 0


async def started(client: ScriptedClient) -> None:
    await until(lambda: client.queues)


JUNK_LIST = {"junk": LONG_IDS}
ACCEPTED: dict[str, tuple[str, Fields]] = {
    "completion": ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 4, **JUNK_LIST}),
    "completion of ids": ("/v1/completions", {"prompt": LONG_IDS, "truncate_prompt_tokens": 4}),
    "chat": ("/v1/chat/completions", {**CHAT, "truncate_prompt_tokens": 4, **JUNK_LIST}),
    "chat with a field": ("/v1/chat/completions", JUNK),
    "response": ("/v1/responses", {**RESPONSE, "truncate_prompt_tokens": 4, **JUNK_LIST}),
    "response with a field": (
        "/v1/responses",
        {"input": [{"role": "user", "content": "a", "junk": LONG_IDS}]},
    ),
    "response in the background": (
        "/v1/responses",
        {"input": [{"role": "user", "content": "a", "junk": LONG_IDS}], "background": True},
    ),
    "response that is not stored": (
        "/v1/responses",
        {"input": "a", "store": False, **JUNK_LIST},
    ),
    "message": ("/v1/messages", {"max_tokens": 400, **JUNK, **JUNK_LIST}),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ACCEPTED)
async def test_a_generating_request_keeps_only_the_prompt_of_its_body(
    name: str, is_stream: bool, spied: None, without_collector: None
) -> None:
    path, fields = ACCEPTED[name]
    client = TalkingClient(max_model_len=512, pace_s=0.02)
    client.endless = True
    async with on_port(client) as rig:
        sent = {**fields, "stream": is_stream}
        running = asyncio.ensure_future(rig.http.post(path, json=sent))
        await started(client)

        await assert_freed()
        assert not running.done() or fields.get("background")
        assert rig.state.bodies._held.num_bytes < 500_000

        running.cancel()


TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 100_000}}
FUNCTION = {"type": "function", "name": "f", "description": "x" * 100_000}
WITH_TOOLS: dict[str, Fields] = {
    "/v1/chat/completions": {"messages": CHAT["messages"], "tools": [TOOL]},
    "/v1/responses": {**RESPONSE, "tools": [FUNCTION]},
    "/v1/messages": {
        **CHAT,
        "max_tokens": 400,
        "tools": [{"name": "f", "description": "x" * 100_000, "input_schema": {"type": "object"}}],
    },
}


@pytest.mark.parametrize("path", WITH_TOOLS)
async def test_large_tools_count_until_the_request_ends_without_the_rest_of_the_body(
    path: str,
) -> None:
    client = TalkingClient(max_model_len=512, pace_s=0.02)
    client.endless = True
    async with on_port(client) as rig:
        choice = {"type": "none"} if path == "/v1/messages" else "none"
        more = {"tool_choice": choice, "truncate_prompt_tokens": 4, "junk": "{" * 2_000_000}
        fields = WITH_TOOLS[path]
        if path == "/v1/messages":
            fields = {**fields, "messages": [{"role": "user", "content": "a"}]}
        running = asyncio.ensure_future(rig.http.post(path, json={**fields, **more}))
        await started(client)

        await until(lambda: rig.state.bodies._held.num_bytes < 1_000_000)
        assert rig.state.bodies._held.num_bytes > 100_000
        assert not running.done()
        running.cancel()
        await until(lambda: not rig.state.bodies._held.num_bytes)


async def test_a_text_of_brackets_counts_as_at_most_the_values_of_a_body() -> None:
    held = list[int]()
    async with in_memory(TalkingClient(max_model_len=512)) as rig:
        decode = body._decode_chunks

        def watched(chunks: list[bytes]) -> Any:
            held.append(rig.state.bodies._held.num_bytes)
            return decode(chunks)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(body, "_decode_chunks", watched)
            answer = await rig.http.post("/v1/completions", json={"prompt": "{" * 4 * 2**20})

    assert answer.status_code == 400, answer.text
    assert 4 * 2**20 < held[0] <= 5 * 2**20 + MAX_VALUES_BYTES


async def test_copies_of_many_biases_count_until_the_request_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "INLINE_IDS", 100)
    monkeypatch.setattr(generation, "LEFT_WEIGHT", 100)
    client = TalkingClient(max_model_len=512, pace_s=0.02)
    client.endless = True
    biases = {str(token): 0.5 for token in range(200)}
    async with on_port(client) as rig:
        sent = {"prompt": "a", "max_tokens": 400, "logit_bias": biases}
        running = asyncio.ensure_future(rig.http.post("/v1/completions", json=sent))
        await started(client)

        assert rig.state.bodies._held.num_bytes >= 200 * BIAS_BYTES
        running.cancel()
        await until(lambda: not rig.state.bodies._held.num_bytes)


@pytest.mark.parametrize(
    "value",
    [
        {str(token): 0.5 for token in range(20_000)},
        [{"role": "user", "content": "x"}] * 10_000,
        [{"a": {}}] * 20_000,
    ],
    ids=["biases", "messages", "objects"],
)
def test_decoded_values_take_at_most_their_estimate(value: Any) -> None:
    data = msgspec.json.encode({"x": value})
    tracemalloc.start()
    try:
        decoded = msgspec.json.decode(data)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert decoded == {"x": value}
    assert num_bytes <= decoded_bytes(data)
    assert num_bytes <= memory_of(decoded)


CUT = {"truncate_prompt_tokens": 4, **JUNK_LIST}
PARTS = [{"content": [{"type": "text", "text": LONG}]}]
POOLED: dict[str, tuple[str, Fields]] = {
    "embedding": ("/v1/embeddings", {"input": LONG, **CUT}),
    "embedding of a conversation": ("/v1/embeddings", {**CHAT, **CUT}),
    "embedding in Cohere's form": ("/v2/embed", {"inputs": PARTS, **JUNK_LIST}),
    "pooling": ("/pooling", {"input": [LONG], **CUT}),
    "classes": ("/classify", {"input": LONG, **CUT}),
    "scores": ("/score", {"text_1": LONG, "text_2": [LONG], **CUT}),
    "scores of other names": ("/score", {"queries": "a", "items": [LONG], **CUT}),
    "ranks": ("/rerank", {"query": LONG, "documents": PARTS, "return_documents": False, **CUT}),
    "ranks with documents": ("/rerank", {"query": LONG, "documents": ["a", "b"], **CUT}),
}


@pytest.mark.parametrize("name", POOLED)
async def test_a_pooling_request_keeps_only_the_prompt_of_its_body(
    name: str, spied: None, without_collector: None
) -> None:
    path, fields = POOLED[name]
    client = client_for(path)
    async with on_port(client) as rig:
        running = asyncio.ensure_future(rig.http.post(path, json=fields))
        await started(client)

        await assert_freed()
        assert not running.done()
        assert rig.state.bodies._held.num_bytes < 500

        running.cancel()


def test_an_error_that_its_frame_refers_to_frees_the_variables_of_the_frame(
    without_collector: None,
) -> None:
    def refuse() -> None:
        text = as_texts(LONG)
        error = UserError(f"{len(text)} characters are too many")
        try:
            raise ValueError(text[:10])
        except ValueError:
            raise error  # noqa: B904  # the context refers to this frame too

    TEXTS.clear()
    try:
        refuse()
    except UserError as error:
        release_frames(error)

    assert TEXTS[0]() is None


def frames_in_cycles() -> list[str]:
    """Functions of the server whose frames only the garbage collector frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        frames = [found for found in gc.garbage if isinstance(found, FrameType)]
        codes = [frame.f_code for frame in frames]
        return [code.co_name for code in codes if "/server/" in code.co_filename]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


async def test_a_response_that_drops_old_messages_leaves_no_frames_to_the_collector(
    without_collector: None,
) -> None:
    async with on_port(TalkingClient(max_model_len=512)) as rig:
        cut = {"truncation": "auto", "max_output_tokens": 2}
        # Over 16 Mi characters: the template stops, and is rendered for fewer and fewer messages.
        given = [{"role": "user", "content": text} for text in (*[LONG] * 60, "a")]
        first = await rig.post("/v1/responses", {"input": given, **cut})
        gc.collect()
        later = {"input": "b", "previous_response_id": first.json()["id"], **cut}
        answer = await rig.post("/v1/responses", later)

        assert answer.status_code == 200, answer.text
        assert frames_in_cycles() == []
        assert rig.state.bodies._held.num_bytes == 0

"""Answers of many MiB: encoded and sent in pieces, so that the event loop serves other clients in
between."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from delays import machine_s
from http_rig import TOKENIZER, TalkingClient, in_memory
from pooling_client import PoolingClient
from scripted_client import ScriptedClient, ScriptedQueue
from starlette.types import ASGIApp, Message

SLICE_S = 0.05
"""Limit of an event-loop slice in CPU seconds: wall time depends on other work on the machine."""
ATTEMPTS = 4
"""Attempts per answer: another process may stop the event loop's thread while another thread of
this process works."""
PIECE_BYTES = 2**19
QUOTES = '"' * (2 * 2**20)
IDS = TOKENIZER.encode_now('"', False) * 100_000
MESSAGES = [{"role": "user", "content": QUOTES}]
ECHO = {"echo": True, "truncate_prompt_tokens": -1, "max_tokens": 1, "n": 8}
LONG_TEXT = "\N{GRINNING FACE}" * (2**21 - 100)
RESPONSE = {
    "input": "hi",
    "tools": [{"type": "function", "name": "f", "description": LONG_TEXT}],
    "tool_choice": "none",
    "text": {"format": {"type": "text", "title": LONG_TEXT}},
    "stream": True,
}
"""A request whose fields are in several events of the answer."""
VECTORS = np.random.default_rng(0).standard_normal((2048, 1024)).astype("<f4")


class LargeVectors(PoolingClient):
    """Answers each request with VECTORS."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = False

    def add(self, *args: Any, **kwargs: Any) -> ScriptedQueue:
        queue = super().add(*args, **kwargs)
        queue.say(finish="stop", cached=0, vectors=VECTORS)
        return queue


class LongContext(TalkingClient):
    """A TalkingClient of a model with a context of 2**23 tokens."""

    def __init__(self) -> None:
        super().__init__(max_model_len=2**23)


async def answer_of(app: ASGIApp, path: str, data: bytes) -> tuple[int, list[bytes]]:
    """Status and pieces of an answer."""
    pieces: list[bytes] = []
    status = 0
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()
        is_read = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": None,
    }
    await app(scope, receive, send)
    return status, pieces


async def longest_slice_s(call: Awaitable[Any]) -> tuple[float, Any]:
    """(longest CPU time of this process during `call` in which no other task ran, result of
    `call`)"""
    longest_s = 0.0

    async def beat() -> None:
        nonlocal longest_s
        while True:
            begun_s = time.process_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.process_time() - begun_s)

    beating = asyncio.ensure_future(beat())
    await asyncio.sleep(0)
    try:
        result = await call
        await asyncio.sleep(0.002)
        return longest_s, result
    finally:
        beating.cancel()


CASES: dict[str, tuple[Callable[[], ScriptedClient], str, dict[str, Any]]] = {
    "token vectors": (LargeVectors, "/pooling", {"input": "hi", "task": "token_embed"}),
    "token vectors in base64": (
        LargeVectors,
        "/pooling",
        {"input": "hi", "task": "token_embed", "encoding_format": "base64"},
    ),
    "texts of embeddings": (PoolingClient, "/v2/embed", {"texts": [QUOTES] * 4}),
    "documents": (
        PoolingClient,
        "/rerank",
        {"query": "x", "documents": [QUOTES] * 4, "truncate_prompt_tokens": 16},
    ),
    "echoed prompts": (LongContext, "/v1/completions", {"prompt": IDS, **ECHO}),
    "streamed echoes": (LongContext, "/v1/completions", {"prompt": IDS, **ECHO, "stream": True}),
    "an echoed message": (TalkingClient, "/v1/chat/completions", {"messages": MESSAGES, **ECHO}),
    "a streamed echo of a message": (
        TalkingClient,
        "/v1/chat/completions",
        {"messages": MESSAGES, **ECHO, "stream": True},
    ),
    "events of a response": (TalkingClient, "/v1/responses", RESPONSE),
    "events of a background response": (
        TalkingClient,
        "/v1/responses",
        {**RESPONSE, "background": True},
    ),
    "tokens": (LongContext, "/tokenize", {"prompt": " x" * 200_000, "return_token_strs": True}),
    "a text of tokens": (LongContext, "/detokenize", {"tokens": IDS * 4}),
}


@pytest.mark.parametrize("kind", CASES)
async def test_a_large_answer_is_encoded_and_sent_in_pieces(kind: str) -> None:
    make_client, path, body = CASES[kind]
    data = json.dumps(body, ensure_ascii=False).encode()
    slices_s = []
    async with in_memory(make_client()) as rig:
        for _ in range(ATTEMPTS):
            call = answer_of(rig.app, path, data)
            slice_s, (status, pieces) = await longest_slice_s(call)
            slices_s.append(slice_s)
            if slice_s < machine_s(SLICE_S):
                break

    assert status == 200, b"".join(pieces)[:300]
    assert sum(map(len, pieces)) > PIECE_BYTES
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert min(slices_s) < machine_s(SLICE_S)

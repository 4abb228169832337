"""Request bodies: the answer names unknown fields, and bodies that arrive at the same time are read
in turns."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest
from http_rig import TalkingClient, in_memory, on_port
from pooling_client import EMBEDDER, PoolingClient
from starlette.requests import Request
from starlette.types import Message

from server.app.field_docs import SHARED
from server.http.access_log import RequestRecord, attach_record
from server.http.body import BodyReader
from server.http.pacing import MAX_PER_ITERATION
from server.openai.schema.chat import ChatBody

HEADER = "x-gaudiserve-ignored-fields"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_name_the_unknown_fields_of_the_request(
    path: str, body: dict[str, Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "server.app.middleware")
    async with on_port(TalkingClient()) as rig:
        plain = await rig.post(path, {**body, "stream": stream})
        typo = await rig.post(path, {**body, "stream": stream, "temprature": 0, "zz": [1]})

        assert (plain.status_code, typo.status_code) == (200, 200)
        assert HEADER not in plain.headers
        assert typo.headers[HEADER] == "temprature, zz"
        assert "unknown fields, which are ignored: temprature, zz" in caplog.text


async def test_embedding_answers_name_the_unknown_fields_of_the_request() -> None:
    async with in_memory(PoolingClient(EMBEDDER)) as rig:
        plain = await rig.post("/v1/embeddings", {"input": [5, 6], "messages": None})
        typo = await rig.post("/v1/embeddings", {"input": [5, 6], "encodin": "float"})

        assert plain.status_code == typo.status_code == 200
        assert HEADER not in plain.headers
        assert typo.headers[HEADER] == "encodin"


async def test_a_refused_request_also_names_its_unknown_fields() -> None:
    async with in_memory() as rig:
        response = await rig.post("/v1/completions", {"promt": "hi"})

        assert response.status_code == 400
        assert response.headers[HEADER] == "promt"


async def test_known_fields_nulls_and_fields_without_effect_are_not_named() -> None:
    known = dict.fromkeys(SHARED) | dict.fromkeys(ChatBody.unsupported)
    sdk = {"store": True, "metadata": {"a": "b"}, "prediction": {"type": "content"}, "user": "u"}
    async with in_memory() as rig:
        response = await rig.chat(**{**known, **sdk, "messages": MESSAGES, "best_of": 1})

        assert response.status_code == 200, response.text
        assert HEADER not in response.headers


async def test_names_are_bounded_printable_and_separated() -> None:
    names = ["a,b", "x" * 5000, "line\r\nx-evil: 1", "é\x7f ", "", *(f"f{i}" for i in range(5000))]
    async with on_port() as rig:
        response = await rig.chat(**dict.fromkeys(names, 1))

        assert response.status_code == 200
        assert "x-evil" not in response.headers
        words = response.headers[HEADER].split(", ")
        assert words[:5] == ["a?b", "x" * 64, "line??x-evil:?1", "???", ""]
        assert words[5:] == ["f0", "f1", "f2", "..."]


@pytest.mark.parametrize(("num_characters", "most"), [(10, MAX_PER_ITERATION), (10_000, 1)])
async def test_bodies_that_end_at_the_same_time_are_decoded_in_turns(
    num_characters: int, most: int
) -> None:
    reader = BodyReader(2**20)
    ended = asyncio.Event()
    num_decoded: Counter[int] = Counter()
    iteration = 0

    async def count_iterations() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    async def receive() -> Message:
        await ended.wait()
        body = b'{"a": "%s"}' % (b"x" * num_characters)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(_: Message) -> None:
        raise AssertionError("nothing is sent")

    async def read() -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        attach_record(scope, RequestRecord("id", "POST", "/", "-", send))
        await reader.read_object(Request(scope, receive))
        num_decoded[iteration] += 1

    counting = asyncio.create_task(count_iterations())
    reading = [asyncio.create_task(read()) for _ in range(40)]
    await asyncio.sleep(0.01)
    ended.set()
    await asyncio.gather(*reading)
    counting.cancel()
    reader.close()

    assert num_decoded.total() == 40
    assert max(num_decoded.values()) <= most

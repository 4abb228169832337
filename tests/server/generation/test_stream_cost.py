"""CPU cost of a streamed token and of a short request, as ratios to reference costs in the same
process."""

import gc
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from http_rig import TalkingClient, in_memory
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from server.process.api_server import GC_OBJECTS

TOKENS = 1500
MOST = 7
"""Maximum cost of a token, in encodings of a chunk by the standard library, including the test
double's share: twice the measured value."""

REQUESTS = 100
ROUNDS = 6
MOST_OF_A_REQUEST = 8
"""Maximum cost of a short chat, in requests to a bare application: twice the measured value."""


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Collector settings of an API server; objects of other tests are frozen."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def encoding_s() -> float:
    """CPU seconds for encoding the same number of chunks with the standard library."""
    choice = {"index": 0, "delta": {"content": "H"}, "logprobs": None, "finish_reason": None}
    chunk = {"id": "x" * 40, "object": "x", "created": 1, "model": "demo", "choices": [choice]}
    begun_s = time.process_time()
    for _ in range(TOKENS):
        json.dumps(chunk)
    return time.process_time() - begun_s


async def streaming_s() -> float:
    """CPU seconds to stream TOKENS tokens, one chunk each."""
    client = TalkingClient()
    client.endless = True
    async with in_memory(client) as rig:
        begun_s = time.process_time()
        answer = await rig.chat(stream=True, max_tokens=TOKENS)
        spent_s = time.process_time() - begun_s
    assert answer.content.count(b"data: ") >= TOKENS, answer.text[:300]
    return spent_s


async def test_a_streamed_token_takes_at_most_a_few_times_its_encoding() -> None:
    # Alternate both measurements: a slow phase of the machine slows both.
    ratios = [await streaming_s() / encoding_s() for _ in range(ROUNDS)]

    assert min(ratios) < MOST


async def _echo(request: Request) -> JSONResponse:
    return JSONResponse(await request.json())


BARE = Starlette(routes=[Route("/v1/chat/completions", _echo, methods=["POST"])])
"""An application that parses a body and writes it back."""


async def asking_s(http: httpx.AsyncClient) -> float:
    """CPU seconds for REQUESTS short chats in sequence."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    begun_s = time.process_time()
    for _ in range(REQUESTS):
        answer = await http.post("/v1/chat/completions", json=body)
    spent_s = time.process_time() - begun_s
    assert answer.status_code == 200, answer.text
    return spent_s


async def test_a_short_request_takes_at_most_a_few_times_a_bare_request() -> None:
    transport = httpx.ASGITransport(BARE)
    async with (
        in_memory(TalkingClient("H")) as rig,
        httpx.AsyncClient(transport=transport, base_url="http://test") as bare,
    ):
        # Alternate both measurements: a slow phase of the machine slows both.
        ratios = [await asking_s(rig.http) / await asking_s(bare) for _ in range(ROUNDS)]

    assert min(ratios) < MOST_OF_A_REQUEST

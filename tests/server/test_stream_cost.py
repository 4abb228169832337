"""What a streamed token and a short request cost beside something known: ratios of CPU time in one
process."""

import json
import time

from http_rig import TalkingClient, in_memory

TOKENS = 1500
MOST = 7
"""Encodings of one chunk by the standard library that a token may cost, the double's share
included: twice of what it does."""

REQUESTS = 200
MOST_OF_A_REQUEST = 450
"""The same for a short chat, the client's share included: twice of what it does."""


def encoding_s() -> float:
    """CPU seconds to write as many chunks with the standard library."""
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


async def test_a_streamed_token_costs_a_few_encodings() -> None:
    streaming = min([await streaming_s() for _ in range(3)])
    encoding = min([encoding_s() for _ in range(5)])

    assert streaming / encoding < MOST


async def asking_s() -> float:
    """CPU seconds of REQUESTS short chats, one after the other."""
    async with in_memory(TalkingClient("H")) as rig:
        for _ in range(5):
            await rig.chat(max_tokens=1)
        begun_s = time.process_time()
        for _ in range(REQUESTS):
            answer = await rig.chat(max_tokens=1)
        spent_s = time.process_time() - begun_s
    assert answer.status_code == 200, answer.text
    return spent_s


async def test_a_short_request_costs_some_hundred_encodings() -> None:
    asking = min([await asking_s() for _ in range(3)]) / REQUESTS
    encoding = min([encoding_s() for _ in range(5)]) / TOKENS

    assert asking / encoding < MOST_OF_A_REQUEST

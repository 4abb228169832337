"""What a streamed token costs beside something known: a ratio of CPU time in one process."""

import json
import time

from http_rig import TalkingClient, in_memory

TOKENS = 1500
MOST = 7
"""Encodings of one chunk by the standard library that a token may cost, the double's share
included: twice of what it does."""


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

"""Known tokens that pipeline stages receive with the plan of a decode."""

import numpy as np

from config.params.sampling import SamplingParams
from engine.request import ModelLimits, Request
from engine.scheduling.known_tokens import known_tokens
from engine.transport.messages import AddRequest

LIMITS = ModelLimits(100, 50, frozenset())


def request(key: int, prompt: list[int], output: list[int], drafts: list[int]) -> Request:
    request = Request(
        AddRequest(key, memoryview(np.array(prompt, "<u4").tobytes()), SamplingParams()),
        [],
        seed=0,
        priority_key=(0, key),
        limits=LIMITS,
        arrived_at=0.0,
    )
    request.output_token_ids.extend(output)
    request.num_tokens += len(output)
    request.drafts = drafts
    return request


def test_the_newest_tokens_are_sent_and_drafts_are_verified_once() -> None:
    requests = [
        request(1, [1, 2, 3, 4], [5], [6, 7]),
        request(2, [8], [9], []),
        request(3, [1, 2], [3, 4, 5, 6], [7]),
    ]

    known = known_tokens(requests, 3)
    again = known_tokens(requests, 3)

    assert known.num_tokens == [5, 2, 6]
    assert np.frombuffer(known.last_tokens, "<u4").reshape(3, 3).tolist() == [
        [3, 4, 5],
        [0, 8, 9],
        [4, 5, 6],
    ]
    assert (known.drafts, again.drafts) == ([[6, 7], [], [7]], [[], [], []])

"""Lists of token ids: tuples, bytes and sets."""

import msgspec
import numpy as np
import pytest

from config.params.sampling import SamplingParams, invalid_token
from config.params.token_ids import MAX_UNPACKED, TokenSet, num_ids, packed, token_array


@pytest.mark.parametrize("size", [0, 3, MAX_UNPACKED, MAX_UNPACKED + 1, 5000])
def test_token_ids_round_trip_as_tuples_and_as_bytes(size: int) -> None:
    ids = tuple(i * 7919 % 2**32 for i in range(size))

    short = packed(token_array(ids))

    assert isinstance(short, bytes) == (size > MAX_UNPACKED)
    assert num_ids(short) == size
    assert tuple(token_array(short).tolist()) == ids


def test_packed_token_ids_survive_msgpack_and_count_as_listed_tokens() -> None:
    listed = packed(np.arange(5000))
    params = SamplingParams().replace_unchecked(stop_token_ids=listed, allowed_token_ids=listed)

    received = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)

    assert received == params
    assert received.num_listed_tokens == 10_000
    assert invalid_token(received.stop_token_ids, 5000) is None
    assert invalid_token(received.stop_token_ids, 4999) == 4999


def test_a_token_set_has_each_token_once() -> None:
    tokens = TokenSet(np.array([5, 3, 5, 49_999]), 50_000)

    assert list(tokens) == [3, 5, 49_999]
    assert len(tokens) == 3
    assert 5 in tokens and 49_999 in tokens
    assert not any(token in tokens for token in (0, 4, 50_000, -1, -50_000))

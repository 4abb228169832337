"""Checksums of blocks in host memory."""

import random

import pytest
import torch

from hpu.offload.host_blocks import STRIDE, HostBlocks


@pytest.mark.parametrize("size", [1, 100, STRIDE, 3 * STRIDE, 2 * STRIDE + 13])
def test_flipped_bits_and_swapped_bytes_are_detected(size: int) -> None:
    rng = random.Random(size)
    blocks = HostBlocks(torch.randint(0, 256, (3, size), dtype=torch.uint8))
    blocks.seal([0, 1])
    row = blocks.rows[1]

    for _ in range(200):
        place, bit = rng.randrange(size), 1 << rng.randrange(8)
        row[place] ^= bit
        assert blocks.corrupt([0, 1]) == [1]
        row[place] ^= bit
        assert blocks.corrupt([0, 1]) == []
        other = rng.randrange(size)
        if row[place] != row[other]:
            row[[place, other]] = row[[other, place]]
            assert not blocks.is_whole(1)
            row[[place, other]] = row[[other, place]]


def test_an_unsealed_slot_counts_as_corrupt() -> None:
    blocks = HostBlocks(torch.zeros(2, 100, dtype=torch.uint8))

    assert blocks.corrupt([0, 1]) == [0, 1]
    blocks.seal([1])
    assert blocks.corrupt([0, 1]) == [0]

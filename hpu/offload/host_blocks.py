"""HostBlocks: slots of host memory for KV blocks, each with a checksum."""

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Row = npt.NDArray[Any]

NUM_COLUMNS = 512
STRIDE = NUM_COLUMNS * 8
"""Bytes of a line of 64-bit words."""


class HostBlocks:
    """`pool` (slots, slot_bytes) uint8, with the checksums of what was copied there. What changes a
    slot calls `seal` behind that."""

    def __init__(self, pool: "Tensor") -> None:
        self.pool = pool
        self.rows: Row = pool.numpy()
        """The same memory."""
        self._checksums: dict[int, int] = {}
        """By slot."""

    def seal(self, slots: Iterable[int]) -> None:
        """Note the checksums of these slots. May be called from any thread."""
        for slot in slots:
            self._checksums[slot] = checksum(self.rows[slot])

    def is_whole(self, slot: int) -> bool:
        """Whether the slot holds what was sealed."""
        return self._checksums.get(slot) == checksum(self.rows[slot])

    def corrupt(self, slots: Sequence[int]) -> list[int]:
        """The indices of those of `slots` that do not hold what was sealed."""
        return [index for index, slot in enumerate(slots) if not self.is_whole(slot)]


def checksum(row: Row) -> int:
    """Of bytes (n,) uint8: the CRC-32 of the sums of NUM_COLUMNS columns of 64-bit words, and of
    the bytes behind these. Reads as fast as the memory is, many times as fast as a CRC-32 of all,
    and finds any change within a column of words but one that leaves its sum."""
    end = len(row) // STRIDE * STRIDE
    sums = np.add.reduce(row[:end].view(np.uint64).reshape(-1, NUM_COLUMNS), axis=0)
    return zlib.crc32(row[end:].data, zlib.crc32(sums.data))

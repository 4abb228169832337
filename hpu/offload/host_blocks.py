"""HostBlocks: slots of host memory for KV blocks, with checksums; and the sizes of copies of
blocks."""

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
"""Bytes in a row of NUM_COLUMNS 64-bit words."""

COPY_SIZES = (1, 4, 16)
"""Numbers of blocks per copy. Smaller copies are padded, because each number is a different
shape."""

MAX_COPY_BYTES = 257 << 20
"""Maximum bytes of a copy of several blocks: 16 blocks of 16 MiB with their flags of non-finite
tokens."""

MAX_GATHERS = 2
"""Maximum number of stores whose gathered blocks are on the device at a time; further stores
wait."""

MIN_SLOTS = 2
"""Minimum number of blocks in host memory."""


def copy_sizes(block_bytes: int) -> tuple[int, ...]:
    """Numbers of blocks per copy that a device uses for blocks of `block_bytes`."""
    fitting = tuple(size for size in COPY_SIZES if size * block_bytes <= MAX_COPY_BYTES)
    return fitting or COPY_SIZES[:1]


def staging_bytes(block_bytes: int) -> int:
    """Device bytes for copies: staging of loads, and gathered blocks of stores."""
    sizes = copy_sizes(block_bytes)
    return (sum(sizes) + MAX_GATHERS * sizes[-1]) * block_bytes


class HostBlocks:
    """Host memory `pool` (slots, slot_bytes) uint8, with a checksum per slot. Code that changes a
    slot must call `seal` afterwards."""

    def __init__(self, pool: "Tensor") -> None:
        self.pool = pool
        self.rows: Row = pool.numpy()
        """numpy view of `pool`."""
        self._checksums: dict[int, int] = {}
        """Checksums by slot."""

    def seal(self, slots: Iterable[int]) -> None:
        """Record the checksums of these slots. Thread-safe."""
        for slot in slots:
            self._checksums[slot] = checksum(self.rows[slot])

    def is_whole(self, slot: int) -> bool:
        """Whether the slot's contents match its recorded checksum."""
        return self._checksums.get(slot) == checksum(self.rows[slot])

    def corrupt(self, slots: Sequence[int]) -> list[int]:
        """Indices into `slots` of the slots whose contents do not match their checksum."""
        return [index for index, slot in enumerate(slots) if not self.is_whole(slot)]


def checksum(row: Row) -> int:
    """Checksum of bytes (n,) uint8: CRC-32 of the sums of NUM_COLUMNS columns of 64-bit words, and
    of the remaining bytes. Runs at memory speed, many times faster than a CRC-32 of all bytes.
    Changes that leave the sum of every column equal are not detected."""
    end = len(row) // STRIDE * STRIDE
    sums = np.add.reduce(row[:end].view(np.uint64).reshape(-1, NUM_COLUMNS), axis=0)
    return zlib.crc32(row[end:].data, zlib.crc32(sums.data))

"""Memory in huge pages for weights, which every token reads from end to end: one TLB entry covers
what would take five hundred."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

MAP_BYTES = 64 << 20
PAGE_BYTES = 2 << 20
LINE_BYTES = 64
"""Of a cache line."""


class HugePages:
    """Allocates tensors from large maps. A map is unmapped with the last tensor in it."""

    def __init__(self, map_bytes: int = MAP_BYTES) -> None:
        """`map_bytes`: of a map, at least."""
        self._map_bytes = map_bytes
        self._free = torch.empty(0, dtype=torch.uint8)
        """The unused rest of the newest map."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor that begins at a cache line."""
        size = math.prod(shape) * dtype.itemsize
        padded_size = -(-size // LINE_BYTES) * LINE_BYTES
        if padded_size > len(self._free):
            self._free = _map(max(padded_size, self._map_bytes))
        tensor, self._free = self._free[:size], self._free[padded_size:]
        return tensor.view(dtype).view(*shape)


def _map(size: int) -> Tensor:
    # The kernel aligns maps to huge pages that are a whole number of them.
    size = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

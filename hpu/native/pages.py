"""Allocator of huge pages for weights, which each launch reads: a TLB entry of a 2 MiB page covers
as much as 512 entries of 4 KiB pages."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

MAP_BYTES = 64 << 20
PAGE_BYTES = 2 << 20
LINE_BYTES = 64
"""Size of a cache line."""


class HugePages:
    """Allocates tensors from large maps. A map is unmapped when no tensor uses it."""

    def __init__(self, map_bytes: int = MAP_BYTES) -> None:
        """`map_bytes`: minimum size of a map."""
        self._map_bytes = map_bytes
        self._free = torch.empty(0, dtype=torch.uint8)
        """The unused rest of the newest map."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed tensor, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        padded_size = -(-size // LINE_BYTES) * LINE_BYTES
        if padded_size > len(self._free):
            self._free = _map(max(padded_size, self._map_bytes))
        tensor, self._free = self._free[:size], self._free[padded_size:]
        return tensor.view(dtype).view(*shape)


def _map(size: int) -> Tensor:
    # Recent kernels align a map to huge pages if its size is a multiple of a huge page.
    size = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

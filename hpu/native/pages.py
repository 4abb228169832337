"""Memory in huge pages, for what every token reads from end to end: the processor looks up one
address where it would look up five hundred. Knows no models."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

MAP_BYTES = 64 << 20
LINE_BYTES = 64


class HugePages:
    """Lends pieces of large maps, one behind the other. A map is given back with its last piece."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """What is left of the newest map."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that begins at a line of the cache."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // LINE_BYTES) * LINE_BYTES
        if room > len(self._bytes):
            self._bytes = _map(max(room, MAP_BYTES))
        piece, self._bytes = self._bytes[:size], self._bytes[room:]
        return piece.view(dtype).view(*shape)


def _map(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

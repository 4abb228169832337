"""BlockLists: device lists of block numbers, padded to a fixed size."""

import torch
from torch import Tensor

from hpu.backends.base import Backend, Event


class BlockLists:
    """`count` lists of `size` block numbers each, in device memory. Two host buffers alternate, so
    that filling does not wait for the previous upload."""

    def __init__(self, size: int, count: int, backend: Backend) -> None:
        self._size = size
        self._backend = backend
        self._host_sets = [backend.host_tensor(count * size, backend.index_dtype) for _ in range(2)]
        self._read_events: list[Event | None] = [None, None]
        self._next_set = 0
        self._flat = backend.zeros((count * size,), backend.index_dtype)

    def upload(self, *lists: list[int], pad_block: int) -> tuple[Tensor, ...]:
        """Upload the lists, each padded with `pad_block` to (size,). The next call overwrites the
        returned tensors: launch the work that reads them before."""
        index, self._next_set = self._next_set, self._next_set ^ 1
        read_event = self._read_events[index]
        if read_event is not None:
            read_event.wait()
        host = self._host_sets[index].numpy().reshape(-1, self._size)
        host[:] = pad_block
        for row, blocks in zip(host, lists, strict=True):
            row[: len(blocks)] = blocks
        self._backend.upload(self._flat, self._host_sets[index])
        self._read_events[index] = self._backend.event()
        return torch.split(self._flat, self._size)

"""KVCache: the tensors behind the block numbers. Knows no sequences."""

import math
from typing import Protocol

import torch
from torch import Tensor

from config.engine import EngineConfig
from hpu.backends.base import Backend

Shape = tuple[int, ...]


class HoldsCaches(Protocol):
    """A model that attends to paged caches, one (keys, values) pair a layer."""

    def cache_shapes(self, num_blocks: int, block_size: int) -> list[tuple[Shape, Shape]]:
        """Shapes of each layer's caches; blocks are outermost in memory."""
        ...

    def bind_caches(self, caches: list[tuple[Tensor, Tensor]]) -> None: ...


def reads_contiguously(config: EngineConfig, backend: Backend) -> bool:
    """Whether decodes read the cache as one slice from block 0 on: where the device gains by it, or
    where it was asked for, and never with prefixes that rows may share."""
    asked = config.execution.contiguous_pa
    if config.cache.enable_prefix_caching or asked is False:
        return False
    return asked is True or backend.reads_contiguously


def block_bytes(model: HoldsCaches, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    shapes = model.cache_shapes(1, block_size)
    return sum(math.prod(shape) for pair in shapes for shape in pair) * dtype.itemsize


class KVCache:
    """`num_blocks` blocks to lend, and the pad block behind them (number `num_blocks`)."""

    def __init__(
        self,
        model: HoldsCaches,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes = (num_blocks + 1) * block_bytes(model, block_size, dtype)
        self._backend = backend
        self._layers = [
            (backend.zeros(keys, dtype), backend.zeros(values, dtype))
            for keys, values in model.cache_shapes(num_blocks + 1, block_size)
        ]
        model.bind_caches(self._layers)

    def scrub(self, blocks: list[int]) -> None:
        """Replace what is not a number in `blocks` by zero.

        Attention weighs unused slots by zero, but zero times not-a-number is not a number: a broken
        sequence must not leave any behind for the next holder of its blocks.
        """
        if not blocks:
            return
        host = self._backend.host_tensor(len(blocks), self._backend.index_dtype)
        host.copy_(torch.tensor(blocks))
        index = self._backend.zeros((len(blocks),), self._backend.index_dtype)
        self._backend.upload(index, host)
        for cache in (cache for pair in self._layers for cache in pair):
            by_block = cache.view(self.num_blocks + 1, -1)
            clean = torch.nan_to_num(by_block.index_select(0, index), 0.0, 0.0, 0.0)
            by_block.index_copy_(0, index, clean)
        # `host` must outlive the copy; this path is rare, so waiting is the simplest way.
        self._backend.synchronize()

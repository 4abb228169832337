"""KVCache: the tensors behind the block numbers. Knows no sequences."""

import logging
import math
from typing import Protocol

import torch
from torch import Tensor

from config.engine import EngineConfig
from hpu.backends.base import Backend, Event

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]

MOVE_SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Blocks that are moved at once, padded up: the sizes of the vendor's defragmenter."""

SCRUBBED = 16
"""Blocks that are scrubbed at once, padded up: a new number would be a new shape."""


class HoldsCaches(Protocol):
    """A model that attends to paged caches, one (keys, values) pair a layer."""

    def cache_shapes(self, num_blocks: int, block_size: int) -> list[tuple[Shape, Shape]]:
        """Shapes of each layer's caches; blocks are outermost in memory."""
        ...

    def bind_caches(self, caches: list[tuple[Tensor, Tensor]], block_size: int) -> None: ...


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


class _BlockLists:
    """Static lists of block numbers, `count` of `size` each; two sets on the host, used in turn."""

    def __init__(self, size: int, count: int, backend: Backend) -> None:
        self._size = size
        self._backend = backend
        self._sets = [backend.host_tensor(count * size, backend.index_dtype) for _ in range(2)]
        self._read: list[Event | None] = [None, None]
        self._turn = 0
        self._flat = backend.zeros((count * size,), backend.index_dtype)

    def upload(self, *lists: list[int], pad_block: int) -> tuple[Tensor, ...]:
        """Each list (size), padded with `pad_block`; what the device does with them must be given
        before the next call."""
        turn, self._turn = self._turn, self._turn ^ 1
        read = self._read[turn]
        if read is not None:
            read.wait()
        host = self._sets[turn].numpy().reshape(-1, self._size)
        host[:] = pad_block
        for row, blocks in zip(host, lists, strict=True):
            row[: len(blocks)] = blocks
        self._backend.upload(self._flat, self._sets[turn])
        self._read[turn] = self._backend.event()
        return torch.split(self._flat, self._size)


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
        model.bind_caches(self._layers, block_size)
        self._model = model
        self._moves: dict[int, _BlockLists] = {}
        self._scrubbed = _BlockLists(SCRUBBED, 1, backend)

    def close(self) -> None:
        """Give the memory back; the model may not run until another cache is bound."""
        none = torch.empty(0)
        self._model.bind_caches([(none, none)] * len(self._layers), self.block_size)
        self._layers = []
        self._moves.clear()

    def warm_moves(self) -> None:
        """Prepare `move` in every size that it takes: nothing new is compiled later. Where memory
        does not suffice for a large one, more small ones are made instead."""
        # No more can lie above the number of those in use, and as many free ones below it.
        most = max(self.num_blocks // 2, 1)
        sizes = [size for size in MOVE_SIZES if size // 2 < most] or [MOVE_SIZES[0]]
        for size in sizes:
            self._moves[size] = _BlockLists(size, 2, self._backend)
            try:
                self._move([], [], size)
                self._backend.synchronize()
            except (RuntimeError, MemoryError) as error:
                if size == sizes[0] or not self._backend.is_out_of_memory(error):
                    raise
                del self._moves[size]
                logger.warning("No memory to move %d blocks at once", size)
                break
        logger.info(
            "Decodes read the KV cache as one slice; blocks move down %d at a time",
            max(self._moves),
        )

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Carry the contents of block sources[i] to targets[i], none of which is a source, too;
        after `warm_moves`. The old blocks are zeroed: whatever they held harms no next holder."""
        most = max(self._moves)
        for start in range(0, len(sources), most):
            part = slice(start, start + most)
            size = min(size for size in self._moves if size >= len(sources[part]))
            self._move(sources[part], targets[part], size)

    def _move(self, sources: list[int], targets: list[int], size: int) -> None:
        old, new = self._moves[size].upload(sources, targets, pad_block=self.num_blocks)
        for cache in (cache for pair in self._layers for cache in pair):
            by_block = cache.view(self.num_blocks + 1, -1)
            contents = by_block.index_select(0, old)
            by_block.index_copy_(0, new, contents)
            by_block.index_copy_(0, old, torch.zeros_like(contents))
            # A recipe a cache: all are alike, and hold no more memory than one needs.
            self._backend.mark()

    def warm_scrub(self) -> None:
        """Prepare `scrub`: nothing new is compiled later."""
        self.scrub([self.num_blocks])
        self._backend.synchronize()

    def scrub(self, blocks: list[int]) -> None:
        """Replace what is not a number in `blocks` by zero.

        Attention weighs unused slots by zero, but zero times not-a-number is not a number: a broken
        sequence must not leave any behind for the next holder of its blocks.
        """
        for start in range(0, len(blocks), SCRUBBED):
            part = blocks[start : start + SCRUBBED]
            (index,) = self._scrubbed.upload(part, pad_block=self.num_blocks)
            for cache in (cache for pair in self._layers for cache in pair):
                by_block = cache.view(self.num_blocks + 1, -1)
                clean = torch.nan_to_num(by_block.index_select(0, index), 0.0, 0.0, 0.0)
                by_block.index_copy_(0, index, clean)
                self._backend.mark()

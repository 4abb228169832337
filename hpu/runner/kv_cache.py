"""KVCache: tensors of the KV blocks and of the sliding-window rings, and operations on whole
blocks."""

import itertools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from config.engine import EngineConfig
from config.model.window_cache import CacheSizes, ring_blocks
from hpu.backends.base import Backend
from hpu.models.base import CausalLM
from hpu.offload.block_lists import BlockLists
from hpu.quantization.kv_cache import zero_non_finite

logger = logging.getLogger(__name__)

MOVE_SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Batch sizes of block moves, which are padded up; the sizes of the vendor's defragmenter."""

SCRUB_SIZE = 16
"""Batch size of block scrubs, which are padded up, since every other size would compile another
shape."""


def reads_contiguously(config: EngineConfig, backend: Backend, *, has_states: bool = False) -> bool:
    """Whether decodes read the cache as a single slice from block 0: as configured, by default as
    the back end prefers. Never if blocks are shared, by prefix caching (which models with states
    lack) or by speculation, where rows of a request share blocks."""
    contiguous_pa = config.execution.contiguous_pa
    shares_blocks = config.cache.enable_prefix_caching and not has_states
    if shares_blocks or contiguous_pa is False or config.speculation.choose() is not None:
        return False
    return contiguous_pa is True or backend.reads_contiguously


def block_bytes(model: CausalLM, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block in all layers, including the flags of its tokens."""
    return sum(_layer_bytes(model, block_size, dtype)) + _flag_bytes(model, block_size)


def cache_sizes(model: CausalLM, block_size: int, dtype: torch.dtype, num_rings: int) -> CacheSizes:
    """Bytes of a block, and of `num_rings` (at least 1) sliding-window rings."""
    sees_all = [window is None for window in model.cache_windows()]
    blocks = _layer_bytes(model, block_size, dtype)
    full_block = sum(itertools.compress(blocks, sees_all))
    # The sizes of full-attention layers do not depend on rings, so the difference is the rings.
    with_rings = sum(_layer_bytes(model, block_size, dtype, num_rings))
    sizes = CacheSizes(sum(blocks), full_block, rings=with_rings - full_block)
    return sizes.with_further(_flag_bytes(model, block_size))


def _flag_bytes(model: CausalLM, block_size: int) -> int:
    """Bytes of a block's flags for NonFiniteGuard; 0 for a model without a guard."""
    return 0 if model.non_finite_guard is None else block_size * model.dtype.itemsize


def _layer_bytes(
    model: CausalLM, block_size: int, dtype: torch.dtype, num_rings: int = 0
) -> list[int]:
    """Bytes per layer: of a block, or of all rings if `num_rings` is set and the layer has a
    window."""
    layers = model.cache_shapes(1, block_size, num_rings)
    return [sum(map(math.prod, shapes)) * dtype.itemsize for shapes in layers]


class KVCache:
    """`num_blocks` KV blocks, followed by the pad block (number `num_blocks`). With `num_rings`,
    layers with a sliding window have a ring per request index instead; the last ring is for
    padding."""

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        num_rings: int = 0,
        clean: Callable[[Tensor], Tensor] = zero_non_finite,
    ) -> None:
        """`dtype`: element type of the caches. `clean`: replaces non-finite values in cache rows by
        zero."""
        self._clean = clean
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_rings = num_rings
        self._backend = backend
        self._layers = [
            tuple(backend.zeros(shape, dtype) for shape in shapes)
            for shapes in model.cache_shapes(num_blocks + 1, block_size, num_rings)
        ]
        self._paged: list[Tensor] = []
        """Caches indexed by block."""
        self._rings: list[tuple[int, Tensor]] = []
        """(blocks per ring, cache) of layers with rings."""
        for window, caches in zip(model.cache_windows(), self._layers, strict=True):
            if num_rings and window is not None:
                size = ring_blocks(window, block_size)
                self._rings += [(size, cache) for cache in caches]
            else:
                self._paged += caches
        self._flags: list[Tensor] = []
        """Flags of all token slots for NonFiniteGuard."""
        if model.non_finite_guard is not None:
            self._flags.append(backend.zeros(((num_blocks + 1) * block_size,), model.dtype))
            model.non_finite_guard.bind(self._flags[0], block_size)
        tensors = itertools.chain(self._flags, *self._layers)
        self.bytes = sum(tensor.nbytes for tensor in tensors)
        model.bind_caches(self._layers, block_size, num_rings)
        self._model = model
        self._offsets = torch.arange(block_size, dtype=backend.index_dtype).to(backend.device)
        """(block_size,)"""
        self.pages_ahead = backend.pages_ahead(self._paged, num_blocks + 1)
        self._moves: dict[int, BlockLists] = {}
        self._scrubbed = BlockLists(SCRUB_SIZE, 1, backend)

    @property
    def paged(self) -> list[Tensor]:
        """All tensors indexed by block, (blocks * block_size, ...) each."""
        return [*self._paged, *self._flags]

    def close(self) -> None:
        """Free the memory. The model must not run until another cache is bound."""
        self.pages_ahead.close()
        none = torch.empty(0)
        self._model.bind_caches(
            [tuple(none for _ in caches) for caches in self._layers], self.block_size
        )
        if self._model.non_finite_guard is not None:
            self._model.non_finite_guard.bind(None, self.block_size)
        self._layers = []
        self._paged, self._rings, self._flags = [], [], []
        self._moves.clear()

    def warm_moves(self) -> None:
        """Compile `move_blocks` in every size that occurs. If memory is insufficient for a large
        size, only smaller sizes are used."""
        # At most half of the blocks move: a used block above position num_used moves to a free
        # block below it (see BlockPool.compact).
        most = max(self.num_blocks // 2, 1)
        sizes = [size for size in MOVE_SIZES if size // 2 < most] or [MOVE_SIZES[0]]
        for size in sizes:
            self._moves[size] = BlockLists(size, 2, self._backend)
            try:
                self._move_part([], [], size)
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

    def move_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy block sources[i] to targets[i]; sources and targets must be disjoint. Call
        `warm_moves` first. The sources are zeroed, so that non-finite values cannot reach the next
        request."""
        most = max(self._moves)
        for start in range(0, len(sources), most):
            part = slice(start, start + most)
            size = min(size for size in self._moves if size >= len(sources[part]))
            self._move_part(sources[part], targets[part], size)

    def _move_part(self, sources: list[int], targets: list[int], size: int) -> None:
        old, new = self._moves[size].upload(sources, targets, pad_block=self.num_blocks)
        old, new = self._slots(old), self._slots(new)
        for cache in self.paged:
            # A recipe per cache: the workspace holds the moved blocks of one cache at a time, and
            # caches of equal shapes share a recipe.
            with self._backend.recipe:
                contents = cache.index_select(0, old)
                cache.index_copy_(0, new, contents)
                cache.index_copy_(0, old, torch.zeros_like(contents))

    def warm_scrub(self) -> None:
        """Compile `scrub` and `scrub_rings`."""
        self.scrub([self.num_blocks])
        self.scrub_rings(self.num_rings - 1)
        self._backend.synchronize()

    def scrub(self, blocks: list[int]) -> None:
        """Replace non-finite values in `blocks` by zero.

        Attention gives unused slots the weight zero, and 0 * NaN would leak into the next request
        that uses the blocks.
        """
        self._scrub(self._paged, blocks, self.num_blocks)

    def scrub_rings(self, req_index: int) -> None:
        """Replace non-finite values in the rings of `req_index` by zero."""
        for size, cache in self._rings:
            first = req_index * size
            self._scrub([cache], list(range(first, first + size)), (self.num_rings - 1) * size)

    def _scrub(self, caches: list[Tensor], blocks: list[int], pad_block: int) -> None:
        for start in range(0, len(blocks), SCRUB_SIZE):
            part = blocks[start : start + SCRUB_SIZE]
            (index,) = self._scrubbed.upload(part, pad_block=pad_block)
            slots = self._slots(index)
            for cache in caches:
                with self._backend.recipe:
                    cache.index_copy_(0, slots, self._clean(cache.index_select(0, slots)))

    def _slots(self, blocks: Tensor) -> Tensor:
        """(n * block_size,): slots of `blocks` (n,). Caches are written by slot, because a lazy
        device copies the whole cache when a view of it is written."""
        return (blocks.unsqueeze(1) * self.block_size + self._offsets).view(-1)

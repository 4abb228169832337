"""Interface of a decoder layer's attention."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from config.model.window_cache import ring_blocks
from hpu.layers.metadata import AttentionMetadata
from hpu.ops.kernels import Kernels
from hpu.ops.rope import Rotation
from hpu.quantization.kv_cache import KVCacheFormat

Shape = tuple[int, ...]


class KVCacheSpec(NamedTuple):
    """Cache of a layer on this rank."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    """Maximum tokens that a query sees, including itself; None: all."""
    has_values: bool = True
    """Whether there is a value cache. False for latents: one cache holds keys and values."""
    format: KVCacheFormat | None = None
    """Format of the cache; None: numbers in `dtype`."""
    index_dim: int = 0
    """Size of the index key of each token, in a third cache; 0: no such cache."""

    def shapes(self, num_blocks: int, block_size: int, num_rings: int) -> tuple[Shape, ...]:
        """Shapes of the key and value caches and of the cache of index keys, or of the single cache
        of latents, for `num_blocks` blocks. A layer with a window has `num_rings` rings instead;
        `num_rings` 0: blocks."""
        if num_rings and self.window is not None:
            num_blocks = num_rings * ring_blocks(self.window, block_size)
        shape = (num_blocks * block_size, self.num_kv_heads, self._row_size(self.head_dim))
        shapes = (shape, shape) if self.has_values else (shape,)
        if not self.index_dim:
            return shapes
        return (*shapes, (shape[0], 1, self._row_size(self.index_dim)))

    def _row_size(self, head_dim: int) -> int:
        return head_dim if self.format is None else self.format.row_size(head_dim)


class AttentionLayer(Protocol):
    """Attention with its projections and caches."""

    @property
    def kv_cache_spec(self) -> KVCacheSpec | None:
        """None: the layer shares the keys and values of another layer and has no cache."""
        ...

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        """Store K and V in `format`. Called before the weights are loaded: it may add
        parameters."""
        ...

    def bind_caches(self, *caches: Tensor, block_size: int, num_rings: int = 0) -> None:
        """Use these caches, with the shapes of `kv_cache_spec`. A layer without a spec gets the
        caches of the layer that it shares keys and values with."""
        ...

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool) -> None:
        """Switch to the device's fused kernels."""
        ...

    def zero_non_finite(self, nan: Tensor) -> None:
        """Enable zeroing of non-finite queries, keys and values. `nan`: see NonFiniteGuard."""
        ...

    def __call__(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden)."""
        ...

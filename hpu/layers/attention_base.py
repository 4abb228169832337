"""What a decoder layer's attention must offer, whatever its kind."""

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
    """What one layer caches on this rank."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    """The most tokens that a query sees, its own included; None: all."""
    has_values: bool = True
    """Whether values have a cache beside that of the keys; latents are both."""
    format: KVCacheFormat | None = None
    """None: numbers in `dtype`."""

    def shapes(self, num_blocks: int, block_size: int, num_rings: int) -> tuple[Shape, ...]:
        """Of the key cache and of the value cache, or of the cache of latents: with `num_blocks`
        blocks, or where there is a window with `num_rings` rings, if any."""
        if num_rings and self.window is not None:
            num_blocks = num_rings * ring_blocks(self.window, block_size)
        size = self.head_dim if self.format is None else self.format.row_size(self.head_dim)
        shape = (num_blocks * block_size, self.num_kv_heads, size)
        return (shape, shape) if self.has_values else (shape,)


class AttentionLayer(Protocol):
    """Attention with its projections and caches."""

    @property
    def kv_cache_spec(self) -> KVCacheSpec | None:
        """None: the layer shares keys and values with another one, and has no cache of its own."""
        ...

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        """Cache in `format`. Before the weights are loaded: it may add parameters."""
        ...

    def bind_caches(self, *caches: Tensor, block_size: int, num_rings: int = 0) -> None:
        """Use these caches, of the shapes of `kv_cache_spec`, or of that of the other layer."""
        ...

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool) -> None:
        """Run on a device's fused kernels from now on."""
        ...

    def zero_non_finite(self) -> None:
        """Zero K and V that are not finite from now on."""
        ...

    def __call__(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) to the same."""
        ...

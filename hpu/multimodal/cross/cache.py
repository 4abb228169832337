"""CrossCache: keys and values of encoded images in the cross-attention layers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.layers.cross_attention import CrossAttention
from hpu.multimodal.encoder_cache import EncoderCache

TILE_MASK = "aspect_ratio_mask"
"""Tensor of an image: 1 for each real tile, 0 for the padding after them."""


class CrossCache(EncoderCache):
    """EncoderCache whose rows are tiles, and which stores the layers' keys and values of the
    embeddings."""

    def __init__(
        self,
        num_tiles: int,
        embeddings_per_tile: int,
        layers: list[CrossAttention],
        dtype: torch.dtype,
        backend: Backend,
    ) -> None:
        super().__init__(num_tiles, 0, dtype, backend)
        self._embeddings_per_tile = embeddings_per_tile
        self._layers = layers
        self._num_visible: dict[bytes, int] = {}
        self._num_bytes = 0
        for layer in layers:
            shape = (num_tiles + 1, embeddings_per_tile)
            heads = layer.kv_proj.out_features // (2 * layer.shape.head_dim)
            caches = [backend.zeros((*shape, heads, layer.shape.head_dim), dtype) for _ in range(2)]
            self._num_bytes += sum(cache.nbytes for cache in caches)
            layer.bind(*caches)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def describe(self, content: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Store the number of real tiles of an image."""
        self._num_visible[content] = int(tensors[TILE_MASK].sum())

    def num_visible(self, content: bytes) -> int:
        """Number of real tiles of an image, which come first."""
        return self._num_visible[content]

    def free(self, content: bytes) -> None:
        super().free(content)
        del self._num_visible[content]

    def write(self, rows: Tensor, embeddings: Tensor) -> None:
        """Store the layers' keys and values of `embeddings` (n, embeddings of a tile * hidden)."""
        tiles = embeddings.view(len(embeddings), self._embeddings_per_tile, -1)
        for layer in self._layers:
            layer.write(rows, tiles)

    def close(self) -> None:
        """Free the memory. No image may be read until another cache is bound."""
        for layer in self._layers:
            layer.bind(torch.empty(0), torch.empty(0))

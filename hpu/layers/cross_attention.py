"""Cross attention: text queries over keys and values of images, which a cache holds by tile."""

import torch
from torch import Tensor, nn

from hpu.layers.attention import HeadShape
from hpu.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from hpu.layers.metadata import AttentionMetadata
from hpu.layers.norm import RMSNorm
from hpu.ops.attention import attend
from hpu.ops.rope import Rotation


class CrossAttention(nn.Module):
    """Cross attention of a layer. Parameters are allocated, not filled; the caches are bound
    after loading."""

    def __init__(
        self,
        shape: HeadShape,
        *,
        q_proj: ColumnParallelLinear,
        kv_proj: MergedColumnParallelLinear,
        o_proj: RowParallelLinear,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = q_proj
        self.kv_proj = kv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._keys = self._values = torch.empty(0)

    def bind(self, keys: Tensor, values: Tensor) -> None:
        """Use these caches, (tiles, embeddings per tile, kv_heads, head_dim) each. The last tile is
        padding, which requests with fewer tiles than the launch read behind a mask."""
        self._keys, self._values = keys, values

    def write(self, tiles: Tensor, embeddings: Tensor) -> None:
        """Cache keys and values of `embeddings` (n, embeddings per tile, hidden) as `tiles` (n).
        The padding tile stays zero, because non-finite values would leak into other requests."""
        heads = self.kv_proj(embeddings).view(*embeddings.shape[:2], 2, -1, self.shape.head_dim)
        keys, values = heads.unbind(2)
        is_padding = (tiles == len(self._keys) - 1).view(-1, 1, 1, 1)
        self._keys.index_copy_(0, tiles, self.k_norm(keys).masked_fill(is_padding, 0.0))
        self._values.index_copy_(0, tiles, values.masked_fill(is_padding, 0.0))

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden)."""
        cross, shape = metadata.cross, self.shape
        assert cross is not None, "a launch whose tokens see images names them"
        batch, length, _ = hidden.shape
        query = self.q_norm(self.q_proj(hidden).view(batch, length, -1, shape.head_dim))
        out, _ = attend(
            query.transpose(1, 2),
            _read(self._keys, cross.tiles, batch),
            _read(self._values, cross.tiles, batch),
            scale=shape.scale,
            mask=cross.mask,
        )
        out = out.transpose(1, 2).reshape(batch, length, shape.query_size)
        return self.o_proj(out)  # type: ignore[no-any-return]


def _read(cache: Tensor, tiles: Tensor, batch: int) -> Tensor:
    found = cache.index_select(0, tiles)
    return found.view(batch, -1, *found.shape[2:]).transpose(1, 2)

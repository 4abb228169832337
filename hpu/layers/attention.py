"""Dense attention (MHA, GQA, MQA): projections, and the paged attention core with its caches.

A cache is (blocks * block_size, kv_heads, head_dim), so a slot is a row of it: one index op writes
a launch's keys, and a decode reads a gathered list of blocks, or all blocks up to some number as
one slice.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpu.layers.attention_base import KVCacheSpec
from hpu.layers.linear import QKVParallelLinear, RowParallelLinear
from hpu.layers.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from hpu.layers.norm import QKNorm
from hpu.ops.attention import attend, merge_attention, paged_decode
from hpu.ops.kernels import Kernels
from hpu.ops.rope import Rotation, rotate


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Numbers and size of one rank's heads, and the scale of their scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim


class SelfAttention(nn.Module):
    """One layer's attention: merged projection, norm of heads, rotation, `attn`, projection."""

    def __init__(
        self,
        shape: HeadShape,
        *,
        qkv_proj: QKVParallelLinear,
        o_proj: RowParallelLinear,
        qk_norm: QKNorm | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.qk_norm = nn.Identity() if qk_norm is None else qk_norm
        self.attn = PagedAttention(shape, qkv_proj.dtype, window)
        self._splits_qkv = False
        self._zeroes_non_finite = False

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return self.attn.kv_cache_spec

    def bind_caches(self, keys: Tensor, values: Tensor, block_size: int) -> None:
        self.attn.bind_caches(keys, values, block_size)

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool) -> None:
        """Run on fused kernels from now on; with `split_qkv` as three projections."""
        self.attn.kernels = kernels
        self._splits_qkv = split_qkv

    def zero_non_finite(self) -> None:
        """Zero non-finite Q, K and V from now on: where a matrix product weighs blocks of other
        sequences with zero, 0 * NaN would leak into them. Not needed on plain CPU operations, which
        add each block to its own sequence, unless slices of the cache are read."""
        self._zeroes_non_finite = True

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) to the same; writes K and V of all B * Q tokens where there is a cache.
        Without `rotation` heads are not rotated."""
        shape = self.shape
        batch, length, _ = hidden.shape
        query_key, value = self._project(hidden)
        if self._zeroes_non_finite:
            query_key, value = _finite(query_key), _finite(value)
        query_key = self.qk_norm(query_key)
        if rotation is not None:
            query_key = rotate(query_key, rotation, self.attn.kernels)
        query, key = query_key.split_with_sizes([shape.num_heads, shape.num_kv_heads], dim=2)
        out = self.attn(query, key, value, metadata)
        return self.o_proj(out.reshape(batch, length, shape.query_size))  # type: ignore[no-any-return]

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(queries and keys (B, Q, heads + kv_heads, D), values (B, Q, kv_heads, D))."""
        shape = self.shape
        batch, length, _ = hidden.shape
        if self._splits_qkv:
            query, key, value = self.qkv_proj.forward_split(hidden)
            query_key = torch.cat((query, key), dim=-1).view(batch, length, -1, shape.head_dim)
            return query_key, value.view(batch, length, -1, shape.head_dim)
        heads = self.qkv_proj(hidden).view(batch, length, -1, shape.head_dim)
        query_key, value = heads.split_with_sizes(
            [shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], dim=2
        )
        return query_key, value


class PagedAttention(nn.Module):
    """Attention over a paged KV cache, which is bound after loading."""

    def __init__(self, shape: HeadShape, dtype: torch.dtype, window: int | None) -> None:
        super().__init__()
        self.kv_cache_spec = KVCacheSpec(shape.num_kv_heads, shape.head_dim, dtype, window)
        self.kernels: Kernels | None = None
        self._scale = shape.scale
        self._mask_index = int(window is not None)
        """Into the metadata's masks."""
        self._keys = self._values = torch.empty(0)
        self._block_size = 0

    def bind_caches(self, keys: Tensor, values: Tensor, block_size: int) -> None:
        """Use these caches, each (blocks * block_size, kv_heads, head_dim): flat, because a
        captured graph may write in place to a tensor, but not to a view of it."""
        self._keys, self._values = keys, values
        self._block_size = block_size

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Of keys and values, as bound."""
        return self._keys, self._values

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """`query` (B, Q, heads, D), `key` and `value` (B, Q, kv_heads, D); the output is (B, Q,
        heads, D), for a decode (B, heads, D)."""
        if metadata.slot_mapping is not None:
            self._keys.index_copy_(0, metadata.slot_mapping, key.flatten(0, 1))
            self._values.index_copy_(0, metadata.slot_mapping, value.flatten(0, 1))
        if isinstance(metadata, DecodeMetadata):
            return self._decode(query.flatten(0, 1), metadata)
        return self._prefill(query, key, value, metadata)

    def _decode(self, query: Tensor, metadata: DecodeMetadata) -> Tensor:
        mask = metadata.masks[self._mask_index]
        assert mask is not None
        keys = _read_blocks(self._by_block(self._keys), metadata)
        values = _read_blocks(self._by_block(self._values), metadata)
        if self.kernels is not None:
            return self.kernels.paged_decode(
                query,
                keys,
                values,
                groups=metadata.groups,
                rows=metadata.rows,
                mapping=metadata.mapping,
                mask=mask,
                scale=self._scale,
            )
        return paged_decode(
            query,
            keys,
            values,
            rows=metadata.rows,
            mapping=metadata.mapping,
            mask=mask,
            scale=self._scale,
        )

    def _prefill(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: PrefillMetadata
    ) -> Tensor:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.kernels is not None:
            return self._fused_prefill(self.kernels, query, key, value, metadata)
        mask, scale = metadata.new_masks[self._mask_index], self._scale
        out, log_sum = attend(query, key, value, scale=scale, mask=mask, causal=mask is None)
        context_mask = metadata.context_masks[self._mask_index]
        if context_mask is not None:
            # Two attentions merged, not one over [cached, new]: the new tokens keep the kernel's
            # causal shortcut, and the cached ones need no mask of Q rows.
            context_out, context_log_sum = attend(
                query,
                self._context(self._keys, metadata.block_list, query.shape[0]),
                self._context(self._values, metadata.block_list, query.shape[0]),
                scale=scale,
                mask=context_mask,
            )
            out = merge_attention(out, log_sum, context_out, context_log_sum)
        return out.transpose(1, 2)

    def _fused_prefill(
        self,
        kernels: Kernels,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: PrefillMetadata,
    ) -> Tensor:
        """One attention over [cached, new], which fused kernels need."""
        if metadata.block_list.shape[0]:
            batch = query.shape[0]
            key = torch.cat((self._context(self._keys, metadata.block_list, batch), key), dim=2)
            value = torch.cat(
                (self._context(self._values, metadata.block_list, batch), value), dim=2
            )
        out = kernels.prompt_attention(
            query,
            key,
            value,
            lengths=metadata.query_lens,
            mask=metadata.joint_masks[self._mask_index],
            scale=self._scale,
        )
        return out.transpose(1, 2)

    def _by_block(self, cache: Tensor) -> Tensor:
        """(blocks, block_size, kv_heads, head_dim)."""
        return cache.view(-1, self._block_size, *cache.shape[1:])

    def _context(self, cache: Tensor, block_list: Tensor, batch: int) -> Tensor:
        """(B, kv_heads, C * block_size, head_dim) of the cached context."""
        blocks = self._by_block(cache).index_select(0, block_list)
        return blocks.view(batch, -1, *cache.shape[1:]).transpose(1, 2)


def _read_blocks(cache: Tensor, metadata: DecodeMetadata) -> Tensor:
    """(N, block_size, kv_heads, head_dim): the blocks of a decode."""
    if metadata.block_list is None:
        return cache[: metadata.groups.shape[0]]
    return cache.index_select(0, metadata.block_list)


def _finite(x: Tensor) -> Tensor:
    """`x` with 0 for NaN and infinities."""
    return x.masked_fill(~(x.abs() < math.inf), 0.0)

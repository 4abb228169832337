"""Attention: one layer's cache writes and reads. Knows launches by their plan alone.

Caches are (blocks * block_size, kv_heads, head_dim), so a slot is a row of the cache: one index op
writes a launch's keys, and a decode reads a gathered list of blocks, or all blocks up to
some number as one slice.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpu.layers.linear import Linear
from hpu.layers.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from hpu.ops.attention import attend, join, paged_decode
from hpu.ops.kernels import Kernels
from hpu.ops.norm import rms_norm
from hpu.ops.rope import Rotation, rotate


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How many heads, how wide, and the scale of their products."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class HeadNorm(nn.Module):
    """RMS norm of each query and key head; `weight` (heads + kv_heads, head_dim) repeats the
    queries' weight and the keys', so that both are one product."""

    def __init__(
        self, shape: HeadShape, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        rows = shape.num_heads + shape.num_kv_heads
        weight = torch.empty(rows, shape.head_dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, heads: Tensor) -> Tensor:
        return rms_norm(heads, None, self.eps) * self.weight


class Attention(nn.Module):
    """One layer's attention with its own two caches, which are bound after loading."""

    def __init__(
        self,
        shape: HeadShape,
        *,
        qkv: Linear,
        out: Linear,
        head_norm: HeadNorm | None,
        is_windowed: bool,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = qkv
        self.out = out
        self.head_norm = nn.Identity() if head_norm is None else head_norm
        self._kind = int(is_windowed)
        self._keys = self._values = torch.empty(0)
        self._block_size = 0
        self._kernels: Kernels | None = None
        self._splits = False
        self._isolates = False

    def bind_caches(self, keys: Tensor, values: Tensor, block_size: int) -> None:
        """Take the caches, each (blocks * block_size, kv_heads, head_dim): flat, because a captured
        graph may write to a tensor in place, but not to a view of it."""
        self._keys, self._values = keys, values
        self._block_size = block_size

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Of keys and values, as bound."""
        return self._keys, self._values

    @property
    def is_windowed(self) -> bool:
        """Whether it sees a window of its sequence only."""
        return bool(self._kind)

    def fuse(self, kernels: Kernels, *, split_qkv: bool) -> None:
        """Run on fused kernels from now on; with `split_qkv` as three products."""
        self._kernels = kernels
        self._splits = split_qkv

    def isolate(self) -> None:
        """Let no row's broken numbers reach another row, where products weigh blocks of other rows
        with zero: zero times not-a-number is not a number. Not needed on plain CPU operations,
        which add each block to its own row, unless slices of the cache are read."""
        self._isolates = True

    def forward(self, hidden: Tensor, rotation: Rotation | None, plan: AttentionMetadata) -> Tensor:
        """(B, Q, hidden) to the same; writes the keys and values of all B * Q tokens where a launch
        has a cache. Without `rotation` nothing is turned."""
        shape = self.shape
        batch, length, _ = hidden.shape
        turning, value = self._projected(hidden)
        if self._isolates:
            turning, value = _finite(turning), _finite(value)
        turned = self.head_norm(turning)
        if rotation is not None:
            turned = rotate(turned, rotation, self._kernels)
        query, key = turned.split_with_sizes([shape.num_heads, shape.num_kv_heads], dim=2)
        if plan.slot_mapping is not None:
            self._keys.index_copy_(0, plan.slot_mapping, key.flatten(0, 1))
            self._values.index_copy_(0, plan.slot_mapping, value.flatten(0, 1))
        if isinstance(plan, DecodeMetadata):
            out = self._decode(query.flatten(0, 1), plan)
        else:
            out = self._prefill(query, key, value, plan)
        return self.out(out.reshape(batch, length, shape.query_size))  # type: ignore[no-any-return]

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(queries and keys (B, Q, heads + kv_heads, D), values (B, Q, kv_heads, D))."""
        shape = self.shape
        batch, length, _ = hidden.shape
        if self._splits:
            query, key, value = self.qkv.parts(
                hidden, [shape.query_size, shape.kv_size, shape.kv_size]
            )
            turning = torch.cat((query, key), dim=-1).view(batch, length, -1, shape.head_dim)
            return turning, value.view(batch, length, -1, shape.head_dim)
        heads = self.qkv(hidden).view(batch, length, -1, shape.head_dim)
        turning, value = heads.split_with_sizes(
            [shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], dim=2
        )
        return turning, value

    def _decode(self, query: Tensor, plan: DecodeMetadata) -> Tensor:
        mask = plan.masks[self._kind]
        assert mask is not None
        keys = _blocks(self._by_block(self._keys), plan)
        values = _blocks(self._by_block(self._values), plan)
        if self._kernels is not None:
            return self._kernels.paged_decode(
                query,
                keys,
                values,
                groups=plan.groups,
                rows=plan.rows,
                mapping=plan.mapping,
                mask=mask,
                scale=self.shape.scale,
            )
        return paged_decode(
            query,
            keys,
            values,
            rows=plan.rows,
            mapping=plan.mapping,
            mask=mask,
            scale=self.shape.scale,
        )

    def _prefill(self, query: Tensor, key: Tensor, value: Tensor, plan: PrefillMetadata) -> Tensor:
        query, scale = query.transpose(1, 2), self.shape.scale
        if self._kernels is not None:
            return self._fused_prefill(self._kernels, query, key, value, plan)
        mask = plan.new_masks[self._kind]
        out, log_sum = attend(
            query,
            key.transpose(1, 2),
            value.transpose(1, 2),
            scale=scale,
            mask=mask,
            causal=mask is None,
        )
        context_mask = plan.context_masks[self._kind]
        if context_mask is not None:
            # Two attentions joined, rather than one over [cached, new]: the new tokens keep the
            # kernel's causal shortcut, and no mask of Q rows is needed for the cached ones.
            cached_out, cached_log_sum = attend(
                query,
                self._cached(self._keys, plan.block_list, query.shape[0]),
                self._cached(self._values, plan.block_list, query.shape[0]),
                scale=scale,
                mask=context_mask,
            )
            out = join(out, log_sum, cached_out, cached_log_sum)
        return out.transpose(1, 2)

    def _fused_prefill(
        self, kernels: Kernels, query: Tensor, key: Tensor, value: Tensor, plan: PrefillMetadata
    ) -> Tensor:
        """One attention over [cached, new], as fused kernels want it."""
        keys, values = key.transpose(1, 2), value.transpose(1, 2)
        if plan.block_list.shape[0]:
            batch = query.shape[0]
            keys = torch.cat((self._cached(self._keys, plan.block_list, batch), keys), dim=2)
            values = torch.cat((self._cached(self._values, plan.block_list, batch), values), dim=2)
        out = kernels.prompt_attention(
            query,
            keys,
            values,
            lengths=plan.query_lens,
            mask=plan.joint_masks[self._kind],
            scale=self.shape.scale,
        )
        return out.transpose(1, 2)

    def _by_block(self, cache: Tensor) -> Tensor:
        """(blocks, block_size, kv_heads, head_dim)."""
        return cache.view(-1, self._block_size, *cache.shape[1:])

    def _cached(self, cache: Tensor, block_list: Tensor, batch: int) -> Tensor:
        """(B, kv_heads, C * block_size, head_dim) of the cached context."""
        shape = self.shape
        blocks = self._by_block(cache).index_select(0, block_list)
        return blocks.view(batch, -1, shape.num_kv_heads, shape.head_dim).transpose(1, 2)


def _blocks(cache: Tensor, plan: DecodeMetadata) -> Tensor:
    """(N, block_size, kv_heads, head_dim): what a decode reads of a cache."""
    if plan.block_list is None:
        return cache[: plan.groups.shape[0]]
    return cache.index_select(0, plan.block_list)


def _finite(numbers: Tensor) -> Tensor:
    """`numbers`, with 0 for what is none or infinite."""
    return numbers.masked_fill(~(numbers.abs() < math.inf), 0.0)

"""Kernels: a device's fused operations. The back end gives them to the model (`use_kernels`);
without them it runs on torch's plain operations."""

from typing import Protocol

from torch import Tensor


class KVCacheOps(Protocol):
    """Writes and reads one of a layer's two caches."""

    def __call__(self, input: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
        """Write `input` (tokens, kv_heads, D) to the slots `slot_mapping` (tokens) of `cache`
        (slots, kv_heads, D). Returns the cache."""
        ...

    def fetch_from_cache(self, cache: Tensor, blocks: Tensor | None) -> Tensor:
        """The blocks `blocks` (N), None for all in order, of `cache` (blocks, block_size, kv_heads,
        D)."""
        ...


class AttentionImpl(Protocol):
    """One layer's attention on a device. It runs in static shapes, and may be captured."""

    @property
    def k_cache(self) -> KVCacheOps: ...

    @property
    def v_cache(self) -> KVCacheOps: ...

    def prompt_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor,
        mask: Tensor | None,
        context_mask: Tensor | None = None,
        scale: float,
    ) -> Tensor:
        """Attention of new tokens: `query` (B, heads, Q, D) over `context`, cached keys and values
        (B, kv_heads, C, D) each, and over `key` and `value` (B, kv_heads, Q, D): (B, heads, Q, D).

        Masks are additive. Without `mask` there is no context, and attention is causal over the
        first `lengths` (B) tokens of each row, at least 1; the output behind them is any finite
        number. A fused kernel gets one `mask` (B or 1, 1, Q, C + Q). Plain operations get `mask`
        over the new tokens, None for causality, and `context_mask` (B, 1, 1 or Q, C).
        """
        ...

    def paged_decode(
        self,
        query: Tensor,
        key_blocks: Tensor,
        value_blocks: Tensor,
        *,
        groups: Tensor,
        rows: Tensor,
        mapping: Tensor,
        mask: Tensor,
        scale: float,
    ) -> Tensor:
        """As hpu.ops.attention.paged_decode, with `groups` (N) that are -1 for padding; a fused
        kernel gets `mapping` in the query's dtype."""
        ...


class Kernels(Protocol):
    """All of them run on the tensors' device in static shapes, and may be captured."""

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`hidden` (..., size) scaled to a root mean square of 1, times `weight` (size)."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of `heads` (B, Q, heads, size): x * cos + (-x2, x1) * sin, where x1 and
        x2 are the halves of x, `cos` and `sin` (B, Q, 1, size)."""
        ...

    def make_attention(self) -> AttentionImpl:
        """For one layer."""
        ...

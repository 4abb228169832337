"""Kernels: a device's fused operations. The back end gives them to the model (`use_kernels`);
without them it runs on torch's plain operations."""

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    """All of them run on the tensors' device in static shapes, and may be captured."""

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`hidden` (..., size) scaled to a root mean square of 1, times `weight` (size)."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of `heads` (B, Q, heads, size): x * cos + (-x2, x1) * sin, where x1 and
        x2 are the halves of x, `cos` and `sin` (B, Q, 1, size)."""
        ...

    def prompt_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Attention of new tokens: `query` (B, heads, Q, D) over `key` and `value`
        (B, kv_heads, S, D), giving (B, heads, Q, D).

        Without `mask` S is Q and attention is causal over the first `lengths` (B) tokens of each
        row, at least 1; the output behind them is any finite number. `mask` is additive,
        (B or 1, 1, Q, S), and replaces causality and `lengths`.
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
        """As hpu.ops.attention.paged_decode, with `groups` (N) that are -1 for padding, and
        `mapping` in the query's dtype."""
        ...

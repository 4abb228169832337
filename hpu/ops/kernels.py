"""Kernels: fused operations that a device brings, in the place of the plain ones. A model is given
them by its back end; without any it runs on plain operations."""

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    """All work on the tensors' own device, in static shapes, and may be captured."""

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`hidden` (..., size) scaled to a root mean square of 1, times `weight` (size)."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`heads` (B, Q, heads, size) turned by halves: x * cos + (-x2, x1) * sin, where `cos` and
        `sin` are (B, Q, 1, size)."""
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
        row, at least 1; what comes out behind them is any finite number. `mask` is additive,
        (B or 1, 1, Q, S), and says all.
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

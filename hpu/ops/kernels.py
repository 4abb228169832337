"""Kernels: a device's fused operations. The back end gives them to the model (`use_kernels`);
without them it runs on torch's plain operations."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from config.model.decoder_spec import ClampedSwiGLU


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


class SliceSizes(NamedTuple):
    """When and how attention of a prompt over cached context runs in slices."""

    threshold: int
    """Cached and new tokens of a row, padding included, from which on it does."""
    size: int
    """Tokens of a slice of the queries and of the keys."""


class AttentionForm(NamedTuple):
    """What the layers of a launch share, as a device's kernels take it."""

    prompt_dtype: torch.dtype
    """Of the masks of prompts."""
    score_dtype: torch.dtype
    """Of the masks of decodes: that of the scores."""
    mapping_dtype: torch.dtype
    """Of the mapping of blocks to rows."""
    knows_causality: bool = True
    """Whether a prompt without cached context and without a window needs no mask."""
    slices: SliceSizes | None = None
    """None: never."""


class ScoreOptions(NamedTuple):
    """What a layer does with its scores besides scale and mask."""

    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap), before the mask is added."""
    sinks: Tensor | None = None
    """(heads): a logit of each head that joins the softmax, and has no value."""

    @property
    def are_plain(self) -> bool:
        return self.soft_cap is None and self.sinks is None


PLAIN_SCORES = ScoreOptions()


class ContextSlice(NamedTuple):
    """Consecutive cached tokens of each row, read from the cache by each layer."""

    blocks: Tensor
    """(B * blocks of a slice)"""
    mask: Tensor
    """(B, 1, 1, tokens of a slice), additive."""


class PromptOperands(NamedTuple):
    """Attention of `Q` new tokens over themselves and `C` cached ones. Masks are additive."""

    query: Tensor
    """(B, heads, Q, D)"""
    key: Tensor
    """(B, kv_heads, Q, D)"""
    value: Tensor
    """As `key`."""
    lengths: Tensor
    """(B): new tokens of each row, padding excluded, at least 1; the output behind them is any
    finite number."""
    mask: Tensor | None
    """Over the new tokens, for a fused kernel over cached and new tokens, (B or 1, 1 or heads, Q,
    C + Q); with `slices` over the tokens of one slice of the new ones, (1, 1, size, size). None:
    causal, for a fused kernel without context."""
    context: tuple[Tensor, Tensor] | None = None
    """Cached keys and values, (B, kv_heads, C, D) each."""
    context_mask: Tensor | None = None
    """(B, 1 or heads, 1 or Q, C), but not for a fused kernel."""
    slices: tuple[ContextSlice, ...] = ()
    """In place of `context` where attention runs in slices."""
    read: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """Cached keys and values, (B, kv_heads, tokens, D) each, of the blocks of a slice."""

    def joined(self) -> tuple[Tensor, Tensor]:
        """Cached and new keys, and values: (B, kv_heads, C + Q, D) each."""
        if self.context is None:
            return self.key, self.value
        keys, values = self.context
        return torch.cat((keys, self.key), dim=2), torch.cat((values, self.value), dim=2)


class DecodeOperands(NamedTuple):
    """Attention of one token of each sequence over a flat list of all sequences' blocks."""

    query: Tensor
    """(B, heads, D)"""
    keys: Tensor
    """(N, block_size, kv_heads, D)"""
    values: Tensor
    """As `keys`."""
    groups: Tensor
    """(N): batch index of each block, -1 for padding."""
    rows: Tensor
    """(N) int64: batch index of each block, any for padding."""
    block_mapping: Tensor
    """(N, B): 1 where the block belongs to the batch index, in the form's mapping_dtype."""
    mapping: Tensor
    """(B, N): the same, transposed."""
    sum_mapping: Tensor
    """As `mapping`, float32."""
    mask: Tensor
    """(N, 1 or heads, 1, block_size), additive: masked everywhere for padding."""
    value_size: int | None = None
    """Leading entries of `values`, and of the output, that count: where latents are keys and
    values, the others are keys alone. None: all."""


class AttentionImpl(Protocol):
    """One layer's attention on a device. It runs in static shapes, and may be captured."""

    @property
    def k_cache(self) -> KVCacheOps: ...

    @property
    def v_cache(self) -> KVCacheOps: ...

    @property
    def latent_cache_k(self) -> KVCacheOps:
        """In place of both, if it was made for latents."""
        ...

    def prompt_attention(
        self, operands: PromptOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        """(B, heads, Q, D)"""
        ...

    def paged_decode(
        self, operands: DecodeOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        """(B, heads, D or value_size)"""
        ...


class ExpertWeights(NamedTuple):
    """Of a layer's stacked gated MLPs."""

    w13: Tensor
    """(experts, 2 * inner, hidden): gate before up, or interleaved for a ClampedSwiGLU."""
    w2: Tensor
    """(experts, hidden, inner)"""
    w13_bias: Tensor | None = None
    """(experts, 2 * inner), likewise."""
    w2_bias: Tensor | None = None
    """(experts, hidden). None if there are no biases."""
    first: int = 0
    """Id of the first one: other ranks may have those before and behind."""


class MoEImpl(Protocol):
    """One layer's routed experts on a device. It runs in static shapes, and may be captured."""

    def __call__(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        permuted_weights: bool,
        activation: str,
    ) -> Tensor:
        """The sum of the experts `expert_routing_table` (T, k) int64 of each token of
        `hidden_states` (T, hidden), weighted by `router_weights` (T, k) in the same dtype: (T,
        hidden). Experts that are not among the weights add nothing. `permuted_weights`: whether the
        weights are (out, in), as given to `make_moe`; `activation`: as there. The FP8 compressor
        replaces the object, and needs both."""
        ...


class Kernels(Protocol):
    """All of them run on the tensors' device in static shapes, and may be captured."""

    def attention_form(
        self, dtype: torch.dtype, *, has_score_options: bool = False
    ) -> AttentionForm:
        """For a model of this dtype, whose layers have ScoreOptions or not."""
        ...

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`hidden` (..., size) scaled to a root mean square of 1, times `weight` (size)."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of `heads` (B, Q, heads, size): x * cos + (-x2, x1) * sin, where x1 and
        x2 are the halves of x, `cos` and `sin` (B, Q, 1, size)."""
        ...

    def make_attention(self, *, latent: bool = False) -> AttentionImpl:
        """For one layer; `latent`: its one cache holds latents."""
        ...

    def make_moe(self, weights: ExpertWeights, activation: str | ClampedSwiGLU) -> MoEImpl | None:
        """For the experts of one layer, with the activation that a checkpoint calls `activation`,
        or a clamped one. None where there is no kernel for them."""
        ...

"""Kernels: the fused operations of a device. The back end passes them to the model
(`use_kernels`); a model without kernels runs on plain torch operations."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from config.model.decoder_spec import ClampedSwiGLU


class KVCacheOps(Protocol):
    """Writes and reads a single cache of a layer: keys, values, latents, or index keys."""

    def __call__(self, input: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
        """Write `input` (tokens, kv_heads, D) to the slots `slot_mapping` (tokens) of `cache`
        (slots, kv_heads, D). Returns the cache."""
        ...

    def fetch_from_cache(self, cache: Tensor, blocks: Tensor | None) -> Tensor:
        """Blocks `blocks` (N) of `cache` (blocks, block_size, kv_heads, D); None: all blocks in
        order."""
        ...


class SliceSizes(NamedTuple):
    """Sizes for sliced attention of a prompt over cached context."""

    threshold: int
    """Minimum cached and new tokens of a row, padding included, for sliced attention."""
    size: int
    """Tokens per slice of the queries and of the keys."""


class AttentionForm(NamedTuple):
    """Format in which a device's kernels expect the inputs that the layers of a launch share."""

    prompt_dtype: torch.dtype
    """Dtype of prompt masks."""
    score_dtype: torch.dtype
    """Dtype of decode masks, equal to the dtype of the scores."""
    mapping_dtype: torch.dtype
    """Dtype of the mapping of blocks to sequences."""
    knows_causality: bool = True
    """Whether a prompt without cached context and without a window needs no mask."""
    slices: SliceSizes | None = None
    """Sizes for sliced attention; None: prompts are never sliced."""


class ScoreOptions(NamedTuple):
    """Options of attention scores besides scale and mask."""

    soft_cap: float | None = None
    """Soft cap: scores become soft_cap * tanh(score / soft_cap) before the mask is added."""
    sinks: Tensor | None = None
    """(heads): attention sink, a logit per head that joins the softmax and has no value."""

    @property
    def are_plain(self) -> bool:
        return self.soft_cap is None and self.sinks is None


PLAIN_SCORES = ScoreOptions()


class ContextSlice(NamedTuple):
    """Slice of the cached context: consecutive cached tokens of each row."""

    blocks: Tensor
    """(B * blocks per slice): block ids."""
    mask: Tensor
    """(B, 1, 1, tokens per slice), additive."""


class PromptOperands(NamedTuple):
    """Inputs for attention of `Q` new tokens over themselves and `C` cached tokens. Masks are
    additive."""

    query: Tensor
    """(B, heads, Q, D)"""
    key: Tensor
    """(B, kv_heads, Q, D)"""
    value: Tensor
    """(B, kv_heads, Q, D)"""
    lengths: Tensor
    """(B), or (S) for packed sequences: new tokens without padding, at least 1. The output of
    padding is arbitrary but finite."""
    mask: Tensor | None
    """Mask over the new tokens. For a fused kernel: over cached and new tokens, (B or 1, 1 or
    heads, Q, C + Q). With `slices`: over the new tokens of a slice, (1, 1, size, size). None:
    causal (for a fused kernel: causal without context)."""
    context: tuple[Tensor, Tensor] | None = None
    """Cached keys and values, (B, kv_heads, C, D) each."""
    context_mask: Tensor | None = None
    """(B, 1 or heads, 1 or Q, C); None for a fused kernel."""
    slices: tuple[ContextSlice, ...] = ()
    """Slices of the context, in place of `context`."""
    read: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """Function from the blocks of a slice to cached keys and values, (B, kv_heads, tokens, D)
    each."""

    def joined(self) -> tuple[Tensor, Tensor]:
        """Cached and new keys, and cached and new values: (B, kv_heads, C + Q, D) each."""
        if self.context is None:
            return self.key, self.value
        keys, values = self.context
        return torch.cat((keys, self.key), dim=2), torch.cat((values, self.value), dim=2)


class DecodeOperands(NamedTuple):
    """Inputs for attention of a token per sequence over a flat list of all sequences' blocks."""

    query: Tensor
    """(B, heads, D)"""
    keys: Tensor
    """(N, block_size, kv_heads, D)"""
    values: Tensor
    """(N, block_size, kv_heads, D)"""
    groups: Tensor
    """(N): batch index of each block, -1 for padding."""
    rows: Tensor
    """(N) int64: batch index of each block; any index for padding."""
    block_mapping: Tensor
    """(N, B) in the form's mapping_dtype: 1 where the block belongs to the sequence."""
    mapping: Tensor
    """(B, N): transpose of `block_mapping`."""
    sum_mapping: Tensor
    """(B, N): `mapping` in float32."""
    mask: Tensor
    """(N, 1 or heads, 1, block_size), additive; masked everywhere for padding."""
    value_size: int | None = None
    """Leading entries of `values`, and of the output, that are used. Latents are keys and
    values: their remaining entries are keys only. None: all entries."""


class AttentionImpl(Protocol):
    """Attention of a layer on a device. Runs in static shapes and can be captured."""

    @property
    def k_cache(self) -> KVCacheOps: ...

    @property
    def v_cache(self) -> KVCacheOps: ...

    @property
    def latent_cache_k(self) -> KVCacheOps:
        """Cache operations for latents, in place of `k_cache` and `v_cache`."""
        ...

    def prompt_attention(
        self, operands: PromptOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        """Prompt attention: (B, heads, Q, D)."""
        ...

    def paged_decode(
        self, operands: DecodeOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        """Decode attention: (B, heads, D or value_size)."""
        ...


class ExpertWeights(NamedTuple):
    """Weights of the stacked gated MLPs of a layer."""

    w13: Tensor
    """(experts, 2 * inner, hidden): gate before up, or interleaved (see ClampedSwiGLU)."""
    w2: Tensor
    """(experts, hidden, inner)"""
    w13_bias: Tensor | None = None
    """(experts, 2 * inner), in the order of `w13`."""
    w2_bias: Tensor | None = None
    """(experts, hidden). None: the experts have no biases."""
    first: int = 0
    """Id of the first expert; other ranks may hold other experts."""


class MoEImpl(Protocol):
    """Routed experts of a layer on a device. Runs in static shapes and can be captured."""

    def __call__(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        permuted_weights: bool,
        activation: str,
    ) -> Tensor:
        """Weighted sum of the experts `expert_routing_table` (T, k) int64 of each token of
        `hidden_states` (T, hidden), with `router_weights` (T, k) in the same dtype: (T, hidden).
        Experts outside the weights add nothing. `permuted_weights`: whether the weights given to
        `make_moe` are (out, in). `activation`: the activation given to `make_moe`. The FP8
        compressor replaces the object and needs both arguments."""
        ...


class Kernels(Protocol):
    """Fused operations of a device. They run on the tensors' device in static shapes and can be
    captured."""

    def attention_form(
        self, dtype: torch.dtype, *, has_score_options: bool = False
    ) -> AttentionForm:
        """Form of the shared attention inputs for a model of `dtype`; `has_score_options`: whether
        layers have ScoreOptions."""
        ...

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of `hidden` (..., size), times `weight` (size)."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of `heads` (B, Q, heads, size): x * cos + (-x2, x1) * sin, where x1
        and x2 are the halves of x; `cos` and `sin` (B, Q, 1, size)."""
        ...

    def make_attention(self, *, latent: bool = False) -> AttentionImpl:
        """Attention of a layer; `latent`: its single cache holds latents."""
        ...

    def make_moe(self, weights: ExpertWeights, activation: str | ClampedSwiGLU) -> MoEImpl | None:
        """Routed experts of a layer, with a checkpoint's `activation` name or a clamped SwiGLU.
        None: the device has no kernel for these experts."""
        ...

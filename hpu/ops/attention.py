"""Attention in torch operations, such as softmax attention with its log-sum-exp, merging of
attention results, and flat paged decode.

Masks are additive, MASKED where a key is not visible; the operations of this file expect float32
masks. MASKED is finite, so that a row without a visible key has a finite output of weight 0 instead
of NaN. In float16 MASKED is minus infinity: a finite float16 mask would leave weight to hidden keys
with large scores.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hpu.ops.kernels import PLAIN_SCORES, DecodeOperands, PromptOperands, ScoreOptions

MASKED = -1e30
CAPPED_ROWS = 256
"""Queries per step on a CPU with a soft cap, for which torch has no fused kernel; limits the memory
of float32 scores."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of `query` (B, heads, Q, D) over `key` and `value` (B, kv_heads, S, D).

    Returns the output (B, heads, Q, D) and the log-sum-exp of the scores (B, heads, Q) float32.
    `mask` is float32 (B or 1, H, Q or 1, S), where H is 1, kv_heads or heads; `causal` needs Q == S
    and no mask. `soft_cap`: see ScoreOptions. Statistics are float32 for every dtype.
    """
    if query.device.type != "cpu":
        return attend_unfused(
            query, key, value, scale=scale, mask=mask, causal=causal, soft_cap=soft_cap
        )
    if soft_cap is not None:
        return _attend_by_rows(query, key, value, scale, mask, causal=causal, soft_cap=soft_cap)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not _flash_supports_gqa():
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if isinstance(mask, Tensor) and mask.shape[1] not in (1, query.shape[1]):
        mask = mask.repeat_interleave(groups, 1)
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, log_sum


def _attend_by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    *,
    causal: bool,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """`attend_unfused` in steps of CAPPED_ROWS queries; causal steps read only visible keys."""
    outs, sums = [], []
    for start in range(0, query.shape[2], CAPPED_ROWS):
        rows = query[:, :, start : start + CAPPED_ROWS]
        span, seen = key.shape[2], mask
        if causal:
            span = start + rows.shape[2]
            visible = torch.arange(span) <= torch.arange(start, span).unsqueeze(1)
            seen = as_mask(visible).view(1, 1, *visible.shape)
        elif mask is not None and mask.shape[2] > 1:
            seen = mask[:, :, start : start + CAPPED_ROWS]
        out, log_sum = attend_unfused(
            rows, key[:, :, :span], value[:, :, :span], scale=scale, mask=seen, soft_cap=soft_cap
        )
        outs.append(out)
        sums.append(log_sum)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def attend_unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` as matmuls and a softmax, for devices other than the CPU and for soft caps."""
    batch, heads, length, size = query.shape
    kv_heads, span = key.shape[1], key.shape[2]
    folded = query.reshape(batch, kv_heads, heads // kv_heads, length, size).flatten(2, 3)
    if query.dtype == torch.float16:
        # The product would overflow in float16.
        folded, key = folded.float(), key.float()
    scores = (folded @ key.transpose(-1, -2)).float() * scale
    scores = scores.view(batch, kv_heads, -1, length, span)
    if soft_cap is not None:
        scores = soft_capped(scores, soft_cap)
    if causal:
        mask = causal_mask(length, None, query.device)
    if mask is not None:
        scores = scores + by_kv_head(mask, kv_heads)
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1)).to(value.dtype).flatten(2, 3)
    out = (weights @ value).view(batch, heads, length, size)
    return out, log_sum.view(batch, heads, length)


def soft_capped(scores: Tensor, soft_cap: float) -> Tensor:
    """Squash scores into (-soft_cap, soft_cap); nearly linear around 0."""
    return torch.tanh(scores / soft_cap) * soft_cap


def by_kv_head(mask: Tensor, kv_heads: int) -> Tensor:
    """Reshape `mask` (B, H, Q, S), where H is 1, kv_heads or heads, for scores (B, kv_heads, heads
    / kv_heads, Q, S)."""
    if mask.shape[1] == 1:
        return mask.unsqueeze(2)
    return mask.view(mask.shape[0], kv_heads, -1, *mask.shape[2:])


def with_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor | None) -> Tensor:
    """Add attention sinks to a result of `attend`: `out` (B, heads, Q, D), `log_sum` (B, heads, Q).
    `sinks` (heads) add to the denominator of the softmax and have no value."""
    if sinks is None:
        return out
    share = torch.sigmoid(log_sum - sinks.float().view(1, -1, 1))
    return (out * share.unsqueeze(-1)).to(out.dtype)


@functools.cache
def _flash_supports_gqa() -> bool:
    """Whether the fused CPU kernel supports fewer key heads than query heads (GQA).

    Kernels of older torch releases read past the end of the keys. The probe passes a view that
    is followed by a second head, so that such a kernel reads memory of the same tensor.
    """
    backing = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 1, 16).contiguous()
    try:
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            backing, backing[:, :1], backing[:, :1], 0.0, False
        )
    except RuntimeError:
        return False
    return bool((out == 1.0).all())


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Causal mask (1, 1, length, length): a token sees itself and earlier tokens, `window`
    tokens at most."""
    positions = torch.arange(length, device=device)
    distance = positions.unsqueeze(1) - positions
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    return as_mask(visible).view(1, 1, length, length)


def as_mask(visible: Tensor) -> Tensor:
    """Additive float32 mask: 0 where `visible`, MASKED elsewhere."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, MASKED)


class AttentionPart(NamedTuple):
    """Attention over a subset of the keys, with the statistics to merge it with attention over
    other keys. Float32."""

    out: Tensor
    """(B, heads, Q, D)"""
    highest: Tensor
    """(B, heads, Q, 1): reference of the exponentials, usually the largest score."""
    total: Tensor
    """(B, heads, Q, 1): sum of the exponentials."""


def merge_parts(part: AttentionPart, other: AttentionPart) -> AttentionPart:
    """Attention over the keys of both parts."""
    highest = torch.maximum(part.highest, other.highest)
    weight = part.total * torch.exp(part.highest - highest)
    other_weight = other.total * torch.exp(other.highest - highest)
    total = weight + other_weight
    out = (part.out * weight + other.out * other_weight) / total
    return AttentionPart(out, highest, total)


def merge_attention(
    out: Tensor, log_sum: Tensor, other_out: Tensor, other_log_sum: Tensor
) -> Tensor:
    """Merge attention over two sets of keys. Both inputs are results of `attend`; the outputs
    (B, heads, Q, D) are averaged with the exponential sums as weights."""
    other_weight = torch.sigmoid(other_log_sum - log_sum).unsqueeze(-1)
    return (out + (other_out - out) * other_weight).to(out.dtype)


def paged_decode(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    *,
    rows: Tensor,
    mapping: Tensor,
    mask: Tensor,
    scale: float,
    options: ScoreOptions = PLAIN_SCORES,
) -> Tensor:
    """Flat paged decode: attention of a token per sequence over a list of all sequences' blocks.
    Returns (B, heads, D).

    `query` (B, heads, D); `key_blocks`, `value_blocks` (N, block_size, kv_heads, D), gathered;
    `rows` (N) int64, batch index of each block (any for padding); `mapping` (B, N) float32, 1 where
    the block belongs to the batch index; `mask` (N, H, 1, block_size), where H is 1, kv_heads or
    heads, all MASKED for padding.

    With B = 1 all blocks belong to a single sequence. Otherwise each block gets its own softmax,
    and the outputs of the blocks of a sequence are weighted by their exponential sums relative to
    the largest log-sum-exp of the sequence, so that its scale does not depend on other sequences.
    The cost grows with N.
    """
    batch, heads, size = query.shape
    count, kv_heads = key_blocks.shape[0], key_blocks.shape[2]
    # Query heads that share a key head are folded into the query dimension: no key is repeated.
    if mask.shape[1] > 1:
        mask = mask.view(count, kv_heads, -1, mask.shape[-1])
    if batch == 1:
        whole = mask.permute(1, 2, 0, 3).reshape(1, *mask.shape[1:3], -1)
        out, log_sum = attend(
            query.view(1, kv_heads, heads // kv_heads, size),
            key_blocks.flatten(0, 1).unsqueeze(0).transpose(1, 2),
            value_blocks.flatten(0, 1).unsqueeze(0).transpose(1, 2),
            scale=scale,
            mask=whole,
            soft_cap=options.soft_cap,
        )
        out = out.reshape(1, heads, 1, size)
        return with_sinks(out, log_sum.reshape(1, heads, 1), options.sinks).view(1, heads, size)
    per_block = query.view(batch, -1).index_select(0, rows)
    out, log_sum = attend(
        per_block.view(count, kv_heads, heads // kv_heads, size),
        key_blocks.transpose(1, 2),
        value_blocks.transpose(1, 2),
        scale=scale,
        mask=mask,
        soft_cap=options.soft_cap,
    )
    log_sum = log_sum.reshape(count, heads)
    highest = torch.full((batch, heads), MASKED, device=query.device)
    highest = highest.scatter_reduce(0, rows.unsqueeze(1).expand(count, heads), log_sum, "amax")
    weights = torch.exp(log_sum - highest.index_select(0, rows))
    weighted = out.reshape(count, heads, size) * weights.unsqueeze(-1)
    flat = weighted.view(count, heads * size)
    if query.device.type == "cpu":
        # index_add_ adds each block to its own sequence, in order: NaN does not spread to other
        # sequences, and for many blocks it takes less than half the time of the matmul.
        sums = torch.zeros(batch, heads).index_add_(0, rows, weights)
        total = torch.zeros(batch, heads * size).index_add_(0, rows, flat.float())
    else:
        # index_add_ has no fixed order on other devices.
        sums, total = mapping @ weights, mapping @ flat
    if options.sinks is not None:
        sums = sums + torch.exp(options.sinks.float() - highest)
    # The sums of a row without a block are 0: avoid 0 / 0.
    sums = sums.clamp_min(1e-30).unsqueeze(-1)
    return (total.view(batch, heads, size) / sums).to(query.dtype)


class PlainKVCacheOps:
    """KVCacheOps with plain operations."""

    def __call__(self, input: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
        return cache.index_copy_(0, slot_mapping, input)

    def fetch_from_cache(self, cache: Tensor, blocks: Tensor | None) -> Tensor:
        return cache if blocks is None else cache.index_select(0, blocks)


class PlainAttention:
    """AttentionImpl with plain operations, for any device."""

    def __init__(self) -> None:
        self.k_cache = self.v_cache = self.latent_cache_k = PlainKVCacheOps()

    def prompt_attention(
        self, operands: PromptOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        query, mask, soft_cap = operands.query, operands.mask, options.soft_cap
        out, log_sum = attend(
            query,
            operands.key,
            operands.value,
            scale=scale,
            mask=mask,
            causal=mask is None,
            soft_cap=soft_cap,
        )
        if operands.context is None:
            return with_sinks(out, log_sum, options.sinks)
        # Merge two results instead of attention over [cached, new]: the new tokens keep the
        # kernel's causal shortcut, and the cached tokens need no mask with Q rows.
        cached = attend(
            query, *operands.context, scale=scale, mask=operands.context_mask, soft_cap=soft_cap
        )
        merged = merge_attention(out, log_sum, *cached)
        if options.sinks is None:
            return merged
        return with_sinks(merged, torch.logaddexp(log_sum, cached[1]), options.sinks)

    def paged_decode(
        self, operands: DecodeOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        # Attend to whole latents and cut the outputs: the fused kernel requires values of the size
        # of the keys, and a copy of the values would cost another read and write.
        out = paged_decode(
            operands.query,
            operands.keys,
            operands.values,
            rows=operands.rows,
            mapping=operands.mapping,
            mask=operands.mask,
            scale=scale,
            options=options,
        )
        return out[..., : operands.value_size]

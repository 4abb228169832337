"""Attention over tensors: one softmax attention that also tells its log-sum-exp, and what is built
of it (prompts over cached context, flat paged decode). Knows no layers, and no launches.

GrammarMasks are additive float32 with MASKED for what may not be seen: finite, so that a row which
sees
nothing gives a number that weighs nothing instead of not-a-number.
"""

import functools

import torch
from torch import Tensor

MASKED = -1e30


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of `query` (B, heads, Q, D) over `key` and `value` (B, kv_heads, S, D).

    Returns the output (B, heads, Q, D) and the log of each softmax's sum (B, heads, Q) in float32.
    `mask` is float32, (B or 1, 1, Q or 1, S); `causal` needs Q == S and no mask. Statistics are
    float32 whatever the dtype.
    """
    if query.device.type != "cpu":
        return attend_plainly(query, key, value, scale=scale, mask=mask, causal=causal)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not _flash_shares_heads():
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, log_sum


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attend` in products and exponentials, for devices without the fused kernel of the CPU."""
    batch, heads, length, size = query.shape
    kv_heads, span = key.shape[1], key.shape[2]
    folded = query.reshape(batch, kv_heads, heads // kv_heads, length, size).flatten(2, 3)
    scores = (folded @ key.transpose(-1, -2)).float() * scale
    scores = scores.view(batch, kv_heads, -1, length, span)
    if causal:
        mask = causal_mask(length, None, query.device)
    if mask is not None:
        scores = scores + mask.unsqueeze(2)
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1)).to(value.dtype).flatten(2, 3)
    out = (weights @ value).view(batch, heads, length, size)
    return out, log_sum.view(batch, heads, length)


@functools.cache
def _flash_shares_heads() -> bool:
    """Whether the CPU's fused kernel lets several query heads share one of the keys.

    Older ones would read past the end: asked here on a tensor that has a second head behind the
    first, so that the wrong answer is read from memory of our own.
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
    """(1, 1, length, length): a token sees itself and what came before, `window` tokens in all."""
    positions = torch.arange(length, device=device)
    distance = positions.unsqueeze(1) - positions
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    return as_mask(seen).view(1, 1, length, length)


def as_mask(seen: Tensor) -> Tensor:
    """Additive float32 mask: 0 where `seen`, MASKED elsewhere."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, MASKED)


def join(out: Tensor, log_sum: Tensor, other_out: Tensor, other_log_sum: Tensor) -> Tensor:
    """Attention over two sets of keys, from that over each: their mean, weighed by the sums."""
    share = torch.sigmoid(other_log_sum - log_sum).unsqueeze(-1)
    return (out + (other_out - out) * share).to(out.dtype)


def paged_decode(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    *,
    rows: Tensor,
    mapping: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """One token a row over the blocks all rows hold, as a flat list: (B, heads, D).

    `query` (B, heads, D); `key_blocks`, `value_blocks` (N, block_size, kv_heads, D), gathered;
    `rows` (N) int64, the row each block belongs to (any row for padding); `mapping` (B, N) float32,
    1 where the block is the row's; `mask` (N, 1, 1, block_size), all MASKED for padding.

    A lone row's blocks are one sequence. Otherwise each block has a softmax of its own, and a row's
    blocks are then weighed by their sums, relative to the largest of that row, so that no row's
    scale depends on its neighbours. Cost follows N.
    """
    batch, heads, size = query.shape
    count, kv_heads = key_blocks.shape[0], key_blocks.shape[2]
    if batch == 1:
        out, _ = attend(
            query.view(1, kv_heads, heads // kv_heads, size),
            key_blocks.flatten(0, 1).unsqueeze(0).transpose(1, 2),
            value_blocks.flatten(0, 1).unsqueeze(0).transpose(1, 2),
            scale=scale,
            mask=mask.view(1, 1, 1, -1),
        )
        return out.reshape(1, heads, size)
    # The query heads that share a key head stand as "tokens" of that head: nothing is repeated.
    per_block = query.view(batch, -1).index_select(0, rows)
    out, log_sum = attend(
        per_block.view(count, kv_heads, heads // kv_heads, size),
        key_blocks.transpose(1, 2),
        value_blocks.transpose(1, 2),
        scale=scale,
        mask=mask,
    )
    log_sum = log_sum.reshape(count, heads)
    highest = torch.full((batch, heads), MASKED, device=query.device)
    highest = highest.scatter_reduce(0, rows.unsqueeze(1).expand(count, heads), log_sum, "amax")
    weights = torch.exp(log_sum - highest.index_select(0, rows))
    weighed = out.reshape(count, heads, size) * weights.unsqueeze(-1)
    flat = weighed.view(count, heads * size)
    if query.device.type == "cpu":
        # Adds each block to its own row, in order: a row that is not a number stays alone, and
        # many blocks take less than half the time of the product.
        sums = torch.zeros(batch, heads).index_add_(0, rows, weights)
        total = torch.zeros(batch, heads * size).index_add_(0, rows, flat.float())
    else:
        # Elsewhere such additions come in any order.
        sums, total = mapping @ weights, mapping @ flat
    # A padded row holds no block and its sum is 0: 0 over anything but 0 stays 0.
    sums = sums.clamp_min(1e-30).unsqueeze(-1)
    return (total.view(batch, heads, size) / sums).to(query.dtype)

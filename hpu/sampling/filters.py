"""Argmax, the filters min_p, top_k and top_p as thresholds on weights, and sampling by inverse CDF.

Weights are rows of non-negative numbers, whose sum need not be 1. A row's result depends only on
this row, bit for bit: sums over a row are computed in fixed chunks, because a reduction may split a
single row among threads but not several rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

TINY = 2.0**-100
"""Threshold of rows without a filter. A power of two, so that division by it is exact."""

CHUNK = 256
PIECE_BYTES = 1 << 19
"""Bytes of scores per pass; `argmax` reads them twice, so they must fit in a core's cache."""
_INTEGERS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
"""Integer type of equal width, and the bit pattern of infinity."""
_JUST_BELOW_ONE = 1.0 - 2.0**-24
MAX_SORTED = 4096
"""Number of tokens sorted in the first attempt to find a nucleus."""

Ties = Callable[[Tensor, Tensor, int], Tensor]
"""Maps weights (B, V), `top_k` (B, 1) and a size that is at least every top_k to weights (B, V). A
top_k of 0 keeps all tokens of its row."""


class Argmax(NamedTuple):
    """Largest score (B, 1) of each row, and the first token (B, 1) int64 with this score."""

    values: Tensor
    tokens: Tensor


def argmax(scores: Tensor) -> Argmax:
    """Argmax of scores (B, V): `first_argmax`, except on a CPU, where it equals torch's `max`, also
    for NaN. There the bits of supported types are compared as integers, whose order is correct for
    positive floats; numpy vectorizes this, including the indices."""
    if scores.device.type != "cpu":
        return first_argmax(scores)
    if scores.dtype not in _INTEGERS:
        return Argmax(*scores.max(dim=-1, keepdim=True))
    integers, infinity = _INTEGERS[scores.dtype]
    signed = scores.view(integers).numpy()
    bits = signed.view(f"u{signed.itemsize}")
    rows, vocab_size = signed.shape
    tokens = np.empty(rows, np.int64)
    most = np.empty(rows, bits.dtype)
    rows_per_pass = max(1, PIECE_BYTES // (vocab_size * signed.itemsize))
    for start in range(0, rows, rows_per_pass):
        piece = slice(start, start + rows_per_pass)
        signed[piece].argmax(axis=1, out=tokens[piece])
        np.maximum.reduce(bits[piece], axis=1, out=most[piece])
    best = signed[np.arange(rows), tokens]
    # Special cases: as unsigned integers, negative NaNs are the largest; negative numbers are in
    # reverse order; and -0.0, which equals 0.0, may come first.
    is_special = most > (infinity | 1 << (8 * signed.itemsize - 1))
    negative = np.flatnonzero((best < 0) & ~is_special)
    if len(negative):
        tokens[negative] = signed[negative].argmin(axis=1)
    special = np.flatnonzero(is_special | (best == 0) | (best > infinity))
    if len(special):
        tokens[special] = scores[torch.from_numpy(special)].max(dim=-1).indices.numpy()
    indices = torch.from_numpy(tokens).unsqueeze(1)
    return Argmax(scores.gather(1, indices), indices)


def first_argmax(scores: Tensor) -> Argmax:
    """Lowest token with the largest score of scores (B, V), independent of how the device handles
    ties and NaN. The value of a row with NaN is infinity."""
    last = scores.shape[1] - 1
    scores = torch.where(scores.isnan(), float("inf"), scores)
    values = scores.amax(dim=-1, keepdim=True)
    index = torch.arange(last + 1, dtype=torch.int32, device=scores.device)
    tokens = torch.where(scores == values, index, last).amin(dim=-1, keepdim=True)
    return Argmax(values, tokens.long())


def min_p_threshold(weights: Tensor, top: Tensor, min_p: Tensor) -> Tensor:
    """(B, 1) smallest weight that `min_p` (B, 1) keeps. `top` (B, 1): most likely token."""
    return weights.gather(1, top) * min_p


def top_values(weights: Tensor, size: int) -> Tensor:
    """(B, size) largest weights of each row, in descending order; unspecified for rows with NaN. On
    a CPU numpy's vectorized partition is 2 to 20 times as fast as `topk`."""
    if weights.device.type != "cpu":
        return weights.topk(size, dim=-1).values
    # Negated: partition is slow if many numbers are equal, such as zeros.
    largest = np.partition(-weights.numpy(), size - 1, axis=1)[:, :size]
    largest.sort(axis=1)
    return torch.from_numpy(-largest)


def top_k_by_sort(weights: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """(B, 1) weight of the k-th most likely token; 0 if `top_k` (B, 1) is 0. As a threshold, it
    also keeps all tokens that tie with the k-th."""
    largest = top_values(weights, largest_k)
    kth = largest.gather(1, (top_k - 1).clamp(min=0))
    return kth * (top_k > 0)


def cut(weights: Tensor, threshold: Tensor) -> Tensor:
    """Set weights below their row's `threshold` (B, 1) to 0, and scale the kept weights to at least
    1.

    A threshold of 0 cuts at TINY, which is negligible relative to a softmax's largest weight.
    Dividing first allows a scalar threshold for all rows, which is several times faster than a
    comparison and a select. A weight equal to the threshold gives exactly 1, a smaller weight at
    most 1 - 2**-24, so the cut is exact.
    """
    scaled = weights / threshold.clamp(min=TINY)
    return torch.threshold_(scaled, _JUST_BELOW_ONE, 0.0)


def chunked(weights: Tensor) -> Tensor:
    """(B, V) as (B, C, CHUNK), padded with zeros."""
    missing = -weights.shape[1] % CHUNK
    if missing:
        weights = functional.pad(weights, (0, missing))
    return weights.view(weights.shape[0], -1, CHUNK)


def totals(weights: Tensor, sum_dtype: torch.dtype) -> Tensor:
    """(B, 1) sum of each row: the sums of its chunks, added in `sum_dtype`."""
    return chunked(weights).sum(-1).to(sum_dtype).cumsum(-1)[:, -1:]


def top_values_threshold(largest: Tensor, top_k: Tensor) -> Tensor:
    """(B, 1) weight of the k-th most likely token, at least TINY. `largest` (B, N): largest weights
    in descending order. `top_k` (B, 1) float32: at most N; 0 gives TINY."""
    kth = largest.gather(1, (top_k - 1).clamp(min=0).long())
    return torch.where(top_k > 0, kth.clamp(min=TINY), TINY)


def nucleus(largest: Tensor, mass: Tensor) -> Tensor:
    """(B, 1) largest threshold whose kept weights sum to at least `mass` (B, 1); the smallest of
    `largest` if its sum is below `mass`. `largest` (B, N): largest weights in descending order.

    Like `draw`, sums chunks first, then the tokens of the chunk that reaches the mass.
    """
    blocks = chunked(largest)
    chunk_sums = blocks.sum(-1).to(mass.dtype)
    running = chunk_sums.cumsum(-1)
    chunk = _count_below(running, mass)
    before = (running - chunk_sums).gather(1, chunk)
    inside = blocks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, CHUNK)).squeeze(1)
    sums = inside.to(mass.dtype).cumsum(-1)
    position = chunk * CHUNK + _count_below(sums, mass - before)
    return largest.gather(1, position.clamp(max=largest.shape[1] - 1))


def _count_below(sums: Tensor, target: Tensor) -> Tensor:
    """(B, 1) int64: number of ascending `sums` (B, N) below `target` (B, 1), at most N - 1."""
    below = (sums < target).to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32)
    return below.clamp(max=sums.shape[1] - 1).long()


def nucleus_by_sort(weights: Tensor, mass: Tensor) -> Tensor:
    """`nucleus` of unsorted `weights`, for the CPU, where a host sync is free. Sorts only the
    largest weights of each row, and the whole row if these do not reach the mass."""
    rows, vocab_size = weights.shape
    threshold = torch.empty((rows, 1), dtype=weights.dtype, device=weights.device)
    unfinished = torch.arange(rows, device=weights.device)
    for size in (min(MAX_SORTED, vocab_size), vocab_size):
        part = weights if len(unfinished) == rows else weights[unfinished]
        largest = top_values(part, size)
        sums = largest.to(mass.dtype).cumsum(-1)
        targets = mass[unfinished]
        last = (sums < targets).sum(-1, keepdim=True).clamp(max=size - 1)
        threshold[unfinished] = largest.gather(1, last)
        unfinished = unfinished[(sums[:, -1:] < targets).squeeze(1)]
        if not len(unfinished):
            break
    return threshold


def _first_above(weights: Tensor, sums: Tensor, target: Tensor) -> Tensor:
    """(B, 1) first index of a positive weight whose running sum exceeds `target`; the last index of
    a positive weight if rounding keeps all sums below it."""
    size = weights.shape[1]
    index = torch.arange(size, device=weights.device)
    positive = weights > 0
    first = torch.where(positive & (sums > target), index, size).amin(-1, keepdim=True)
    last = torch.where(positive, index, 0).amax(-1, keepdim=True)
    return torch.where(first < size, first, last)


def draw(weights: Tensor, random: Tensor) -> Tensor:
    """(B,) int64 tokens sampled in proportion to `weights` (B, V). `random` (B, 1) is in (0, 1).

    Samples a chunk of the vocabulary, then a token in it: running sums stay short, so float32 is
    accurate enough even for 150,000 tokens. A token of weight 0 is never sampled.
    """
    blocks = chunked(weights)
    chunk_sums = blocks.sum(-1).to(random.dtype)
    running = chunk_sums.cumsum(-1)
    target = random * running[:, -1:]
    chunk = _first_above(chunk_sums, running, target)
    before = (running - chunk_sums).gather(1, chunk)
    inside = blocks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, CHUNK)).squeeze(1)
    inside = inside.to(random.dtype)
    token = _first_above(inside, inside.cumsum(-1), target - before)
    return (chunk * CHUNK + token).squeeze(1)


def keep_ties(weights: Tensor, top_k: Tensor, size: int) -> Tensor:
    """Keep all weights: the threshold keeps every weight that equals the k-th."""
    return weights


def cut_ties(weights: Tensor, top_k: Tensor, size: int) -> Tensor:
    """Keep the weights of exactly `top_k` tokens, and set the others to 0. Among tokens that tie
    with the k-th, the device's sort chooses. The weight of the other tied tokens becomes 0, so that
    thresholding at the k-th weight removes nothing else."""
    if size == weights.shape[1]:
        largest, tokens = weights.sort(dim=-1, descending=True)
    else:
        largest, tokens = weights.topk(size, dim=-1)
    ranks = torch.arange(size, dtype=torch.int32, device=weights.device)
    first = torch.where(ranks < top_k, largest, 0.0)
    exact = torch.zeros_like(weights).scatter(1, tokens, first)
    return torch.where(top_k > 0, exact, weights)


def ties_of(*, keeps: bool) -> Ties:
    """Handling of tokens that tie with the k-th token of `top_k`: keep all (`keeps`), or exactly
    k."""
    return keep_ties if keeps else cut_ties

"""Argmax, the filters min_p, top_k and top_p as thresholds on weights, and the draw by inverse CDF.

Weights are rows of non-negative numbers, not necessarily of sum 1. A row's result depends only on
this row, bit for bit: sums over a row go through fixed chunks, because a reduction may split a
single row among threads but not several rows.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

TINY = 2.0**-100
"""Threshold of rows without a filter. A power of two, so that division by it is exact."""

CHUNK = 256
PIECE_BYTES = 1 << 19
"""Bytes of scores that fit a core's cache, because `argmax` reads them twice."""
_INTEGERS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
"""Integer type of equal width, and the bits of infinity."""
_JUST_BELOW_ONE = 1.0 - 2.0**-24
MAX_SORTED = 4096
"""Tokens sorted in the first attempt to find a nucleus."""


class Argmax(NamedTuple):
    """(B, 1) largest score of each row, and (B, 1) int64 first token with this score."""

    values: Tensor
    tokens: Tensor


def argmax(scores: Tensor) -> Argmax:
    """Argmax of scores (B, V), NaN included, equal to torch's `max`. On a CPU the bits are compared
    as integers, which order positive floats correctly; numpy vectorizes this, indices included."""
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
    rows_a_piece = max(1, PIECE_BYTES // (vocab_size * signed.itemsize))
    for start in range(0, rows, rows_a_piece):
        piece = slice(start, start + rows_a_piece)
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
    """Lowest token with the largest score of scores (B, V), independent of the device's handling of
    ties and NaN. The value of a row with a NaN is infinity."""
    last = scores.shape[1] - 1
    scores = torch.where(scores.isnan(), float("inf"), scores)
    values = scores.amax(dim=-1, keepdim=True)
    index = torch.arange(last + 1, dtype=torch.int32, device=scores.device)
    tokens = torch.where(scores == values, index, last).amin(dim=-1, keepdim=True)
    return Argmax(values, tokens.long())


def min_p_threshold(weights: Tensor, top: Tensor, min_p: Tensor) -> Tensor:
    """(B, 1) smallest weight that `min_p` (B, 1) keeps; `top` (B, 1): the most likely token."""
    return weights.gather(1, top) * min_p


def top_values(weights: Tensor, size: int) -> Tensor:
    """(B, size) largest weights of each row in descending order; unspecified for rows with NaN. On
    a CPU numpy's vectorized partition is 2 to 20 times as fast as `topk`."""
    if weights.device.type != "cpu":
        return weights.topk(size, dim=-1).values
    # Negated: partition is slow on many equal numbers, such as zeros.
    largest = np.partition(-weights.numpy(), size - 1, axis=1)[:, :size]
    largest.sort(axis=1)
    return torch.from_numpy(-largest)


def top_k_by_sort(weights: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """(B, 1) weight of the k-th most likely token; 0 if `top_k` (B, 1) is 0.

    Tokens that tie with the k-th are kept too.
    """
    largest = top_values(weights, largest_k)
    kth = largest.gather(1, (top_k - 1).clamp(min=0))
    return kth * (top_k > 0)


def cut(weights: Tensor, threshold: Tensor) -> Tensor:
    """Set weights below their row's `threshold` (B, 1) to 0 and scale the kept weights to at least
    1.

    A threshold of 0 cuts at TINY, which is negligible beside a softmax's largest weight. Dividing
    first allows a scalar threshold for all rows, which is several times faster than a comparison
    and a select. A weight equal to the threshold gives exactly 1, a smaller weight at most 1 -
    2**-24, so the cut is exact.
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
    """(B, 1) sum of each row, accumulated in `sum_dtype`."""
    return chunked(weights).sum(-1).to(sum_dtype).cumsum(-1)[:, -1:]


def top_values_threshold(largest: Tensor, top_k: Tensor) -> Tensor:
    """(B, 1) weight of the k-th most likely token, at least TINY. `largest` (B, N): largest weights
    in descending order; `top_k` (B, 1) float32: at most N, 0 gives TINY."""
    kth = largest.gather(1, (top_k - 1).clamp(min=0).long())
    return torch.where(top_k > 0, kth.clamp(min=TINY), TINY)


def nucleus(largest: Tensor, mass: Tensor) -> Tensor:
    """(B, 1) largest threshold whose kept weights sum to at least `mass` (B, 1); the smallest of
    `largest` if their sum is below `mass`. `largest` (B, N): largest weights in descending order.

    Sums chunks first, then tokens in the chunk that reaches the mass, like `draw`.
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
    """(B, 1) int64 number of ascending `sums` (B, N) below `target` (B, 1), at most N - 1."""
    below = (sums < target).to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32)
    return below.clamp(max=sums.shape[1] - 1).long()


def nucleus_by_sort(weights: Tensor, mass: Tensor) -> Tensor:
    """Result of `nucleus` for unsorted `weights`, for the CPU, where a host sync costs nothing.

    Sorts only the top of each row, and the whole row if the top does not reach the mass.
    """
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
    """(B, 1) first index of positive weight whose running sum exceeds `target`; the last index of
    positive weight if, due to rounding, no sum exceeds it."""
    size = weights.shape[1]
    index = torch.arange(size, device=weights.device)
    positive = weights > 0
    first = torch.where(positive & (sums > target), index, size).amin(-1, keepdim=True)
    last = torch.where(positive, index, 0).amax(-1, keepdim=True)
    return torch.where(first < size, first, last)


def draw(weights: Tensor, random: Tensor) -> Tensor:
    """(B,) int64 tokens drawn in proportion to `weights` (B, V); `random` (B, 1) is in (0, 1).

    Draws a chunk of the vocabulary, then a token in it: running sums stay short, so float32 is
    accurate enough even for 150,000 tokens. A token of weight 0 is never drawn.
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

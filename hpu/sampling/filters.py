"""What may be drawn, and the draw: min_p, top_k, top_p as thresholds on weights, inverse CDF.

Weights are rows of non-negative numbers, not necessarily of sum 1. Every result of a row depends on
this row alone, bit for bit: sums over a row go through fixed chunks, because a reduction of a
single row to one number may be split among threads where that of several rows is not.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

TINY = 2.0**-100
"""The threshold of rows that cut nothing. A power of two: dividing by it is exact."""

CHUNK = 256
PIECE_BYTES = 1 << 19
"""Of scores that are looked at twice: what a cache near the core holds."""
_INTEGERS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
"""Integers as wide, and the bits of infinity."""
_JUST_BELOW_ONE = 1.0 - 2.0**-24
MOST_NUCLEUS = 4096
"""Tokens among which a nucleus is looked for first."""
_EXPONENTS = (64, 64, 64, 32, 16, 8, 4, 2, 1)
"""Powers of two whose product leads from TINY to any float32 above it, and beyond to infinity."""
_SIGNIFICAND_BITS = 23


class Argmax(NamedTuple):
    """(B, 1) the largest score of each row, and (B, 1) int64 the first token that has it."""

    values: Tensor
    tokens: Tensor


def argmax(scores: Tensor) -> Argmax:
    """Of (B, V), what `max` finds, NaN included. On a CPU by the bits read as integers, which order
    positive numbers in the same way, and are compared many at a time, their places with them."""
    if scores.dtype not in _INTEGERS or scores.device.type != "cpu":
        return Argmax(*scores.max(dim=-1, keepdim=True))
    integers, infinity = _INTEGERS[scores.dtype]
    signed = scores.view(integers).numpy()
    bits = signed.view(f"u{signed.itemsize}")
    rows, vocab_size = signed.shape
    places = np.empty(rows, np.int64)
    most = np.empty(rows, bits.dtype)
    some = max(1, PIECE_BYTES // (vocab_size * signed.itemsize))
    for start in range(0, rows, some):
        piece = slice(start, start + some)
        signed[piece].argmax(axis=1, out=places[piece])
        np.maximum.reduce(bits[piece], axis=1, out=most[piece])
    best = signed[np.arange(rows), places]
    # A NaN with a sign is, read without one, beyond all else; negative numbers are ordered
    # backwards; and zero may have come before as its negative, which is as large.
    is_odd = most > (infinity | 1 << (8 * signed.itemsize - 1))
    negative = np.flatnonzero((best < 0) & ~is_odd)
    if len(negative):
        places[negative] = signed[negative].argmin(axis=1)
    odd = np.flatnonzero(is_odd | (best == 0) | (best > infinity))
    if len(odd):
        places[odd] = scores[torch.from_numpy(odd)].max(dim=-1).indices.numpy()
    indices = torch.from_numpy(places).unsqueeze(1)
    return Argmax(scores.gather(1, indices), indices)


def min_p_threshold(weights: Tensor, top: Tensor, min_p: Tensor) -> Tensor:
    """(B, 1) the least weight kept by `min_p` (B, 1); `top` (B, 1) is the most likely token."""
    return weights.gather(1, top) * min_p


def top_values(weights: Tensor, size: int) -> Tensor:
    """(B, size) the largest of each row, none of which is NaN, greatest first; on a CPU by numpy,
    which compares many numbers at a time: some two to twenty times as fast as `topk`."""
    if weights.device.type != "cpu":
        return weights.topk(size, dim=-1).values
    # Negated, since it takes long to part numbers within many that are equal, as zeros are.
    largest = np.partition(-weights.numpy(), size - 1, axis=1)[:, :size]
    largest.sort(axis=1)
    return torch.from_numpy(-largest)


def top_k_by_sort(weights: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """(B, 1) the weight of the k-th most likely token; `top_k` (B, 1) of 0 gives 0.

    Tokens that tie with the k-th are kept too.
    """
    largest = top_values(weights, largest_k)
    kth = largest.gather(1, (top_k - 1).clamp(min=0))
    return kth * (top_k > 0)


def cut(weights: Tensor, threshold: Tensor, least: float = TINY) -> Tensor:
    """Weights below their row's `threshold` (B, 1) become 0; the others are scaled to 1 and above.

    A row with a threshold of 0 is cut at `least`: TINY, which is nothing beside a softmax's largest
    weight, or 1 for weights that were cut before, which leaves them as they are.

    Dividing first lets one scalar threshold do for all rows, which is several times quicker than a
    comparison and a select. A weight equal to the threshold gives exactly 1, one below it at most
    1 - 2**-24, so the cut is exact.
    """
    scaled = weights / threshold.clamp(min=least)
    return torch.threshold_(scaled, _JUST_BELOW_ONE, 0.0)


def chunked(weights: Tensor) -> Tensor:
    """(B, V) as (B, C, CHUNK), padded with zeros."""
    missing = -weights.shape[1] % CHUNK
    if missing:
        weights = functional.pad(weights, (0, missing))
    return weights.view(weights.shape[0], -1, CHUNK)


def totals(weights: Tensor, wide: torch.dtype) -> Tensor:
    """(B, 1) sum of each row, in `wide`."""
    return chunked(weights).sum(-1).to(wide).cumsum(-1)[:, -1:]


def nucleus_by_search(weights: Tensor, mass: Tensor) -> Tensor:
    """(B, 1) the largest threshold whose kept weights sum to at least `mass` (B, 1).

    Static shapes, no look at the data. Costs 32 sums over the whole vocabulary.
    """

    def enough(threshold: Tensor) -> Tensor:
        return totals(weights * (weights >= threshold), mass.dtype) >= mass

    return _largest(torch.full_like(mass, TINY, dtype=torch.float32), enough)


def top_k_by_search(weights: Tensor, top_k: Tensor) -> Tensor:
    """As `top_k_by_sort`, at least TINY, by search as in `nucleus_by_search`; `top_k` (B, 1)
    float32, so that k takes part in no shape."""

    def enough(threshold: Tensor) -> Tensor:
        return (weights >= threshold).float().sum(-1, keepdim=True) >= top_k

    kth = _largest(torch.full_like(top_k, TINY), enough)
    return torch.where(top_k > 0, kth, TINY)


def _largest(low: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, 1) float32 the largest threshold for which `enough` holds, or `low` (TINY) if none does.

    Finds the exponent's bits first, then the significand's. All steps are exact, and no number's
    bits are read as another type, which not every device does.
    """
    for exponent in _EXPONENTS:
        higher = low * 2.0**exponent
        low = torch.where(enough(higher), higher, low)
    unit = low
    for _ in range(_SIGNIFICAND_BITS):
        unit = unit * 0.5
        higher = low + unit
        low = torch.where(enough(higher), higher, low)
    return low


def nucleus_by_sort(weights: Tensor, mass: Tensor) -> Tensor:
    """As `nucleus_by_search`, for devices whose data the host may look at for nothing (CPU).

    Sorts only the top of each row, and more of it where that does not hold the mass.
    """
    rows, vocab_size = weights.shape
    threshold = torch.empty((rows, 1), dtype=weights.dtype, device=weights.device)
    pending = torch.arange(rows, device=weights.device)
    for size in (min(MOST_NUCLEUS, vocab_size), vocab_size):
        some = weights if len(pending) == rows else weights[pending]
        largest = top_values(some, size)
        sums = largest.to(mass.dtype).cumsum(-1)
        wanted = mass[pending]
        last = (sums < wanted).sum(-1, keepdim=True).clamp(max=size - 1)
        threshold[pending] = largest.gather(1, last)
        pending = pending[(sums[:, -1:] < wanted).squeeze(1)]
        if not len(pending):
            break
    return threshold


def _first_above(weights: Tensor, sums: Tensor, target: Tensor) -> Tensor:
    """(B, 1) first index of positive weight whose running sum exceeds `target`, or the last one of
    positive weight if rounding lets none exceed it."""
    size = weights.shape[1]
    index = torch.arange(size, device=weights.device)
    positive = weights > 0
    first = torch.where(positive & (sums > target), index, size).amin(-1, keepdim=True)
    last = torch.where(positive, index, 0).amax(-1, keepdim=True)
    return torch.where(first < size, first, last)


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """(B,) int64 tokens drawn in proportion to `weights` (B, V), by `numbers` (B, 1) in (0, 1).

    Two levels, first a chunk of the vocabulary, then a token in it: running sums stay short, so
    float32 weights lose nothing even with 150,000 tokens. A token of weight 0 is never drawn.
    """
    blocks = chunked(weights)
    chunk_sums = blocks.sum(-1).to(numbers.dtype)
    running = chunk_sums.cumsum(-1)
    target = numbers * running[:, -1:]
    chunk = _first_above(chunk_sums, running, target)
    before = (running - chunk_sums).gather(1, chunk)
    inside = blocks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, CHUNK)).squeeze(1)
    inside = inside.to(numbers.dtype)
    token = _first_above(inside, inside.cumsum(-1), target - before)
    return (chunk * CHUNK + token).squeeze(1)

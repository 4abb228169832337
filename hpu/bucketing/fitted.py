"""Bucket boundaries for a traffic: as little padded work as a number of graphs allows.

Pure. Boundaries of each axis by dynamic programming, then the grid they span is thinned out, and
what is left is refined together.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpu.bucketing.cost import launch_cost, launch_overhead
from hpu.bucketing.limits import BucketLimits
from hpu.bucketing.linear import Shape
from hpu.bucketing.traffic import Launches
from hpu.protocol import DECODE, PREFILL

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

AXES = {PREFILL: (6, 16, 12), DECODE: (16, 1, 40)}
"""Boundaries tried on each axis, at most."""

MOST_VALUES = 400
"""Different values of an axis that the programme looks at; it takes their square in time."""

ROUNDS = 64
"""Swaps of one bucket for another, at most."""


class Padding(NamedTuple):
    """One bucket's part in a traffic."""

    bucket: tuple[int, int, int, int]
    share: float
    """Of all launches."""
    work: float
    """What its launches ask for, as modelled."""
    padded: float
    """What they cost."""


def best_boundaries(values: Ints, weights: Floats, count: int) -> list[int]:
    """At most `count` of the (sorted, different) `values` such that rounding each value up to the
    next of them adds the least, weighted. The largest is always one of them. Exact."""
    total = np.concatenate(([0.0], np.cumsum(weights)))
    # paid[i, j]: all values after the first i, up to the j-th, at the price of the j-th.
    paid = (total[None, 1:] - total[:-1, None]) * values[None, :]
    paid[np.tril_indices(len(values), -1)] = np.inf
    cheapest = paid[0]
    begins: list[Ints] = []
    for _ in range(min(count, len(values)) - 1):
        options = np.concatenate(([np.inf], cheapest[:-1]))[:, None] + paid
        begin = options.argmin(axis=0)
        begins.append(np.where(options.min(axis=0) < cheapest, begin, 0))
        cheapest = np.minimum(options.min(axis=0), cheapest)
    last = len(values) - 1
    chosen = [last]
    for begin in reversed(begins):
        if begin[chosen[-1]]:
            chosen.append(int(begin[chosen[-1]]) - 1)
    return [int(values[at]) for at in reversed(chosen)]


def fit(
    launches: Launches, num_graphs: int, limits: BucketLimits
) -> tuple[list[Shape], list[Shape]]:
    """(prompt, decode) buckets, `num_graphs` at most, that `launches` pad least in.

    Every shape that a lone prompt or a decode can have is covered, whether in the traffic or not.
    """
    covers = (
        (PREFILL, 1, _round_up(limits.max_query, limits.block_size), limits.blocks_a_row),
        (DECODE, limits.max_num_seqs, 1, limits.max_decode_blocks),
    )
    wanted, weights = _columns(launches)
    candidates = np.array(sorted({*covers, *_grid(wanted, weights, limits)}), np.int64)
    cells, cell_weights = _snapped(wanted, weights, candidates)
    kept = np.array([tuple(map(int, row)) in covers for row in candidates])
    costs = _costs(cells, candidates, limits)
    chosen = _thin_out(costs, cell_weights, kept, num_graphs)
    chosen = _swap(costs, cell_weights, kept, chosen)
    buckets = candidates[chosen]
    for _ in range(3):
        buckets = _tighten(buckets, wanted, covers, limits)
    shapes = sorted({tuple(map(int, row)) for row in buckets})
    prompts, decodes = ([shape for own, *shape in shapes if own == phase] for phase in _PHASES)
    return [(b, q, n) for b, q, n in prompts], [(b, q, n) for b, q, n in decodes]


_PHASES = (PREFILL, DECODE)


def padding_of(
    launches: Launches, buckets: list[tuple[int, int, int, int]], limits: BucketLimits
) -> list[Padding]:
    """What each of `buckets` is used for; those never used are in it too. Prompts for which no
    batch is large enough go in several launches; what fits nowhere costs no padding."""
    wanted, weights = _columns(launches)
    table = np.array(buckets, np.int64)
    costs = _costs(wanted, table, limits)
    found = costs.argmin(axis=1)
    work = _own_cost(wanted, limits)
    padded = np.minimum(costs.min(axis=1), np.where(np.isinf(costs.min(axis=1)), work, np.inf))
    sums = [
        np.bincount(found, weights=weights * column, minlength=len(table))
        for column in (np.ones(len(found)), work, padded)
    ]
    return [
        Padding(bucket, float(sums[0][at] / weights.sum()), float(sums[1][at]), float(sums[2][at]))
        for at, bucket in enumerate(buckets)
    ]


def _columns(launches: Launches) -> tuple[Ints, Floats]:
    ordered = sorted(launches.items())
    return (
        np.array([shape for shape, _ in ordered], np.int64),
        np.array([weight for _, weight in ordered], np.float64),
    )


def _round_up(value: int, unit: int) -> int:
    return unit * math.ceil(value / unit)


def _grid(wanted: Ints, weights: Floats, limits: BucketLimits) -> list[tuple[int, int, int, int]]:
    """Every combination of the best boundaries of each axis that a launch may have."""
    shapes = []
    budget = _round_up(limits.max_num_batched_tokens, limits.block_size)
    for phase in _PHASES:
        own = wanted[:, 0] == phase
        if not own.any():
            continue
        axes = []
        for axis, count in enumerate(AXES[phase], start=1):
            unit = limits.block_size if axis == 2 and phase == PREFILL else 1
            values = -(-wanted[own, axis] // unit) * unit
            axes.append(_axis(values, weights[own], count))
        for batch in axes[0]:
            for query in axes[1]:
                if phase == PREFILL and batch > 1 and batch * query > budget:
                    continue
                shapes += [(phase, batch, query, blocks) for blocks in axes[2]]
    return shapes


def _axis(values: Ints, weights: Floats, count: int) -> list[int]:
    different, where = np.unique(values, return_inverse=True)
    sums = np.bincount(where, weights=weights).astype(np.float64)
    if len(different) > MOST_VALUES:
        # Neighbours go together; the largest of each group stands for it.
        group = np.arange(len(different)) * MOST_VALUES // len(different)
        ends = np.flatnonzero(np.append(np.diff(group), 1))
        different, sums = different[ends], np.bincount(group, weights=sums).astype(np.float64)
    return best_boundaries(different, sums, count)


def _snapped(wanted: Ints, weights: Floats, candidates: Ints) -> tuple[Ints, Floats]:
    """Launches rounded up to the coordinates that candidates of their phase have."""
    cells = wanted.copy()
    for phase in _PHASES:
        own = wanted[:, 0] == phase
        for axis in (1, 2, 3):
            points = np.unique(candidates[candidates[:, 0] == phase, axis])
            at = np.minimum(np.searchsorted(points, wanted[own, axis]), len(points) - 1)
            cells[own, axis] = np.maximum(points[at], wanted[own, axis])
    # A rounded batch of prompts may be over the budget where its launch was not: it stays.
    different, where = np.unique(cells, axis=0, return_inverse=True)
    return different.astype(np.int64), np.bincount(where.ravel(), weights=weights).astype(
        np.float64
    )


def _own_cost(shapes: Ints, limits: BucketLimits) -> Floats:
    costs = np.empty(len(shapes))
    for phase in _PHASES:
        own = shapes[:, 0] == phase
        batch, query, blocks = shapes[own, 1:].T
        costs[own] = launch_cost(phase, batch, query, blocks, limits.block_size)
    return costs


def _costs(wanted: Ints, buckets: Ints, limits: BucketLimits) -> Floats:
    """(launches, buckets): what each launch costs in each bucket, inf where it does not fit."""
    own = _own_cost(buckets, limits)
    fits = (wanted[:, None, 0] == buckets[None, :, 0]) & (
        wanted[:, None, 2:] <= buckets[None, :, 2:]
    ).all(axis=2)
    parts = -(-wanted[:, None, 1] // buckets[None, :, 1])
    # Only prompts may be launched apart: a decode is one launch.
    fits &= (parts == 1) | (wanted[:, None, 0] == PREFILL)
    overhead = launch_overhead(limits.block_size)
    return np.where(fits, parts * own[None, :] + (parts - 1) * overhead, np.inf)


def _thin_out(
    costs: Floats, weights: Floats, kept: NDArray[np.bool_], num_graphs: int
) -> list[int]:
    """From the candidates that launches take if all are there, drop again and again the one that
    is missed least, until `num_graphs` are left."""
    chosen = sorted({*costs.argmin(axis=1).tolist(), *np.flatnonzero(kept).tolist()})
    left = costs[:, chosen]
    alive = np.ones(len(chosen), bool)
    fixed = kept[chosen]
    first, second, missed = _two_best(left)
    while alive.sum() > max(num_graphs, fixed.sum()):
        losses = np.bincount(first, weights=weights * missed, minlength=len(chosen))
        losses[fixed | ~alive] = np.inf
        drop = int(losses.argmin())
        alive[drop] = False
        left[:, drop] = np.inf
        stale = np.flatnonzero((first == drop) | (second == drop))
        if len(stale):
            first[stale], second[stale], missed[stale] = _two_best(left[stale])
    return [bucket for at, bucket in enumerate(chosen) if alive[at]]


def _two_best(costs: Floats) -> tuple[Ints, Ints, Floats]:
    """The cheapest and the next column of each row, and how much more the latter costs."""
    rows = np.arange(len(costs))
    if costs.shape[1] == 1:
        only = np.zeros(len(costs), np.int64)
        return only, only.copy(), np.full(len(costs), np.inf)
    first = costs.argmin(axis=1)
    rest = costs.copy()
    rest[rows, first] = np.inf
    second = rest.argmin(axis=1)
    with np.errstate(invalid="ignore"):
        missed = rest[rows, second] - costs[rows, first]
    # A launch that fits nowhere is no bucket's loss.
    return first, second, np.where(np.isnan(missed), 0.0, missed)


def _swap(costs: Floats, weights: Floats, kept: NDArray[np.bool_], chosen: list[int]) -> list[int]:
    """Trade a bucket for the candidate that saves most, as long as that saves anything."""
    for _ in range(ROUNDS):
        best = costs[:, chosen].min(axis=1)
        finite = np.isfinite(best)
        savings = np.maximum(best[finite, None] - costs[finite], 0.0)
        add = int((weights[finite] @ savings).argmax())
        if add in chosen:
            break
        more = [*chosen, add]
        first, _, missed = _two_best(costs[:, more])
        losses = np.bincount(first, weights=weights * missed, minlength=len(more))
        losses[kept[more]] = np.inf
        drop = int(losses.argmin())
        if more[drop] == add or losses[drop] >= losses[-1]:
            break
        more.pop(drop)
        chosen = more
    return sorted(chosen)


def _tighten(
    buckets: Ints,
    wanted: Ints,
    covers: tuple[tuple[int, int, int, int], ...],
    limits: BucketLimits,
) -> Ints:
    """Each bucket shrunk to the largest of what goes into it; those that cover everything stay.
    The work can only become less."""
    costs = _costs(wanted, buckets, limits)
    found = np.where(np.isinf(costs.min(axis=1)), -1, costs.argmin(axis=1))
    tight: Ints = buckets.copy()
    for at, bucket in enumerate(buckets):
        own = wanted[found == at]
        if tuple(map(int, bucket)) in covers or not len(own):
            continue
        tight[at, 1:] = np.minimum(own[:, 1:].max(axis=0), bucket[1:])
        if bucket[0] == PREFILL:
            tight[at, 2] = _round_up(int(tight[at, 2]), limits.block_size)
    return tight

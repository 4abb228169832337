"""Strategy `fitted`: buckets that reduce the padding of given traffic, up to a number of graphs.

Dynamic programming finds the best boundaries of each axis. Greedy steps then prune their grid and
refine the remaining buckets together.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpu.bucketing.cost import launch_cost, launch_overhead
from hpu.bucketing.traffic import Launches
from hpu.protocol import DECODE, PREFILL, Bucket, BucketLimits, Shape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

AXES = {PREFILL: (6, 16, 12), DECODE: (16, 1, 40)}
"""Maximum number of boundaries on each axis."""

MAX_VALUES = 400
"""Maximum distinct values of an axis in the dynamic program, whose time is quadratic in their
number."""

MAX_SWAPS = 64
"""Maximum number of bucket swaps."""


class Padding(NamedTuple):
    """Use of a bucket by the given traffic."""

    bucket: Bucket
    share: float
    """Fraction of all launches that use the bucket."""
    exact_cost: float
    """Modelled cost of its launches without padding."""
    padded_cost: float
    """Modelled cost of its launches, padded to the bucket."""

    @property
    def waste(self) -> float:
        """Fraction of the padded cost that is padding."""
        return 1 - self.exact_cost / self.padded_cost if self.padded_cost else 0.0


def best_boundaries(values: Ints, weights: Floats, count: int) -> list[int]:
    """At most `count` of the sorted, distinct `values` that minimize the total weighted cost of
    rounding every value up to the next boundary. The largest value is always a boundary. Exact
    solution."""
    total = np.concatenate(([0.0], np.cumsum(weights)))
    # paid[i, j]: cost of values i to j (both included) rounded up to value j.
    paid = (total[None, 1:] - total[:-1, None]) * values[None, :]
    paid[np.tril_indices(len(values), -1)] = np.inf
    cheapest = paid[0]
    starts: list[Ints] = []
    for _ in range(min(count, len(values)) - 1):
        options = np.concatenate(([np.inf], cheapest[:-1]))[:, None] + paid
        start = options.argmin(axis=0)
        starts.append(np.where(options.min(axis=0) < cheapest, start, 0))
        cheapest = np.minimum(options.min(axis=0), cheapest)
    last = len(values) - 1
    chosen = [last]
    for start in reversed(starts):
        if start[chosen[-1]]:
            chosen.append(int(start[chosen[-1]]) - 1)
    return [int(values[at]) for at in reversed(chosen)]


def fit(
    launches: Launches, num_graphs: int, limits: BucketLimits
) -> tuple[list[Shape], list[Shape]]:
    """(prompt, decode) buckets, at most `num_graphs` (but at least one of each phase), with little
    padding for `launches`.

    Every prompt that is launched alone, and every decode, is covered, whether or not it is in the
    traffic.
    """
    required = (
        (PREFILL, 1, _round_up(limits.max_query, limits.block_size), limits.max_context_blocks),
        (DECODE, limits.max_num_seqs, 1, limits.max_decode_blocks),
    )
    shapes, weights = _arrays(launches)
    candidates = np.array(sorted({*required, *_grid(shapes, weights, limits)}), np.int64)
    cells, cell_weights = _round_to_candidates(shapes, weights, candidates)
    is_required = np.array([tuple(map(int, row)) in required for row in candidates])
    costs = _costs(cells, candidates, limits)
    chosen = _prune(costs, cell_weights, is_required, num_graphs)
    chosen = _swap(costs, cell_weights, is_required, chosen)
    buckets = candidates[chosen]
    for _ in range(3):
        buckets = _tighten(buckets, shapes, required, limits)
    unique = sorted({tuple(map(int, row)) for row in buckets})
    prompts, decodes = (
        [(b, q, n) for bucket_phase, b, q, n in unique if bucket_phase == phase]
        for phase in _PHASES
    )
    return prompts, decodes


_PHASES = (PREFILL, DECODE)


def padding_of(launches: Launches, buckets: list[Bucket], limits: BucketLimits) -> list[Padding]:
    """Use of each of `buckets` by `launches`; unused buckets are included. A batch of prompts that
    exceeds a bucket's batch has the cost of several launches; a launch that fits no bucket counts
    for the first bucket, without padding."""
    shapes, weights = _arrays(launches)
    table = np.array(buckets, np.int64)
    costs = _costs(shapes, table, limits)
    bucket_of = costs.argmin(axis=1)
    exact = _exact_costs(shapes, limits)
    padded = np.minimum(costs.min(axis=1), np.where(np.isinf(costs.min(axis=1)), exact, np.inf))
    sums = [
        np.bincount(bucket_of, weights=weights * column, minlength=len(table))
        for column in (np.ones(len(bucket_of)), exact, padded)
    ]
    return [
        Padding(bucket, float(sums[0][at] / weights.sum()), float(sums[1][at]), float(sums[2][at]))
        for at, bucket in enumerate(buckets)
    ]


def _arrays(launches: Launches) -> tuple[Ints, Floats]:
    ordered = sorted(launches.items())
    return (
        np.array([shape for shape, _ in ordered], np.int64),
        np.array([weight for _, weight in ordered], np.float64),
    )


def _round_up(value: int, unit: int) -> int:
    return unit * math.ceil(value / unit)


def _grid(shapes: Ints, weights: Floats, limits: BucketLimits) -> list[Bucket]:
    """Every combination of the axes' best boundaries; batches of several prompts only within the
    token budget."""
    grid = []
    budget = _round_up(limits.max_num_batched_tokens, limits.block_size)
    for phase in _PHASES:
        in_phase = shapes[:, 0] == phase
        if not in_phase.any():
            continue
        axes = []
        for axis, count in enumerate(AXES[phase], start=1):
            unit = limits.block_size if axis == 2 and phase == PREFILL else 1
            values = -(-shapes[in_phase, axis] // unit) * unit
            axes.append(_axis(values, weights[in_phase], count))
        for batch in axes[0]:
            for query in axes[1]:
                if phase == PREFILL and batch > 1 and batch * query > budget:
                    continue
                grid += [(phase, batch, query, blocks) for blocks in axes[2]]
    return grid


def _axis(values: Ints, weights: Floats, count: int) -> list[int]:
    distinct, where = np.unique(values, return_inverse=True)
    sums = np.bincount(where, weights=weights).astype(np.float64)
    if len(distinct) > MAX_VALUES:
        # Group adjacent values; the largest value represents its group.
        group = np.arange(len(distinct)) * MAX_VALUES // len(distinct)
        ends = np.flatnonzero(np.append(np.diff(group), 1))
        distinct, sums = distinct[ends], np.bincount(group, weights=sums).astype(np.float64)
    return best_boundaries(distinct, sums, count)


def _round_to_candidates(shapes: Ints, weights: Floats, candidates: Ints) -> tuple[Ints, Floats]:
    """Launches rounded up to the coordinates of the candidates of their phase."""
    cells = shapes.copy()
    for phase in _PHASES:
        in_phase = shapes[:, 0] == phase
        for axis in (1, 2, 3):
            points = np.unique(candidates[candidates[:, 0] == phase, axis])
            at = np.minimum(np.searchsorted(points, shapes[in_phase, axis]), len(points) - 1)
            cells[in_phase, axis] = np.maximum(points[at], shapes[in_phase, axis])
    # A rounded batch of prompts may exceed the budget although its launch does not; keep it.
    distinct, where = np.unique(cells, axis=0, return_inverse=True)
    return distinct.astype(np.int64), np.bincount(where.ravel(), weights=weights).astype(np.float64)


def _exact_costs(shapes: Ints, limits: BucketLimits) -> Floats:
    costs = np.empty(len(shapes))
    for phase in _PHASES:
        in_phase = shapes[:, 0] == phase
        batch, query, blocks = shapes[in_phase, 1:].T
        costs[in_phase] = launch_cost(phase, batch, query, blocks, limits.block_size)
    return costs


def _costs(shapes: Ints, buckets: Ints, limits: BucketLimits) -> Floats:
    """(launches, buckets) fp64: cost of each launch in each bucket, inf if it does not fit."""
    bucket_costs = _exact_costs(buckets, limits)
    overhead = launch_overhead(limits.block_size)
    costs = np.full((len(shapes), len(buckets)), np.inf)
    for phase in _PHASES:
        rows = np.flatnonzero(shapes[:, 0] == phase)
        columns = np.flatnonzero(buckets[:, 0] == phase)
        # Compare column by column: broadcasting over the last axis is several times slower.
        batch, query, blocks = (shapes[rows, axis, None] for axis in (1, 2, 3))
        sizes = buckets[columns]
        fits = (query <= sizes[:, 2]) & (blocks <= sizes[:, 3])
        if phase == PREFILL:
            # Only prompts can be split over several launches.
            parts = np.ceil(batch / sizes[:, 1])
            in_phase = parts * bucket_costs[columns] + (parts - 1) * overhead
        else:
            fits &= batch <= sizes[:, 1]
            in_phase = bucket_costs[columns]
        costs[np.ix_(rows, columns)] = np.where(fits, in_phase, np.inf)
    return costs


def _prune(
    costs: Floats, weights: Floats, is_required: NDArray[np.bool_], num_graphs: int
) -> list[int]:
    """Start with the cheapest candidate of each launch, and remove the bucket with the smallest
    loss until `num_graphs` buckets are left. Required buckets always stay."""
    chosen = sorted({*costs.argmin(axis=1).tolist(), *np.flatnonzero(is_required).tolist()})
    left = costs[:, chosen]
    alive = np.ones(len(chosen), bool)
    fixed = is_required[chosen]
    first, second, regret = _two_best(left)
    while alive.sum() > max(num_graphs, fixed.sum()):
        losses = np.bincount(first, weights=weights * regret, minlength=len(chosen))
        losses[fixed | ~alive] = np.inf
        drop = int(losses.argmin())
        alive[drop] = False
        left[:, drop] = np.inf
        stale = np.flatnonzero((first == drop) | (second == drop))
        if len(stale):
            first[stale], second[stale], regret[stale] = _two_best(left[stale])
    return [bucket for at, bucket in enumerate(chosen) if alive[at]]


def _two_best(costs: Floats) -> tuple[Ints, Ints, Floats]:
    """(rows,) each: cheapest column, second cheapest column, and their cost difference."""
    rows = np.arange(len(costs))
    if costs.shape[1] == 1:
        only = np.zeros(len(costs), np.int64)
        return only, only.copy(), np.full(len(costs), np.inf)
    first = costs.argmin(axis=1)
    rest = costs.copy()
    rest[rows, first] = np.inf
    second = rest.argmin(axis=1)
    with np.errstate(invalid="ignore"):
        regret = rest[rows, second] - costs[rows, first]
    # NaN: removing a bucket costs nothing for a launch that fits no bucket.
    return first, second, np.where(np.isnan(regret), 0.0, regret)


def _swap(
    costs: Floats, weights: Floats, is_required: NDArray[np.bool_], chosen: list[int]
) -> list[int]:
    """Swap buckets for the candidates with the largest savings, until the next swap would save
    nothing, at most MAX_SWAPS times."""
    for _ in range(MAX_SWAPS):
        best = costs[:, chosen].min(axis=1)
        finite = np.isfinite(best)
        savings = np.maximum(best[finite, None] - costs[finite], 0.0)
        add = int((weights[finite] @ savings).argmax())
        if add in chosen:
            break
        more = [*chosen, add]
        first, _, regret = _two_best(costs[:, more])
        losses = np.bincount(first, weights=weights * regret, minlength=len(more))
        losses[is_required[more]] = np.inf
        drop = int(losses.argmin())
        if more[drop] == add or losses[drop] >= losses[-1]:
            break
        more.pop(drop)
        chosen = more
    return sorted(chosen)


def _tighten(
    buckets: Ints,
    shapes: Ints,
    required: tuple[Bucket, ...],
    limits: BucketLimits,
) -> Ints:
    """Shrink each bucket to the largest sizes of its launches, except the required buckets. Never
    increases the padded cost."""
    costs = _costs(shapes, buckets, limits)
    bucket_of = np.where(np.isinf(costs.min(axis=1)), -1, costs.argmin(axis=1))
    tight: Ints = buckets.copy()
    for at, bucket in enumerate(buckets):
        inside = shapes[bucket_of == at]
        if tuple(map(int, bucket)) in required or not len(inside):
            continue
        tight[at, 1:] = np.minimum(inside[:, 1:].max(axis=0), bucket[1:])
        if bucket[0] == PREFILL:
            tight[at, 2] = _round_up(int(tight[at, 2]), limits.block_size)
    return tight

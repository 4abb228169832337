"""Strategies `exponential` and `exponential-v3`: points in a constant ratio on each axis, except
the context of `exponential` prompts.

Rules of vLLM's Gaudi plug-in, from its bucketing guide and server logs; v3 is the rule of its
newest version.
"""

import itertools
import math
from collections.abc import Iterable

from hpu.protocol import MAX_REFERENCES, BucketLimits, Shape

Axis = tuple[int, int, int, int]
"""(min, step, max, maximum number of points)"""

LONG_CONTEXT = 8192
"""max_model_len from which the context axis leaves room for a whole chunk."""


def exponential_points(
    low: int, step: int, high: int, limit: int, *, fill: bool, exact_last: bool = False
) -> list[int]:
    """`low`, and at most `limit` points up to `high`, in a constant ratio; only the last point if
    `limit` is 1 or `low` is at least `high`.

    The last point is `high`. The points after `low` are rounded up to multiples of `step`, the last
    point unless `exact_last`. With `fill` a duplicate is replaced by the nearest unused multiple.
    """
    last = high if exact_last else step * math.ceil(high / step)
    if limit <= 1 or low >= high:
        return [last]
    points: set[int] = set()
    start = step if low in (0, 1) else low
    for i in range(limit):
        x = start * (high / start) ** (i / (limit - 1))
        point = min(step * math.ceil(round(x, 6) / step), last)
        if i == limit - 1:
            point = last
        if fill and point in points:
            unused = [p for p in (*range(step, last, step), last) if p not in points]
            if not unused:
                break
            point = min(unused, key=lambda p: (abs(p - point), p))
        points.add(point)
    return sorted(points | {low})


def num_points(high: int) -> int:
    """Usual number of points on an exponential axis that ends at `high`: ceil(log2(high)) + 1."""
    return math.ceil(math.log2(high)) + 1 if high > 1 else 1


def exponential_prompt_axes(limits: BucketLimits) -> tuple[Axis, Axis]:
    """(batch, query) axes of the prompt buckets of `exponential`."""
    block, max_len, max_batch = limits.block_size, limits.max_model_len, limits.max_prefill_batch
    return (1, 1, max_batch, num_points(max_batch)), (block, block, max_len, num_points(max_len))


def exponential_decode_axes(limits: BucketLimits) -> tuple[Axis, Axis]:
    """(batch, blocks) axes of the decode buckets of `exponential`."""
    block, max_batch, most = limits.block_size, limits.max_num_seqs, limits.num_blocks
    return (1, 1, max_batch, num_points(max_batch)), (block, block, most, num_points(most))


def exponential_prompts(limits: BucketLimits) -> list[Shape]:
    """Prompt buckets of `exponential`, with tokens (including cached context) within the budget.
    With prefix caching: every number of cached blocks that fits with the query."""
    block, max_len = limits.block_size, limits.max_model_len
    batches, queries = (
        exponential_points(*axis, fill=True) for axis in exponential_prompt_axes(limits)
    )
    shapes = []
    for batch, query in itertools.product(batches, queries):
        max_context = max((max_len - query) // block, 0) if limits.prefix_caching else 0
        shapes += [
            (batch, query, blocks)
            for blocks in range(max_context + 1)
            if batch * (query + blocks * block) <= limits.max_num_batched_tokens
        ]
    return sorted(shapes)


def exponential_decodes(limits: BucketLimits) -> list[Shape]:
    """Decode buckets of `exponential`: every combination of batch and total blocks."""
    batch_axis, block_axis = exponential_decode_axes(limits)
    batches = exponential_points(*batch_axis, fill=True)
    blocks = exponential_points(*block_axis, fill=True, exact_last=not limits.prefix_caching)
    return [(batch, 1, n) for batch, n in itertools.product(batches, blocks)]


def axis_points(axis: Axis) -> list[int]:
    """Points of an exponential axis; the last point is its max."""
    low, step, high, limit = axis
    if limit <= 1:
        return [high]
    return exponential_points(low, step, high, limit, fill=False, exact_last=True)


def v3_prompt_axes(
    limits: BucketLimits, *, query_min: int | None = None
) -> tuple[Axis, Axis, Axis]:
    """(batch, query, context blocks) axes of prompts."""
    block, budget = limits.block_size, limits.max_num_batched_tokens
    low = 1 if query_min == 1 else block
    behind = low if limits.max_model_len < LONG_CONTEXT else budget
    context = max(1, (limits.max_model_len - behind) // block)
    return (
        (1, 2, limits.max_prefill_batch, num_points(limits.max_prefill_batch)),
        (low, block, budget, max(1, math.ceil(math.log2(budget)))),
        (0, 1, context, 2 if context == 1 else num_points(context)),
    )


def v3_decode_axes(limits: BucketLimits) -> tuple[Axis, Axis, Axis]:
    """(batch, query, blocks) axes of decodes. With prefix caching, a blocks axis above the usual
    limit of block references gets more points, so that their spacing does not grow."""
    max_batch, blocks = limits.max_num_seqs, limits.max_decode_blocks
    points, bound = num_points(blocks), MAX_REFERENCES * limits.num_blocks
    if limits.prefix_caching and blocks > bound:
        points += num_points(math.ceil(blocks / bound))
    return (
        (1, 2, max_batch, num_points(max_batch)),
        (1, 1, 1, 1),
        (1, max_batch, blocks, points),
    )


def v3_prompts(
    limits: BucketLimits, *, query_min: int | None = None, context_max: int | None = None
) -> list[Shape]:
    """Prompt buckets of `exponential-v3`, within the token budget without the cached context.

    For long contexts, the largest context of a query is the context that can precede its shortest
    chunk, if this is below `context_max`. The plug-in uses the context that can precede a full
    query instead, and compiles the chunks in between while serving.
    """
    block, max_len = limits.block_size, limits.max_model_len
    batches, queries, contexts = map(axis_points, v3_prompt_axes(limits, query_min=query_min))
    within = math.ceil((max_len - 1) / block)
    shapes: set[Shape] = set()
    for batch, (shorter, query) in itertools.product(batches, itertools.pairwise([0, *queries])):
        if query > max_len or batch * query > limits.max_num_batched_tokens:
            continue
        edge = math.ceil((max_len - shorter - 1) / block)
        if max_len < LONG_CONTEXT or (context_max is not None and edge >= context_max):
            edge = contexts[-1]
        shapes.update(
            (batch, query, blocks) for blocks in (*contexts[:-1], edge) if blocks <= within
        )
    return sorted(shapes)


def v3_decodes(limits: BucketLimits) -> list[Shape]:
    """Decode buckets of `exponential-v3`."""
    batches, _, blocks = map(axis_points, v3_decode_axes(limits))
    if not limits.prefix_caching:
        blocks = sorted({*blocks, limits.num_blocks})
    return possible_decodes(batches, blocks, limits)


def possible_decodes(
    batches: Iterable[int], blocks: Iterable[int], limits: BucketLimits
) -> list[Shape]:
    """Every combination of batch and blocks that a decode can have. A decode that gathers blocks
    reads at least one block per sequence, and at most the blocks of full contexts. Without prefix
    caching, a decode may read a slice of the cache instead."""
    if not limits.prefix_caching:
        return list(itertools.product(batches, (1,), blocks))
    return sorted(
        {
            (batch, 1, min(count, batch * limits.blocks_per_seq))
            for batch, count in itertools.product(batches, blocks)
            if batch <= count
        }
    )

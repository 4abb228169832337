"""The strategies `exponential` and `exponential-v3`: points in a constant ratio on every axis.

Rules of vLLM's Gaudi plug-in (v3: 0.11 and later), from its bucketing guide and server logs.
"""

import itertools
import math

from config.buckets import BucketConfig
from hpu.bucketing.cost import Shapes
from hpu.protocol import BucketLimits, Shape

Axis = tuple[int, int, int, int]
"""(min, step, max, maximum number of points)"""

LONG_CONTEXT = 8192
"""From this max_model_len on, the context axis leaves room for a whole chunk."""


def exponential_buckets(limits: BucketLimits) -> Shapes:
    """Prompt and decode buckets of the older rules."""
    prompts = exponential_prompts(
        limits.max_prefill_batch,
        limits.block_size,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        contexts=limits.prefix_caching,
    )
    decodes = exponential_decodes(
        limits.max_num_seqs,
        limits.block_size,
        limits.num_blocks,
        exact_last=not limits.prefix_caching,
    )
    return prompts, decodes


def exponential_v3_buckets(config: BucketConfig, limits: BucketLimits) -> Shapes:
    """Prompt and decode buckets of the newer rules."""
    prompts = v3_prompts(
        limits.max_prefill_batch,
        limits.block_size,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        query_min=config.prompt_query.min,
        context_max=config.prompt_context.max,
    )
    decodes = v3_decodes(
        limits.max_num_seqs,
        limits.block_size,
        limits.max_model_len,
        limits.num_blocks,
        contiguous=not limits.prefix_caching,
    )
    return prompts, decodes


def exponential_points(
    low: int, step: int, high: int, limit: int, *, fill: bool, exact_last: bool = False
) -> list[int]:
    """At most `limit` points from `low` to `high`, in a constant ratio.

    Points are rounded up to multiples of `step`; with `fill` a duplicate is replaced by the nearest
    unused multiple. The last point is `high`, rounded up unless `exact_last`.
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
    """Points on an exponential axis that ends at `high`: ceil(log2(high)) + 1."""
    return math.ceil(math.log2(high)) + 1 if high > 1 else 1


def exponential_prompts(
    max_batch: int, block_size: int, budget: int, max_len: int, *, contexts: bool
) -> list[Shape]:
    """Prompt buckets whose tokens, cached context included, are within `budget`.

    With `contexts`: every number of cached blocks that fits into `max_len` with the query.
    """
    batches = exponential_points(1, 1, max_batch, num_points(max_batch), fill=True)
    queries = exponential_points(block_size, block_size, max_len, num_points(max_len), fill=True)
    shapes = []
    for batch, query in itertools.product(batches, queries):
        max_context = max((max_len - query) // block_size, 0) if contexts else 0
        shapes += [
            (batch, query, blocks)
            for blocks in range(max_context + 1)
            if batch * (query + blocks * block_size) <= budget
        ]
    return sorted(shapes)


def exponential_decodes(
    max_batch: int, block_size: int, max_blocks: int, *, exact_last: bool
) -> list[Shape]:
    """Decode buckets: every batch point with every point of total blocks."""
    batches = exponential_points(1, 1, max_batch, num_points(max_batch), fill=True)
    blocks = exponential_points(
        block_size,
        block_size,
        max_blocks,
        num_points(max_blocks),
        fill=True,
        exact_last=exact_last,
    )
    return [(batch, 1, n) for batch, n in itertools.product(batches, blocks)]


def axis_points(axis: Axis) -> list[int]:
    """The points of one exponential axis; the last is its max."""
    low, step, high, limit = axis
    if limit <= 1:
        return [high]
    return exponential_points(low, step, high, limit, fill=False, exact_last=True)


def v3_prompt_axes(
    max_batch: int, block_size: int, budget: int, max_len: int, *, query_min: int | None = None
) -> tuple[Axis, Axis, Axis]:
    """(batch, query, context blocks) of prompts."""
    low = 1 if query_min == 1 else block_size
    behind = low if max_len < LONG_CONTEXT else budget
    context = max(1, (max_len - behind) // block_size)
    return (
        (1, 2, max_batch, num_points(max_batch)),
        (low, block_size, budget, max(1, math.ceil(math.log2(budget)))),
        (0, 1, context, 2 if context == 1 else num_points(context)),
    )


def v3_decode_axes(
    max_batch: int, block_size: int, max_len: int, num_blocks: int, *, contiguous: bool
) -> tuple[Axis, Axis, Axis]:
    """(batch, query, blocks) of decodes. Requests may share blocks unless the cache is
    `contiguous`: with sharing, a decode refers to up to three times the number of blocks."""
    full = math.ceil(max_len / block_size) * max_batch
    blocks = min(num_blocks if contiguous else 3 * num_blocks, full)
    return (
        (1, 2, max_batch, num_points(max_batch)),
        (1, 1, 1, 1),
        (1, max_batch, blocks, num_points(blocks)),
    )


def v3_prompts(
    max_batch: int,
    block_size: int,
    budget: int,
    max_len: int,
    *,
    query_min: int | None = None,
    context_max: int | None = None,
) -> list[Shape]:
    """Prompt buckets within `budget`, without the cached context.

    Long contexts have an additional point per query: the largest context that fits with it, if
    below `context_max`.
    """
    batch_axis, query_axis, context_axis = v3_prompt_axes(
        max_batch, block_size, budget, max_len, query_min=query_min
    )
    axis = axis_points(context_axis)
    within = math.ceil((max_len - 1) / block_size)
    shapes: set[Shape] = set()
    for batch, query in itertools.product(axis_points(batch_axis), axis_points(query_axis)):
        if query > max_len or batch * query > budget:
            continue
        contexts = list(axis)
        edge = (max_len - query) // block_size
        if max_len >= LONG_CONTEXT and (context_max is None or edge < context_max):
            contexts.append(edge)
        shapes.update((batch, query, blocks) for blocks in contexts if blocks <= within)
    return sorted(shapes)


def v3_decodes(
    max_batch: int, block_size: int, max_len: int, num_blocks: int, *, contiguous: bool
) -> list[Shape]:
    """Decode buckets. Unless the cache is `contiguous`, the number of blocks is at least the batch,
    and at most what the batch can have."""
    batch_axis, _, block_axis = v3_decode_axes(
        max_batch, block_size, max_len, num_blocks, contiguous=contiguous
    )
    batches, blocks = axis_points(batch_axis), axis_points(block_axis)
    if contiguous:
        blocks = sorted({*blocks, num_blocks})
        return [(batch, 1, count) for batch, count in itertools.product(batches, blocks)]
    per_seq = math.ceil(max_len / block_size)
    return sorted(
        {
            (batch, 1, min(count, batch * per_seq))
            for batch, count in itertools.product(batches, blocks)
            if batch <= count
        }
    )

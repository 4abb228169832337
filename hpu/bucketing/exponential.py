"""The strategies `exponential` and `exponential-v3`: points in a constant ratio on every axis.

Rules of vLLM's Gaudi plug-in (v3: 0.11 and later), from its bucketing guide and server logs.
"""

import itertools
import math

from config.buckets import BucketConfig
from hpu.bucketing.limits import BucketLimits, Shape, Shapes

Axis = tuple[int, int, int, int]
"""(min, step, max, most points)"""

LONG_CONTEXT = 8192
"""From here on the context axis ends where a whole chunk still follows."""


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
    """At most `limit` points from `low` to `high`, each in the same ratio to the one before.

    Points are rounded up to multiples of `step`; with `fill` a point that exists already gives way
    to the nearest unused multiple, so that few are lost. The last is `high`, rounded up unless
    `exact_last`.
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
    """Prompt buckets whose tokens, cached context counted, stay within `budget`.

    With `contexts`, every number of cached blocks that a query leaves room for in `max_len`.
    """
    batches = exponential_points(1, 1, max_batch, num_points(max_batch), fill=True)
    queries = exponential_points(block_size, block_size, max_len, num_points(max_len), fill=True)
    shapes = []
    for batch, query in itertools.product(batches, queries):
        most = max((max_len - query) // block_size, 0) if contexts else 0
        shapes += [
            (batch, query, blocks)
            for blocks in range(most + 1)
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
    """The points of one exponential axis; the last is exactly its max."""
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
    `contiguous`:
    then up to three times the blocks that exist are referred to."""
    most = math.ceil(max_len / block_size) * max_batch
    blocks = min(num_blocks if contiguous else 3 * num_blocks, most)
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
    """Prompt buckets within `budget`, cached context not counted.

    Long contexts get, beside the axis, the most that each query leaves room for, unless that
    reaches `context_max`.
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
    """Decode buckets. Without a contiguous cache none has fewer blocks than rows, or more than its
    rows can hold."""
    batch_axis, _, block_axis = v3_decode_axes(
        max_batch, block_size, max_len, num_blocks, contiguous=contiguous
    )
    batches, blocks = axis_points(batch_axis), axis_points(block_axis)
    if contiguous:
        blocks = sorted({*blocks, num_blocks})
        return [(batch, 1, count) for batch, count in itertools.product(batches, blocks)]
    a_row = math.ceil(max_len / block_size)
    return sorted(
        {
            (batch, 1, min(count, batch * a_row))
            for batch, count in itertools.product(batches, blocks)
            if batch <= count
        }
    )

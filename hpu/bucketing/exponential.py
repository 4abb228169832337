"""The newer exponential rules of vLLM's Gaudi plug-in (0.11 and later), and the padding-aware axis.

Pure functions of numbers. Sources: the plug-in's bucketing guide and its published server logs.
"""

import itertools
import math

from hpu.bucketing.linear import Shape, exponential_points, num_points

Axis = tuple[int, int, int, int]
"""(min, step, max, most points)"""

LONG_CONTEXT = 8192
"""From here on the context axis ends where a whole chunk still follows."""


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
    """(batch, query, blocks) of decodes. BatchState may share blocks unless the cache is
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


def padding_points(low: int, step: int, high: int, pad_max: int, pad_percent: int) -> list[int]:
    """`low` doubled past `step`, then the fewest multiples of `step` between which the padding
    stays within `pad_max` and within `pad_percent` of the bucket.

    Every multiple of `pad_max` is kept too. Ends with `high`.
    """
    points = [low]
    while points[-1] < step and points[-1] < high:
        points.append(max(1, points[-1] * 2))
    points = [point for point in points if point <= high]
    kept = points[-1]
    for current in range(step * (kept // step + 1), high + 1, step):
        after = current + step
        padding = after - kept - 1
        if padding * 100 > pad_percent * after or padding > pad_max or current % pad_max == 0:
            points.append(current)
            kept = current
    return points if points[-1] == high else [*points, high]

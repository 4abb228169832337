"""The strategy `padding-aware`: as few points on every axis as the padding limits allow."""

import itertools
import math

from config.buckets import BucketConfig, Range
from hpu.bucketing.cost import Shapes
from hpu.protocol import BucketLimits

PAD_PERCENT = 25


def padding_aware_buckets(config: BucketConfig, limits: BucketLimits) -> Shapes:
    """Prompt and decode buckets: every combination of the points of the axes."""
    block, budget = limits.block_size, limits.max_query
    chunk_blocks = math.ceil(limits.max_num_batched_tokens / block)
    prompts = list(
        itertools.product(
            _padding_axis(config.prompt_batch, 1, 1, limits.max_prefill_batch),
            _padding_axis(config.prompt_query, block, block, budget),
            _padding_axis(config.prompt_context, 0, 2, limits.blocks_per_seq, pad_max=chunk_blocks),
        )
    )
    decodes = [
        (batch, 1, blocks)
        for batch, blocks in itertools.product(
            _padding_axis(config.decode_batch, 1, 2, limits.max_num_seqs),
            _padding_axis(config.decode_blocks, block, block, limits.max_decode_blocks),
        )
    ]
    return prompts, decodes


def padding_points(low: int, step: int, high: int, pad_max: int, pad_percent: int) -> list[int]:
    """`low` doubled up to `step`, then the fewest multiples of `step` with a padding of at most
    `pad_max`, and at most `pad_percent` of the bucket.

    Multiples of `pad_max` are always included. The last point is `high`.
    """
    points = [low]
    while points[-1] < step and points[-1] < high:
        points.append(max(1, points[-1] * 2))
    points = [point for point in points if point <= high]
    last = points[-1]
    for current in range(step * (last // step + 1), high + 1, step):
        after = current + step
        padding = after - last - 1
        if padding * 100 > pad_percent * after or padding > pad_max or current % pad_max == 0:
            points.append(current)
            last = current
    return points if points[-1] == high else [*points, high]


def _padding_axis(
    given: Range, low: int, step: int, high: int, *, pad_max: int | None = None
) -> list[int]:
    """`padding_points` with the user's limits; `pad_max` None: a quarter of the axis."""
    low = low if given.min is None else given.min
    step = step if given.step is None else given.step
    high = high if given.max is None else given.max
    pad_max = math.ceil(high / 4) if pad_max is None else pad_max
    return padding_points(
        min(low, high),
        step,
        high,
        pad_max if given.pad_max is None else given.pad_max,
        PAD_PERCENT if given.pad_percent is None else given.pad_percent,
    )

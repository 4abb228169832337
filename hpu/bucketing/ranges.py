"""Strategies `linear` and `padding-aware`: every combination of points on user-configurable ranges.
`linear` takes all multiples of a step, `padding-aware` as few points as its padding limits allow.
"""

import itertools
import math

from config.buckets import BucketConfig, Range
from hpu.bucketing.cost import Shapes
from hpu.bucketing.exponential import possible_decodes
from hpu.protocol import BucketLimits

PAD_PERCENT = 25


def range_buckets(config: BucketConfig, limits: BucketLimits) -> Shapes:
    """Prompt and decode buckets."""
    is_linear = config.strategy == "linear"
    axis = _linear_axis if is_linear else _padding_axis
    block = limits.block_size
    chunk_blocks = math.ceil(limits.max_num_batched_tokens / block)
    prompts = itertools.product(
        axis(config.prompt_batch, 1, 1, limits.max_prefill_batch),
        axis(config.prompt_query, block, block, limits.max_query),
        axis(config.prompt_context, 0, 1 if is_linear else 2, limits.blocks_per_seq, chunk_blocks),
    )
    decodes = possible_decodes(
        axis(config.decode_batch, 1, 32 if is_linear else 2, limits.max_num_seqs),
        axis(config.decode_blocks, block, block, limits.max_decode_blocks),
        limits,
    )
    return list(prompts), decodes


def linear_points(low: int, step: int, high: int) -> list[int]:
    """`low` doubled while below `step`, then every multiple of `step` up to `high`.

    If `low` is 0: 0, then the points from `step`. Rule and examples: the bucketing chapter of
    Gaudi's vLLM guide.
    """
    if low == 0:
        return [0, *linear_points(step, step, high)]
    ramp = itertools.takewhile(lambda p: p < min(step, high + 1), (low << i for i in range(64)))
    steady = range(step * math.ceil(low / step), high + 1, step)
    return list(dict.fromkeys([*ramp, *steady]))


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


def _limits(given: Range, low: int, step: int, high: int) -> tuple[int, int, int]:
    """The user's (min, step, max), with these defaults."""
    high = high if given.max is None else given.max
    low = min(low if given.min is None else given.min, high)
    return low, step if given.step is None else given.step, high


def _linear_axis(given: Range, low: int, step: int, high: int, pad_max: int = 0) -> list[int]:
    """`pad_max` is ignored; only `_padding_axis` uses it."""
    return linear_points(*_limits(given, low, step, high))


def _padding_axis(
    given: Range, low: int, step: int, high: int, pad_max: int | None = None
) -> list[int]:
    """`pad_max` None: a quarter of the axis."""
    low, step, high = _limits(given, low, step, high)
    pad_max = math.ceil(high / 4) if pad_max is None else pad_max
    return padding_points(
        low,
        step,
        high,
        pad_max if given.pad_max is None else given.pad_max,
        PAD_PERCENT if given.pad_percent is None else given.pad_percent,
    )

"""Strategies `linear` and `padding-aware`: every combination of points on user-configurable ranges.

`linear` uses all multiples of a step (and smaller points below it), with the defaults of the Gaudi
README of vLLM's fork. `padding-aware` leaves out multiples within its padding limits.
"""

import itertools
import math

from config.buckets import BucketConfig, Range
from hpu.bucketing.cost import Shapes
from hpu.bucketing.exponential import possible_decodes
from hpu.protocol import BucketLimits

PAD_PERCENT = 25
MAX_BATCH_STEP = 32
"""Largest default step of batches."""

Axes = dict[str, tuple[int, ...]]
"""Parameters by dimension name; their number depends on the strategy."""


def range_axes(config: BucketConfig, limits: BucketLimits) -> tuple[Axes, Axes]:
    """Dimensions of prompts and of decodes, with the configured ranges. No query is longer than the
    largest query of a step, rounded up to whole blocks."""
    is_linear = config.strategy == "linear"
    axis = _linear_axis if is_linear else _padding_axis
    block = limits.block_size
    max_query = block * math.ceil(limits.max_query / block)
    batch_step = min(limits.max_num_seqs, MAX_BATCH_STEP)
    # Without prefix caching, only later chunks of a prompt have a context. The table adds a bucket
    # for them for each query.
    context = 0 if is_linear and not limits.prefix_caching else limits.max_context_blocks
    chunk_blocks = math.ceil(limits.max_num_batched_tokens / block)
    prompts = {
        "bs": axis(
            config.prompt_batch, 1, batch_step if is_linear else 1, limits.max_prefill_batch
        ),
        "seq": _within(axis(config.prompt_query, block, block, max_query), max_query),
        "ctx": axis(config.prompt_context, 0, 1 if is_linear else 2, context, chunk_blocks),
    }
    decodes = {
        "bs": axis(config.decode_batch, 1, batch_step if is_linear else 2, limits.max_num_seqs),
        "block": axis(config.decode_blocks, block, block, limits.max_decode_blocks),
    }
    return prompts, decodes


def range_buckets(config: BucketConfig, limits: BucketLimits) -> Shapes:
    """Prompt and decode buckets of `linear` or `padding-aware`."""
    points = linear_points if config.strategy == "linear" else padding_points
    prompts, decodes = range_axes(config, limits)
    batch, query, context = (points(*axis) for axis in prompts.values())
    return list(itertools.product(batch, query, context)), possible_decodes(
        points(*decodes["bs"]), points(*decodes["block"]), limits
    )


def linear_points(low: int, step: int, high: int) -> list[int]:
    """Powers-of-two multiples of `low` below `step`, then the multiples of `step` from `low` to
    `high`.

    If `low` is 0: 0, then the points from `step`. Rule and examples: bucketing chapter of Gaudi's
    vLLM guide.
    """
    if low == 0:
        return [0, *linear_points(step, step, high)]
    ramp = itertools.takewhile(lambda p: p < min(step, high + 1), (low << i for i in range(64)))
    steady = range(step * math.ceil(low / step), high + 1, step)
    return list(dict.fromkeys([*ramp, *steady]))


def padding_points(low: int, step: int, high: int, pad_max: int, pad_percent: int) -> list[int]:
    """`low`, doubled until it is at least `step`, then the fewest multiples of `step` whose padding
    is at most `pad_max` and at most `pad_percent` of the bucket. Where consecutive multiples
    have more padding, every multiple is included.

    Above the doubled points, multiples of both `step` and `pad_max` are always included. The last
    point is `high`.
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


def _within(axis: tuple[int, ...], high: int) -> tuple[int, ...]:
    """`axis` limited to points of at most `high`."""
    low, step, last, *padding = axis
    return (min(low, high), step, min(last, high), *padding)


def _limits(given: Range, low: int, step: int, high: int) -> tuple[int, int, int]:
    """The configured (min, step, max), with these defaults."""
    high = high if given.max is None else given.max
    low = min(low if given.min is None else given.min, high)
    return low, step if given.step is None else given.step, high


def _linear_axis(given: Range, low: int, step: int, high: int, pad_max: int = 0) -> tuple[int, ...]:
    """(min, step, max). `pad_max` is ignored: the caller passes the same arguments to both axis
    functions."""
    return _limits(given, low, step, high)


def _padding_axis(
    given: Range, low: int, step: int, high: int, pad_max: int | None = None
) -> tuple[int, ...]:
    """(min, step, max, pad_max, pad_percent). `pad_max` None: a quarter of the maximum."""
    low, step, high = _limits(given, low, step, high)
    pad_max = math.ceil(high / 4) if pad_max is None else pad_max
    return (
        *(low, step, high),
        pad_max if given.pad_max is None else given.pad_max,
        PAD_PERCENT if given.pad_percent is None else given.pad_percent,
    )

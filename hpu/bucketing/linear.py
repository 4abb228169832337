"""The strategy `linear`: multiples of a step on every axis."""

import itertools
import math

from config.buckets import BucketConfig, Range
from hpu.bucketing.cost import Shapes
from hpu.protocol import BucketLimits


def linear_buckets(config: BucketConfig, limits: BucketLimits) -> Shapes:
    """Prompt and decode buckets: every combination of the points of the axes."""
    block = limits.block_size
    prompts = list(
        itertools.product(
            linear_axis(config.prompt_batch, 1, 1, limits.max_prefill_batch),
            linear_axis(config.prompt_query, block, block, limits.max_query),
            linear_axis(config.prompt_context, 0, 1, limits.blocks_per_seq),
        )
    )
    decodes = [
        (batch, 1, blocks)
        for batch, blocks in itertools.product(
            linear_axis(config.decode_batch, 1, 32, limits.max_num_seqs),
            linear_axis(config.decode_blocks, block, block, limits.max_decode_blocks),
        )
    ]
    return prompts, decodes


def linear_points(low: int, step: int, high: int) -> list[int]:
    """`low` doubled while below `step`, then every multiple of `step` up to `high`.

    With a `low` of 0: 0, then the points from `step`. Rule and examples: the bucketing chapter of
    Gaudi's vLLM guide.
    """
    if low == 0:
        return [0, *linear_points(step, step, high)]
    ramp = itertools.takewhile(lambda p: p < min(step, high + 1), (low << i for i in range(64)))
    steady = range(step * math.ceil(low / step), high + 1, step)
    return list(dict.fromkeys([*ramp, *steady]))


def linear_axis(given: Range, low: int, step: int, high: int) -> list[int]:
    """`linear_points` with the user's limits in place of the defaults."""
    low = low if given.min is None else given.min
    step = step if given.step is None else given.step
    high = high if given.max is None else given.max
    return linear_points(min(low, high), step, high)

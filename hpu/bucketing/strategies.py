"""Which generator a strategy stands for, and the numbers it is given. Pure, but for a file read."""

import itertools
import logging
import math

from config.buckets import BucketConfig, Range
from config.traffic import read_traffic
from hpu.bucketing.exponential import padding_points, v3_decodes, v3_prompts
from hpu.bucketing.fitted import fit
from hpu.bucketing.limits import BucketLimits
from hpu.bucketing.linear import (
    Shape,
    exponential_decodes,
    exponential_prompts,
    linear_axis,
    read_bucket_file,
)
from hpu.bucketing.traffic import launches_of, with_rare

logger = logging.getLogger(__name__)

Shapes = tuple[list[Shape], list[Shape]]
"""Of prompts, of decodes."""

PAD_PERCENT = 25


def generate(config: BucketConfig, limits: BucketLimits) -> Shapes:
    """The shapes of every strategy that prepares any."""
    if config.strategy == "file":
        assert config.file is not None  # BucketConfig holds the two together
        return read_bucket_file(config.file)
    if config.strategy == "fitted":
        assert config.traffic is not None  # likewise
        launches = launches_of(read_traffic(config.traffic), limits)
        return fit(with_rare(launches, limits), config.num_graphs, limits)
    if config.strategy == "exponential":
        _warn_of_ranges(config)
        return _exponential(limits)
    if config.strategy == "exponential-v3":
        _warn_of_ranges(config)
        return _exponential_v3(config, limits)
    return (
        _padding_aware(config, limits)
        if config.strategy == "padding-aware"
        else _linear(config, limits)
    )


def _exponential(limits: BucketLimits) -> Shapes:
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


def _exponential_v3(config: BucketConfig, limits: BucketLimits) -> Shapes:
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


def _linear(config: BucketConfig, limits: BucketLimits) -> Shapes:
    block = limits.block_size
    prompts = list(
        itertools.product(
            linear_axis(config.prompt_batch, 1, 1, limits.max_prefill_batch),
            linear_axis(config.prompt_query, block, block, limits.max_query),
            linear_axis(config.prompt_context, 0, 1, limits.blocks_a_row),
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


def _padding_aware(config: BucketConfig, limits: BucketLimits) -> Shapes:
    block, budget = limits.block_size, limits.max_query
    a_chunk = math.ceil(limits.max_num_batched_tokens / block)
    prompts = list(
        itertools.product(
            _padding_axis(config.prompt_batch, 1, 1, limits.max_prefill_batch),
            _padding_axis(config.prompt_query, block, block, budget),
            _padding_axis(config.prompt_context, 0, 2, limits.blocks_a_row, pad_max=a_chunk),
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


def _padding_axis(
    given: Range, low: int, step: int, high: int, *, pad_max: int | None = None
) -> list[int]:
    """`padding_points` with what the user gave; `pad_max` None: a quarter of the axis."""
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


def _warn_of_ranges(config: BucketConfig) -> None:
    ranges = {
        "prompt-bs": config.prompt_batch,
        "prompt-query": config.prompt_query,
        "prompt-ctx": config.prompt_context,
        "decode-bs": config.decode_batch,
        "decode-block": config.decode_blocks,
    }
    if config.strategy == "exponential-v3":
        # The two that it knows: from a query of one token, and a ceiling of the added contexts.
        if config.prompt_query == Range(min=1):
            del ranges["prompt-query"]
        if config.prompt_context == Range(max=config.prompt_context.max):
            del ranges["prompt-ctx"]
    if config.prompt_batch == Range(max=config.prompt_batch.max):
        # The most prompts of a launch bounds the schedule too, see config/loading/sources.py.
        del ranges["prompt-bs"]
    given = [name for name, value in ranges.items() if value != Range()]
    if given:
        logger.warning(
            "strategy %s chooses its own ranges; the limits given for %s change nothing",
            config.strategy,
            ", ".join(given),
        )

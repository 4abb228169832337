"""Generation of buckets by strategy name."""

import logging
import math

from config.buckets import BucketConfig, Range
from config.traffic import read_traffic
from hpu.bucketing.cost import Shapes
from hpu.bucketing.exponential import (
    exponential_decodes,
    exponential_prompts,
    v3_decodes,
    v3_prompts,
)
from hpu.bucketing.file import read_bucket_file
from hpu.bucketing.fitted import fit
from hpu.bucketing.ranges import range_buckets
from hpu.bucketing.traffic import general_launches, launches_of, with_rare
from hpu.protocol import BucketLimits

logger = logging.getLogger(__name__)

GAUDI_STRATEGY, POOLING_STRATEGY = "fitted", "exponential-v3"
"""Strategies that `auto` selects on a Gaudi, for models that generate and for pooling models."""

GRAPHS_PER_DOUBLING = 13
"""Fitted buckets for each doubling of the blocks of a full context: 78 for 8192 tokens, 130 for
131,072."""


def generate_buckets(config: BucketConfig, limits: BucketLimits) -> Shapes:
    """Prompt and decode shapes of every strategy except `exact`, which has no shapes."""
    if config.strategy == "file":
        assert config.file is not None  # checked by BucketConfig
        return read_bucket_file(config.file)
    if config.strategy == "fitted":
        if config.traffic:
            launches = launches_of(read_traffic(config.traffic), limits)
        else:
            launches = general_launches(limits)
        num_graphs = config.num_graphs or default_graphs(limits)
        return fit(with_rare(launches, limits), num_graphs, limits)
    if config.strategy == "exponential":
        _warn_of_ignored_ranges(config)
        return exponential_prompts(limits), exponential_decodes(limits)
    if config.strategy == "exponential-v3":
        _warn_of_ignored_ranges(config)
        prompts = v3_prompts(
            limits, query_min=config.prompt_query.min, context_max=config.prompt_context.max
        )
        return prompts, v3_decodes(limits)
    return range_buckets(config, limits)


def default_graphs(limits: BucketLimits) -> int:
    """Maximum number of fitted buckets, unless configured."""
    doublings = math.log2(limits.blocks_per_seq)
    most = len(v3_prompts(limits)) + len(v3_decodes(limits))
    return max(2, min(round(GRAPHS_PER_DOUBLING * doublings), most))


def _warn_of_ignored_ranges(config: BucketConfig) -> None:
    ranges = {
        "prompt-bs": config.prompt_batch,
        "prompt-query": config.prompt_query,
        "prompt-ctx": config.prompt_context,
        "decode-bs": config.decode_batch,
        "decode-block": config.decode_blocks,
    }
    if config.strategy == "exponential-v3":
        # Two ranges are used: queries from 1 token, and the largest additional context.
        if config.prompt_query == Range(min=1):
            del ranges["prompt-query"]
        if config.prompt_context == Range(max=config.prompt_context.max):
            del ranges["prompt-ctx"]
    if config.prompt_batch == Range(max=config.prompt_batch.max):
        # The maximum also limits the prompts of a launch (config/loading/sources.py).
        del ranges["prompt-bs"]
    given = [name for name, value in ranges.items() if value != Range()]
    if given:
        logger.warning(
            "strategy %s chooses its own ranges; the limits given for %s have no effect",
            config.strategy,
            ", ".join(given),
        )

"""Generates the buckets of a strategy, selected by its name."""

import math
from collections.abc import Sequence

from config.buckets import BucketConfig
from config.traffic import read_traffic
from hpu.bucketing.cost import Shapes
from hpu.bucketing.exponential import (
    Axis,
    exponential_decode_axes,
    exponential_decodes,
    exponential_prompt_axes,
    exponential_prompts,
    v3_decode_axes,
    v3_decodes,
    v3_prompt_axes,
    v3_prompts,
)
from hpu.bucketing.file import read_bucket_file
from hpu.bucketing.fitted import fit
from hpu.bucketing.ranges import Axes, range_axes, range_buckets
from hpu.bucketing.traffic import general_launches, launches_of, with_rare
from hpu.protocol import BucketLimits

GAUDI_STRATEGY, POOLING_STRATEGY = "fitted", "exponential-v3"
"""Strategies that `auto` selects on a Gaudi, for models that generate and for pooling models,
unless configured ranges need another strategy."""

GRAPHS_PER_DOUBLING = 13
"""Maximum fitted buckets per doubling of the blocks of a full context: with blocks of 128, 78
buckets for 8192 tokens and 130 for 131,072."""


def generate_buckets(config: BucketConfig, limits: BucketLimits) -> Shapes:
    """Prompt and decode shapes of any strategy except `exact`, which has no shapes."""
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
        return exponential_prompts(limits), exponential_decodes(limits)
    if config.strategy == "exponential-v3":
        prompts = v3_prompts(
            limits, query_min=config.prompt_query.min, context_max=config.prompt_context.max
        )
        return prompts, v3_decodes(limits)
    return range_buckets(config, limits)


PARAMETERS = {
    "exponential": "min, step, max_warmup, limit",
    "exponential-v3": "min, step, max_warmup, limit",
    "linear": "min, step, max_warmup",
    "padding-aware": "min, step, max_warmup, pad_max, pad_percent",
}
"""Names of the parameters of a dimension, by strategy."""


def bucket_axes(config: BucketConfig, limits: BucketLimits) -> tuple[Axes, Axes]:
    """Dimensions of prompts and of decodes for a strategy in PARAMETERS: parameters by dimension
    name."""
    if config.strategy in ("linear", "padding-aware"):
        return range_axes(config, limits)
    prompts: tuple[Axis, ...]
    decodes: tuple[Axis, ...]
    if config.strategy == "exponential":
        prompts, decodes = exponential_prompt_axes(limits), exponential_decode_axes(limits)
        return _named(("bs", "seq"), prompts), _named(("bs", "block"), decodes)
    prompts = v3_prompt_axes(limits, query_min=config.prompt_query.min)
    names = ("bs", "query", "blocks")
    return _named(names, prompts), _named(names, v3_decode_axes(limits))


def _named(names: Sequence[str], axes: Sequence[Axis]) -> Axes:
    return dict(zip(names, axes, strict=True))


def default_graphs(limits: BucketLimits) -> int:
    """Default maximum number of fitted buckets."""
    doublings = math.log2(limits.blocks_per_seq)
    most = len(v3_prompts(limits)) + len(v3_decodes(limits))
    return max(2, min(round(GRAPHS_PER_DOUBLING * doublings), most))

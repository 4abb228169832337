"""Launches for the lengths of real requests: a small, pure model of the scheduler."""

import math
import random
from collections import Counter
from typing import NamedTuple

from config.traffic import Lengths
from hpu.bucketing.cost import LAUNCH_TOKENS, launch_cost
from hpu.protocol import DECODE, PREFILL, Bucket, BucketLimits

Launches = dict[Bucket, float]
"""(phase, batch, query, blocks) before padding -> frequency."""

SAMPLE = 512
"""Requests drawn from a traffic; more requests change the boundaries little."""

LOADS = 12
"""Number of simulated loads, from 1 sequence to max_num_seqs, in a constant ratio."""


RARE_FRACTION = 0.02
"""Cost that `with_rare` adds, as a fraction of the traffic's prefill cost."""


class _Running(NamedTuple):
    context: int
    remaining: int


def launches_of(traffic: list[Lengths], limits: BucketLimits) -> Launches:
    """Launches of `traffic` at several loads, from 1 sequence to max_num_seqs.

    Lengths do not tell the load of a server, so every load has equal weight in modelled cost.
    """
    requests = [_clipped(one, limits.max_model_len) for one in _sample(traffic)]
    loads = sorted({round(limits.max_num_seqs ** (i / (LOADS - 1))) for i in range(LOADS)})
    total: Counter[Bucket] = Counter()
    for load in loads:
        launches = _run(requests, load, limits)
        cost = sum(
            count * launch_cost(*shape, limits.block_size) for shape, count in launches.items()
        )
        for shape, count in launches.items():
            total[shape] += count / cost  # type: ignore[assignment]  # a Counter of floats
    return dict(total)


def with_rare(launches: Launches, limits: BucketLimits) -> Launches:
    """`launches`, and a few prompts of every size: sizes missing in the traffic may still occur,
    and should not be padded to the largest bucket."""
    queries = {limits.max_query >> i for i in range(8)} - {0}
    contexts = {0, *(limits.blocks_per_seq // part for part in (8, 4, 2))}
    rare = [(PREFILL, 1, query, blocks) for query in queries for blocks in contexts]
    cost = sum(
        count * launch_cost(*shape, limits.block_size)
        for shape, count in launches.items()
        if shape[0] == PREFILL
    )
    both = dict(launches)
    for shape in rare:
        share = RARE_FRACTION * cost / len(rare) / launch_cost(*shape, limits.block_size)
        both[shape] = both.get(shape, 0.0) + share
    return both


def _sample(traffic: list[Lengths]) -> list[Lengths]:
    """Requests drawn evenly over the total weight, shuffled with a fixed seed: the engine and the
    worker must build the same table."""
    total = sum(one.weight for one in traffic)
    count = min(SAMPLE, len(traffic)) if total == len(traffic) else SAMPLE
    ordered = sorted(traffic, key=lambda one: (one.prompt_tokens, one.output_tokens))
    chosen: list[Lengths] = []
    reached = 0.0
    for one in ordered:
        reached += one.weight
        while len(chosen) < count and (len(chosen) + 0.5) * total / count <= reached:
            chosen.append(one)
    random.Random(0).shuffle(chosen)
    return chosen


def _clipped(one: Lengths, max_model_len: int) -> Lengths:
    prompt = min(one.prompt_tokens, max_model_len)
    cached = min(one.cached_tokens, prompt - 1)
    return Lengths(prompt, min(one.output_tokens, max_model_len - prompt), cached)


def _run(requests: list[Lengths], load: int, limits: BucketLimits) -> Counter[Bucket]:
    """Launches of all requests with `load` of them at a time. A step decodes all running requests,
    and computes as many prompt tokens as the budget leaves."""
    launches: Counter[Bucket] = Counter()
    size = limits.block_size
    waiting = requests[::-1]
    prompts: list[tuple[Lengths, int]] = []
    running: list[_Running] = []
    stride = max(8, max(one.output_tokens for one in requests) // 64)
    while waiting or prompts or running:
        while waiting and len(prompts) + len(running) < load:
            one = waiting.pop()
            prompts.append((one, one.cached_tokens // size * size))
        if running:
            # Between two arrivals only the contexts grow: count a shape for several steps.
            steps = 1 if prompts else min(stride, *(one.remaining for one in running))
            blocks = sum(-(-(one.context + steps // 2) // size) for one in running)
            blocks = min(max(blocks, len(running)), limits.max_decode_blocks)
            launches[DECODE, len(running), 1, blocks] += steps
            advanced = (_Running(one.context + steps, one.remaining - steps) for one in running)
            running = [one for one in advanced if one.remaining > 0]
        if prompts:
            prompts = _prefill(prompts, running, launches, limits)
    return launches


def _prefill(
    prompts: list[tuple[Lengths, int]],
    running: list[_Running],
    launches: Counter[Bucket],
    limits: BucketLimits,
) -> list[tuple[Lengths, int]]:
    """Count a step's chunks in `launches` and append finished prompts to `running`. Returns the
    unfinished prompts."""
    budget = max(1, limits.max_num_batched_tokens - len(running))
    left: list[tuple[Lengths, int]] = []
    chunks: list[tuple[int, int]] = []
    for one, done in prompts:
        query = min(one.prompt_tokens - done, budget, limits.max_query)
        budget -= query
        if query:
            chunks.append((query, math.ceil(done / limits.block_size)))
        if done + query < one.prompt_tokens:
            left.append((one, done + query))
        elif one.output_tokens > 1:
            running.append(_Running(one.prompt_tokens + 1, one.output_tokens - 1))
    for shape in _merged(sorted(chunks), limits):
        launches[shape] += 1
    return left


def _merged(chunks: list[tuple[int, int]], limits: BucketLimits) -> list[Bucket]:
    """Merge chunks of similar length while the padding costs less than another launch."""
    launches: list[Bucket] = []
    for query, blocks in chunks:
        if launches:
            _, batch, shorter, context = launches[-1]
            padded = batch * (query - shorter)
            fits = (batch + 1) * query <= limits.max_num_batched_tokens
            if batch < limits.max_prefill_batch and fits and padded <= LAUNCH_TOKENS:
                launches[-1] = (PREFILL, batch + 1, query, max(context, blocks))
                continue
        launches.append((PREFILL, 1, query, blocks))
    return launches

"""Launches for the lengths of real requests: a simplified, pure simulation of the scheduler."""

import math
import random
from collections import Counter
from functools import lru_cache

import numpy as np

from config.traffic import Lengths
from hpu.bucketing.cost import LAUNCH_TOKENS, launch_cost
from hpu.protocol import DECODE, PREFILL, Bucket, BucketLimits

Launches = dict[Bucket, float]
"""Frequency of each (phase, batch, query, blocks) before padding."""

SAMPLE = 512
"""Number of requests drawn from the traffic, unless the highest load needs more or traffic without
weights has fewer. More requests hardly change the boundaries."""

LOADS = 12
"""Maximum number of simulated loads, from 1 sequence to max_num_seqs, in a constant ratio."""


RARE_FRACTION = 0.02
"""Cost that `with_rare` adds to each phase, as a fraction of the phase's cost."""

GENERAL = ((400, 250, 1.0), (1500, 400, 1.0), (3000, 200, 1.0), (6000, 800, 0.3))
"""(median prompt tokens, median output tokens, weight) of the general traffic: chats, code,
summaries, and long conversations, which would otherwise be padded to the largest buckets."""

GENERAL_SIGMAS = (0.8, 0.7)
"""Standard deviations of the logarithms of the general prompt and output lengths."""

WAVES, LEAST_REQUESTS = 4, 64
"""Requests simulated at a load: WAVES times the load, at least LEAST_REQUESTS, at most all."""

GENERAL_SPREAD = (0.7, 0.85, 1.0, 1.2, 1.45)

GENERAL_CONTEXT = 4096
"""max_model_len below which the general traffic has shorter requests."""


_Prompt = tuple[Lengths, int]
"""A request, and the number of its prompt tokens that are computed or cached."""


def launches_of(traffic: list[Lengths], limits: BucketLimits) -> Launches:
    """Launches of `traffic` at several loads, from 1 sequence to max_num_seqs.

    Lengths do not determine a server's load, so all loads have equal weight in modelled cost.
    """
    requests = [_clipped(lengths, limits) for lengths in _sample(traffic, limits)]
    loads = sorted({round(limits.max_num_seqs ** (i / (LOADS - 1))) for i in range(LOADS)})
    total: Counter[Bucket] = Counter()
    for load in loads:
        launches = _run(requests[: max(LEAST_REQUESTS, WAVES * load)], load, limits)
        cost = sum(
            count * launch_cost(*shape, limits.block_size) for shape, count in launches.items()
        )
        for shape, count in launches.items():
            total[shape] += count / cost  # type: ignore[assignment]  # a Counter of floats
    return dict(total)


# Cached, because it takes about a second.
@lru_cache(maxsize=4)
def general_launches(limits: BucketLimits) -> Launches:
    """Launches of servers for the requests of GENERAL, as a default for unknown traffic. With
    prefix caching, a quarter of the prompts start with a cached prefix. Callers must not change the
    result."""
    rng = random.Random(0)
    total: Counter[Bucket] = Counter()
    scale = min(1.0, limits.max_model_len / GENERAL_CONTEXT)
    for *medians, weight in GENERAL:
        traffic = []
        for number in range(max(LEAST_REQUESTS, WAVES * limits.max_num_seqs)):
            prompt, output = (
                math.ceil(scale * median * rng.lognormvariate(0, sigma))
                for median, sigma in zip(medians, GENERAL_SIGMAS, strict=True)
            )
            cached = 0 if number % 4 else int(prompt * rng.random())
            traffic.append(Lengths(prompt, output, cached))
        for launch, frequency in launches_of(traffic, limits).items():
            total[launch] += weight * frequency  # type: ignore[assignment]
    return _spread(dict(total), limits)


def _spread(launches: Launches, limits: BucketLimits) -> Launches:
    """`launches` with the blocks of each decode multiplied by each of GENERAL_SPREAD, because a
    server's contexts are shorter or longer than the simulated contexts."""
    spread: Counter[Bucket] = Counter()
    for (phase, batch, query, blocks), weight in launches.items():
        if phase == PREFILL:
            spread[phase, batch, query, blocks] += weight  # type: ignore[assignment]
            continue
        for factor in GENERAL_SPREAD:
            most = min(limits.max_decode_blocks, batch * limits.blocks_per_seq)
            scaled = max(batch, min(round(factor * blocks), most))
            spread[phase, batch, query, scaled] += weight / len(GENERAL_SPREAD)  # type: ignore[assignment]
    return dict(spread)


def with_rare(launches: Launches, limits: BucketLimits) -> Launches:
    """`launches` plus a few prompts and decodes of many sizes: sizes missing in the traffic may
    still occur, and should not be padded to the largest bucket."""
    queries = {limits.max_query >> i for i in range(8)} - {0}
    contexts = {0, *(limits.max_context_blocks // part for part in (8, 4, 2))}
    batches = {limits.max_num_seqs >> i for i in range(8)} - {0}
    decodes = {
        (DECODE, batch, 1, max(batch, min(batch * blocks, limits.max_decode_blocks)))
        for batch in batches
        for blocks in (limits.blocks_per_seq // part for part in (8, 4, 2, 1))
    }
    prompts = {(PREFILL, 1, query, blocks) for query in queries for blocks in contexts}
    both = dict(launches)
    for phase, rare in ((PREFILL, prompts), (DECODE, decodes)):
        cost = sum(
            count * launch_cost(*shape, limits.block_size)
            for shape, count in launches.items()
            if shape[0] == phase
        )
        for shape in sorted(rare):
            share = RARE_FRACTION * cost / len(rare) / launch_cost(*shape, limits.block_size)
            both[shape] = both.get(shape, 0.0) + share
    return both


def _sample(traffic: list[Lengths], limits: BucketLimits) -> list[Lengths]:
    """Requests drawn evenly over the total weight, shuffled with a fixed seed, so that every start
    builds the same table."""
    total = sum(lengths.weight for lengths in traffic)
    count = max(SAMPLE, WAVES * limits.max_num_seqs)
    if total == len(traffic):
        count = min(count, len(traffic))
    ordered = sorted(traffic, key=lambda lengths: (lengths.prompt_tokens, lengths.output_tokens))
    chosen: list[Lengths] = []
    reached = 0.0
    for lengths in ordered:
        reached += lengths.weight
        while len(chosen) < count and (len(chosen) + 0.5) * total / count <= reached:
            chosen.append(lengths)
    random.Random(0).shuffle(chosen)
    return chosen


def _clipped(lengths: Lengths, limits: BucketLimits) -> Lengths:
    prompt = min(lengths.prompt_tokens, limits.max_model_len)
    if limits.is_pooling:
        return Lengths(prompt, 0)
    cached = min(lengths.cached_tokens, prompt - 1) if limits.prefix_caching else 0
    return Lengths(prompt, min(lengths.output_tokens, limits.max_model_len - prompt), cached)


def _run(requests: list[Lengths], load: int, limits: BucketLimits) -> Counter[Bucket]:
    """Launches of all requests, with `load` requests running at a time. A step decodes all running
    requests, and computes as many prompt tokens as the budget allows, or whole prompts up to the
    budget."""
    launches: Counter[Bucket] = Counter()
    size = limits.block_size
    waiting = requests[::-1]
    prompts: list[_Prompt] = []
    contexts = remaining = np.zeros(0, np.int64)
    stride = max(8, max(request.output_tokens for request in requests) // 64)
    while waiting or prompts or len(contexts):
        while waiting and len(prompts) + len(contexts) < load:
            request = waiting.pop()
            prompts.append((request, request.cached_tokens // size * size))
        if len(contexts):
            # Between two arrivals only the contexts grow: count a shape for several steps at once.
            steps = 1 if prompts else min(stride, int(remaining.min()))
            blocks = int((-(-(contexts + steps // 2) // size)).sum())
            blocks = min(max(blocks, len(contexts)), limits.max_decode_blocks)
            launches[DECODE, len(contexts), 1, blocks] += steps
            remaining = remaining - steps
            runs = remaining > 0
            contexts, remaining = contexts[runs] + steps, remaining[runs]
        if prompts:
            prompts, started = _prefill(prompts, len(contexts), launches, limits)
            if started:
                added = np.array(started, np.int64)
                contexts = np.concatenate((contexts, added[:, 0]))
                remaining = np.concatenate((remaining, added[:, 1]))
    return launches


def _prefill(
    prompts: list[_Prompt], num_running: int, launches: Counter[Bucket], limits: BucketLimits
) -> tuple[list[_Prompt], list[tuple[int, int]]]:
    """Count a step's chunks in `launches`. Returns the unfinished prompts, and (context, remaining
    tokens) of the prompts that start to decode."""
    divides = limits.chunked_prefill
    budget = limits.max_num_batched_tokens
    if divides:
        budget = max(1, budget - num_running)
    left: list[_Prompt] = []
    started: list[tuple[int, int]] = []
    chunks: list[tuple[int, int]] = []
    for number, (lengths, done) in enumerate(prompts):
        rest = lengths.prompt_tokens - done
        if not budget or (rest > budget and not divides):
            left += prompts[number:]
            break
        query = min(rest, budget, limits.max_query)
        budget -= query
        chunks.append((query, math.ceil(done / limits.block_size)))
        if done + query < lengths.prompt_tokens:
            left.append((lengths, done + query))
        elif lengths.output_tokens > 1:
            started.append((lengths.prompt_tokens + 1, lengths.output_tokens - 1))
    for shape in _merged(sorted(chunks), limits):
        launches[shape] += 1
    return left, started


def _merged(chunks: list[tuple[int, int]], limits: BucketLimits) -> list[Bucket]:
    """Launches of sorted chunks. A chunk joins the launch of the chunk before it if `limits` allow
    it and the additional padding costs at most as much as another launch."""
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

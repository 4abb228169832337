"""What a worker tells its operator while it starts: memory, buckets, warm-up steps, graphs. One
line for each decision; decides nothing."""

import logging

from config.engine import CacheConfig
from config.execution import WarmupConfig
from hpu.bucketing.bucket_table import BucketTable
from hpu.profiling.counters import phase_name
from hpu.protocol import DECODE, PREFILL
from hpu.worker.memory import GIB, FreeMemory, KVCacheDemand, MemorySplit, split_graphs

logger = logging.getLogger(__name__)

Bucket = tuple[int, int, int, int]

NAMED = 12
"""Buckets that a line about what is missing names; the rest is counted."""


def log_memory(
    split: MemorySplit, cache: CacheConfig, found: FreeMemory, warmup: WarmupConfig
) -> None:
    """The split of a device with memory of its own."""
    logger.info(
        "Memory: %.2f GiB free after loading, less %.2f GiB for the largest launch (%s); %.2f GiB "
        "of the rest usable (gpu-memory-utilization %g)",
        found.free / GIB,
        found.reserve / GIB,
        "measured" if found.is_measured else "estimated",
        split.usable_bytes / GIB,
        cache.gpu_memory_utilization,
    )
    if split.graph_bytes:
        prompt, decode = split_graphs(
            split.graph_bytes / GIB, prompt_ratio=warmup.graph_prompt_ratio
        )
        logger.info(
            "GraphCache: %.2f GiB reserved (graph-reserved-mem %g), %.2f GiB for prompts "
            "(graph-prompt-ratio %g) and %.2f GiB for decodes",
            split.graph_bytes / GIB,
            warmup.graph_memory_fraction,
            prompt,
            warmup.graph_prompt_ratio,
            decode,
        )


def log_cache(split: MemorySplit, cache: CacheConfig, wanted: KVCacheDemand) -> None:
    """The KV cache, and how much it holds."""
    logger.info(
        "KV cache: %d blocks of %d tokens%s, %.2f GiB: %.1f sequences of %d tokens at once",
        split.num_blocks,
        wanted.block_size,
        "" if cache.num_blocks is None else " as told",
        (split.num_blocks + 1) * wanted.block_bytes / GIB,
        split.num_blocks / wanted.context_blocks,
        wanted.max_model_len,
    )


def log_buckets(table: BucketTable, strategy: str) -> None:
    """Each dimension of a table that pads, and the lists."""
    if table.is_exact:
        return
    for phase, names in (
        (PREFILL, ("batch", "query", "context blocks")),
        (DECODE, ("batch", "query", "blocks")),
    ):
        shapes = [bucket[1:] for bucket in table.buckets if bucket[0] == phase]
        if not shapes:
            continue
        sizes = ", ".join(
            f"{name} {_span([shape[place] for shape in shapes])}"
            for place, name in enumerate(names)
            if phase == PREFILL or name != "query"
        )
        listed = [shape if phase == PREFILL else (shape[0], shape[2]) for shape in shapes]
        logger.info("%s bucket config (%s): %s", _title(phase), strategy, sizes)
        logger.info("%d %s buckets: %s", len(shapes), _word(phase), listed)


def log_unneeded(count: int) -> None:
    """Buckets that no launch can ever take."""
    if count:
        logger.info(
            "%d buckets are not prepared: they hold more blocks than their rows can, at this "
            "--max-model-len",
            count,
        )


def log_step(bucket: Bucket, number: int, total: int, free_bytes: int, *, graph: bool) -> None:
    """One bucket of a warm-up, with the memory that it left."""
    phase, batch, query, blocks = bucket
    logger.info(
        "Warm-up, %s%s %d/%d: batch %d, %s; %.2f GiB free",
        "graph of " if graph else "",
        _word(phase),
        number,
        total,
        batch,
        f"query {query}, {blocks} context blocks" if phase == PREFILL else f"{blocks} blocks",
        free_bytes / GIB,
    )


def log_graphs(phase: int, captured: list[Bucket], total: int, taken: int, seconds: float) -> None:
    """Which buckets of a phase have a graph now."""
    logger.info(
        "Captured %d of %d %s buckets in %.1f s, %.3f GiB: %s",
        len(captured),
        total,
        _word(phase),
        seconds,
        taken / GIB,
        [bucket[1:] for bucket in captured],
    )


def log_left_out(phase: int, left_out: list[Bucket], warmup: WarmupConfig, *, full: bool) -> None:
    """Buckets without a graph, and what would give them one. `full`: the device had no memory left,
    not only the share that was reserved."""
    reserve = f"raise --graph-reserved-mem (now {warmup.graph_memory_fraction:g})"
    if full:
        reserve = "lower --gpu-memory-utilization, which leaves more to graphs and launches"
    ratio = "raise" if phase == PREFILL else "lower"
    logger.warning(
        "%d %s buckets have no graph and run without one, since %s: %s. To capture more, %s, %s "
        "--graph-prompt-ratio (now %g), or prepare fewer buckets",
        len(left_out),
        _word(phase),
        "the device's memory is full" if full else "the memory reserved for graphs is used up",
        _some(left_out),
        reserve,
        ratio,
        warmup.graph_prompt_ratio,
    )


def log_unfit(bucket: Bucket) -> None:
    """A bucket that cannot run at all beside weights and cache."""
    logger.warning(
        "The %s bucket %s does not fit into the device's memory and is not used. To keep it, lower "
        "--gpu-memory-utilization, or the number of KV blocks where it was given; to do without, "
        "lower %s",
        phase_name(bucket[0]),
        bucket[1:],
        "--max-num-batched-tokens" if bucket[0] == PREFILL else "--max-num-seqs",
    )


def _some(buckets: list[Bucket]) -> str:
    named = ", ".join(str(bucket[1:]) for bucket in buckets[:NAMED])
    more = len(buckets) - NAMED
    return f"{named} and {more} more" if more > 0 else named


def _span(sizes: list[int]) -> str:
    least, most, count = min(sizes), max(sizes), len(set(sizes))
    return f"{least}" if count == 1 else f"{least} to {most} ({count} sizes)"


def _word(phase: int) -> str:
    return "prompt" if phase == PREFILL else "decode"


def _title(phase: int) -> str:
    return _word(phase).capitalize()

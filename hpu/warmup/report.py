"""Log lines of a warm-up: buckets, steps, graphs."""

import logging

from config.errors import bytes_text
from config.execution import WarmupConfig
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import DECODE, PREFILL, Bucket
from hpu.runner.counters import phase_name

logger = logging.getLogger(__name__)

MAX_LISTED = 12
"""Maximum number of buckets that a log line lists; the rest are only counted."""


def log_buckets(table: BucketTable, strategy: str) -> None:
    """Log the dimensions and buckets of `table`, unless it is exact."""
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
            f"{name} {_size_range([shape[index] for shape in shapes])}"
            for index, name in enumerate(names)
            if phase == PREFILL or name != "query"
        )
        listed = [shape if phase == PREFILL else (shape[0], shape[2]) for shape in shapes]
        logger.info("%s bucket config (%s): %s", _title(phase), strategy, sizes)
        logger.info("%d %s buckets: %s", len(shapes), _phase_word(phase), listed)


def log_unused(count: int) -> None:
    """Log the number of buckets that no launch can use."""
    if count:
        logger.info(
            "%d buckets are not prepared: they hold more blocks than their rows can, at this "
            "--max-model-len",
            count,
        )


def log_step(bucket: Bucket, number: int, total: int, free_bytes: int, *, graph: bool) -> None:
    """Log a warmed-up bucket and the free memory after it."""
    phase, batch, query, blocks = bucket
    logger.info(
        "Warm-up, %s%s %d/%d: batch %d, %s; %s free",
        "graph of " if graph else "",
        _phase_word(phase),
        number,
        total,
        batch,
        f"query {query}, {blocks} context blocks" if phase == PREFILL else f"{blocks} blocks",
        bytes_text(free_bytes),
    )


def log_graphs(phase: int, captured: list[Bucket], total: int, taken: int, seconds: float) -> None:
    """Log the captured buckets of a phase."""
    logger.info(
        "Captured %d of %d %s buckets in %.1f s, %s: %s",
        len(captured),
        total,
        _phase_word(phase),
        seconds,
        bytes_text(taken),
        [bucket[1:] for bucket in captured],
    )


def log_not_captured(
    phase: int, not_captured: list[Bucket], warmup: WarmupConfig, *, full: bool
) -> None:
    """Log buckets without a graph and the settings that would help. `full`: the device's memory is
    used up, not only the share for graphs."""
    reserve = f"raise --graph-reserved-mem (now {warmup.graph_memory_fraction:g})"
    if full:
        reserve = "lower --gpu-memory-utilization, which leaves more to graphs and launches"
    ratio = "raise" if phase == PREFILL else "lower"
    logger.warning(
        "%d %s buckets have no graph and run without one, since %s: %s. To capture more, %s, %s "
        "--graph-prompt-ratio (now %g), or prepare fewer buckets",
        len(not_captured),
        _phase_word(phase),
        "the device's memory is full" if full else "the memory reserved for graphs is used up",
        _listed(not_captured),
        reserve,
        ratio,
        warmup.graph_prompt_ratio,
    )


def log_uncompilable(bucket: Bucket, error: Exception) -> None:
    """Log a bucket that the device's compiler refuses."""
    logger.error("Bucket %s is left out, it cannot be compiled: %s", bucket, error)


def log_too_large(bucket: Bucket) -> None:
    """Log a bucket that does not fit into the memory that weights and KV cache leave."""
    logger.warning(
        "The %s bucket %s does not fit into the device's memory and is not used. To keep it, lower "
        "--gpu-memory-utilization, or the number of KV blocks where it was given; to do without, "
        "lower %s",
        phase_name(bucket[0]),
        bucket[1:],
        "--max-num-batched-tokens" if bucket[0] == PREFILL else "--max-num-seqs",
    )


def _listed(buckets: list[Bucket]) -> str:
    listed = ", ".join(str(bucket[1:]) for bucket in buckets[:MAX_LISTED])
    more = len(buckets) - MAX_LISTED
    return f"{listed} and {more} more" if more > 0 else listed


def _size_range(sizes: list[int]) -> str:
    least, most, count = min(sizes), max(sizes), len(set(sizes))
    return f"{least}" if count == 1 else f"{least} to {most} ({count} sizes)"


def _phase_word(phase: int) -> str:
    return "prompt" if phase == PREFILL else "decode"


def _title(phase: int) -> str:
    return _phase_word(phase).capitalize()

"""Log lines of a warm-up: buckets, steps, graphs."""

import logging

from config.buckets import BucketConfig
from config.errors import bytes_text
from config.execution import WarmupConfig
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.select import PARAMETERS, bucket_axes
from hpu.protocol import DECODE, PREFILL, Bucket, Shape
from hpu.runner.counters import phase_name

logger = logging.getLogger(__name__)

MAX_LISTED = 12
"""Maximum number of buckets that `log_not_captured` lists; the rest are only counted."""


def log_buckets(table: BucketTable, config: BucketConfig, configured: BucketConfig) -> None:
    """Log the dimensions and buckets of `table`, made with `config`. Without padding, log only
    the ranges of `configured` that have no effect. The lines have the format of vLLM's Gaudi
    plug-in."""
    if table.is_exact:
        if ignored := configured.ignored_ranges(config.strategy):
            logger.info("%s have no effect: launches are not padded", ", ".join(ignored))
        return
    for phase in table.phases:
        shapes = [bucket[1:] for bucket in table.buckets if bucket[0] == phase]
        if config.strategy in PARAMETERS:
            parameters = PARAMETERS[config.strategy]
            axes = bucket_axes(config, table.limits)[phase == DECODE]
            sizes = ", ".join(f"{name}:{list(axis)}" for name, axis in axes.items())
        else:
            parameters, sizes = config.strategy, _sizes(phase, shapes)
        logger.info("%s bucket config (%s) %s", _title(phase), parameters, sizes)
        logger.info(
            "Generated %d %s buckets [bs, query, num_blocks]: %s",
            len(shapes),
            _phase_word(phase),
            shapes,
            extra={"fields": {"phase": _phase_word(phase), "num_buckets": len(shapes)}},
        )


def log_unused(count: int) -> None:
    """Log the number of buckets that no launch can use."""
    if count:
        logger.info(
            "%d buckets are not prepared: they have more blocks than their rows can use at this "
            "--max-model-len",
            count,
        )


def log_step(bucket: Bucket, number: int, total: int, free_bytes: int, *, graph: bool) -> None:
    """Log a bucket that was run or captured, and the free memory after it."""
    phase, batch, query, blocks = bucket
    fields = {
        "phase": _phase_word(phase),
        "number": number,
        "total": total,
        "batch_size": batch,
        "query_len": query,
        "num_blocks": blocks,
        "free_bytes": free_bytes,
        "has_graph": graph,
    }
    logger.info(
        "[Warmup][%s%s][%d/%d] batch_size:%d query_len:%d num_blocks:%d free_mem:%s",
        "Graph/" if graph else "",
        _phase_word(phase) if graph else _title(phase),
        *(number, total, batch, query, blocks),
        bytes_text(free_bytes),
        extra={"fields": fields},
    )


def log_graph_memory(graph_bytes: float, shares: dict[int, float], free: int, ratio: float) -> None:
    """Log how the memory for graphs is split between the phases."""
    logger.info(
        "Using %s/%s of free device memory for HPUGraphs, %s for prompt and %s for decode "
        "(VLLM_GRAPH_PROMPT_RATIO=%g)",
        bytes_text(graph_bytes),
        bytes_text(free),
        bytes_text(shares[PREFILL]),
        bytes_text(shares[DECODE]),
        ratio,
        extra={"fields": {"graph_bytes": int(graph_bytes), "free_bytes": free}},
    )


def log_finished(count: int, seconds: float, taken: int, memory: str) -> None:
    """Log the end of a warm-up of `count` buckets that allocated `taken` bytes. `memory`: kind of
    memory, "device" or "host"."""
    logger.info(
        "Warmup finished in %.0f secs, allocated %s of %s memory: %d buckets",
        seconds,
        bytes_text(taken),
        memory,
        count,
        extra={
            "fields": {"seconds": round(seconds, 3), "allocated_bytes": taken, "num_buckets": count}
        },
    )


def log_graphs(phase: int, captured: list[Bucket], total: int, taken: int, seconds: float) -> None:
    """Log the captured buckets of a phase."""
    logger.info(
        "Graph/%s captured:%d (%.1f%%) used_mem:%s buckets:%s, in %.1f s",
        _title(phase),
        len(captured),
        100 * len(captured) / total,
        bytes_text(taken),
        [bucket[1:] for bucket in captured],
        seconds,
        extra={
            "fields": {
                "phase": _phase_word(phase),
                "num_captured": len(captured),
                "num_buckets": total,
                "used_bytes": taken,
                "seconds": round(seconds, 3),
            }
        },
    )


def log_not_captured(
    phase: int, not_captured: list[Bucket], warmup: WarmupConfig, *, full: bool
) -> None:
    """Log the buckets without a graph, and the settings that would help. `full`: the device's
    memory is used up, not only the share for graphs."""
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
    """Log a bucket that the device's compiler rejects."""
    logger.error("Bucket %s is left out, it cannot be compiled: %s", bucket, error)


def log_too_large(bucket: Bucket) -> None:
    """Log a bucket that does not fit into the memory left by weights and KV cache."""
    logger.warning(
        "The %s bucket %s does not fit into the device's memory and is not used. To keep it, lower "
        "--gpu-memory-utilization, or the number of KV blocks if it is set; to run without the "
        "bucket, lower %s",
        phase_name(bucket[0]),
        bucket[1:],
        "--max-num-batched-tokens" if bucket[0] == PREFILL else "--max-num-seqs",
    )


def _listed(buckets: list[Bucket]) -> str:
    listed = ", ".join(str(bucket[1:]) for bucket in buckets[:MAX_LISTED])
    more = len(buckets) - MAX_LISTED
    return f"{listed} and {more} more" if more > 0 else listed


def _sizes(phase: int, shapes: list[Shape]) -> str:
    names = ("batch", "query", "context blocks") if phase == PREFILL else ("batch", "", "blocks")
    return ", ".join(
        f"{name} {_size_range([shape[index] for shape in shapes])}"
        for index, name in enumerate(names)
        if name
    )


def _size_range(sizes: list[int]) -> str:
    least, most, count = min(sizes), max(sizes), len(set(sizes))
    return f"{least}" if count == 1 else f"{least} to {most} ({count} sizes)"


def _phase_word(phase: int) -> str:
    return "prompt" if phase == PREFILL else "decode"


def _title(phase: int) -> str:
    return _phase_word(phase).capitalize()

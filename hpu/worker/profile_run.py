"""Launches outside of requests: to measure the peak memory of the largest launches before the KV
cache is created, and to profile configured launches instead of serving."""

import gc
from collections.abc import Callable
from typing import Any

from config.errors import ConfigError, bytes_text
from config.execution import ExecutionConfig
from hpu.backends.base import Backend
from hpu.bucketing.bucket_table import BucketTable
from hpu.profiling.profiler import Profiler
from hpu.protocol import DECODE, PREFILL, Bucket, BucketLimits, Shape
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import InputBufferPool
from hpu.runner.step_runner import StepRunner
from hpu.sampling.sampler import GREEDY


def measure_launches(runner: StepRunner, backend: Backend, buckets: list[Bucket]) -> int:
    """Peak memory in bytes of `buckets` with every kind of sampling, minus the memory that stays
    allocated. `runner` must not capture. Raises ConfigError if a bucket does not fit."""

    def run() -> None:
        for bucket in buckets:
            _run(runner, backend, bucket)

    return measure_peak(run, backend)


def measure_peak(run: Callable[[], object], backend: Backend) -> int:
    """Peak memory of `run` in bytes, minus the memory that stays allocated."""
    backend.reset_peak()
    run()
    peak = backend.peak_memory()
    gc.collect()
    backend.reset_peak()
    rest = backend.peak_memory()
    assert peak is not None and rest is not None, "a back end that counts no memory is measured"
    return max(0, peak - rest)


def _run(runner: StepRunner, backend: Backend, bucket: Bucket) -> None:
    try:
        runner.warm_up(bucket, *runner.warmup_settings, prompts=True)
    except (RuntimeError, MemoryError) as error:
        if not backend.is_out_of_memory(error):
            raise
        raise ConfigError(_too_large(bucket, backend)) from error


def largest_buckets(table: BucketTable, num_blocks: int) -> list[Bucket]:
    """The most expensive prefill, and the largest decode with at most `num_blocks` blocks (no
    decode for pooling): the table's own limit depends on the cache size, which is not yet
    decided."""
    prompts = [bucket for bucket in table.buckets if bucket[0] == PREFILL]
    largest = max(prompts, key=lambda bucket: table.cost(PREFILL, bucket[1:]))
    limits = table.limits
    if DECODE not in table.phases:
        return [largest]
    blocks = max(1, min(limits.max_decode_blocks, num_blocks))
    return [largest, (DECODE, limits.max_num_seqs, 1, blocks)]


def profiled_buckets(execution: ExecutionConfig, limits: BucketLimits) -> list[Bucket]:
    """Launches configured for a profile; they need not be in the bucket table. Raises ConfigError
    for a launch that no plan of this server can have."""
    buckets: list[Bucket] = []
    prompt, decode = execution.profiled_prompt, execution.profiled_decode
    if prompt is not None:
        rows = 1 if limits.merged_prefill else limits.max_num_seqs
        most = (rows, limits.max_query, limits.max_context_blocks)
        _check_profiled("profile-prompt", execution.profile_prompt, prompt, (1, 1, 0), most)
        buckets.append((PREFILL, *prompt))
    if decode is not None:
        if limits.is_pooling:
            raise ConfigError("--profile-decode is given, and a pooling model has no decodes")
        most = (limits.max_num_seqs, 1, limits.max_decode_blocks)
        least = (1, 1, decode[0])
        _check_profiled("profile-decode", execution.profile_decode, decode, least, most)
        buckets.append((DECODE, *decode))
    return buckets


def _check_profiled(flag: str, text: str | None, shape: Shape, least: Shape, most: Shape) -> None:
    names = ("BATCH", "TOKENS", "BLOCKS")
    for name, size, minimum, maximum in zip(names, shape, least, most, strict=True):
        if not minimum <= size <= maximum:
            raise ConfigError(
                f"--{flag} is {text!r}: {name} is {size}, it must be between {minimum} and "
                f"{maximum} with these settings"
            )


def profile_launches(
    buckets: list[Bucket],
    runner: StepRunner,
    graphs: GraphCache,
    input_buffers: InputBufferPool[Any],
    profiler: Profiler,
) -> str:
    """Compile or capture `buckets`, and trace the operations of further runs of all buckets.
    Returns the path of the trace. Raises ConfigError if its folder cannot be created."""
    for bucket in buckets:
        input_buffers.prepare(bucket)
        runner.warm_up(bucket, GREEDY)
    for bucket in graphs.to_capture(buckets):
        graphs.capture(input_buffers.get(bucket))

    def run() -> None:
        for bucket in buckets:
            runner.warm_up(bucket, GREEDY)

    return profiler.trace_operations(run)


def _too_large(bucket: Bucket, backend: Backend) -> str:
    phase, batch, query, blocks = bucket
    free, total = backend.memory()
    what = f"prompts of batch {batch}, query {query}, {blocks} context blocks"
    if phase == DECODE:
        what = f"a decode of batch {batch} over {blocks} blocks"
    return (
        f"the largest launch ({what}) does not fit beside the weights: {bytes_text(free)} of "
        f"{bytes_text(total)} are free; lower "
        f"{'--max-num-batched-tokens' if phase == PREFILL else '--max-num-seqs'}"
    )

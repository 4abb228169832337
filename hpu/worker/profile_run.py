"""Measures the device memory of the largest launches, before the KV cache is made."""

import gc

from config.errors import ConfigError
from hpu.backends.base import Backend
from hpu.bucketing.bucket_table import BucketTable
from hpu.gaudi_devices import GIB
from hpu.protocol import DECODE, PREFILL, Bucket
from hpu.runner.step_runner import StepRunner


def measure_launches(runner: StepRunner, backend: Backend, buckets: list[Bucket]) -> int:
    """Peak bytes of `buckets` with every kind of sampling, beyond what stays allocated. `runner`
    must not capture. Raises ConfigError when a bucket does not fit."""
    backend.reset_peak()
    for bucket in buckets:
        _run(runner, backend, bucket)
    peak = backend.peak_memory()
    gc.collect()
    backend.reset_peak()
    rest = backend.peak_memory()
    assert peak is not None and rest is not None, "a back end that counts no memory is measured"
    return max(0, peak - rest)


def _run(runner: StepRunner, backend: Backend, bucket: Bucket) -> None:
    try:
        for sampling in runner.warmup_settings:
            runner.warm_up(bucket, sampling, prompts=True)
    except (RuntimeError, MemoryError) as error:
        if not backend.is_out_of_memory(error):
            raise
        raise ConfigError(_too_large(bucket, backend)) from error


def largest_buckets(table: BucketTable, num_blocks: int) -> list[Bucket]:
    """The most expensive prefill and the widest decode, with at most `num_blocks` blocks: the
    table's own number depends on the size of the cache, which is not yet known."""
    prompts = [bucket for bucket in table.buckets if bucket[0] == PREFILL]
    largest = max(prompts, key=lambda bucket: table.cost(PREFILL, bucket[1:]))
    limits = table.limits
    if DECODE not in table.phases:
        return [largest]
    blocks = max(1, min(limits.max_decode_blocks, num_blocks))
    return [largest, (DECODE, limits.max_num_seqs, 1, blocks)]


def _too_large(bucket: Bucket, backend: Backend) -> str:
    phase, batch, query, blocks = bucket
    free, total = backend.memory()
    what = f"prompts of batch {batch}, query {query}, {blocks} context blocks"
    if phase == DECODE:
        what = f"a decode of batch {batch} over {blocks} blocks"
    return (
        f"the largest launch ({what}) does not fit beside the weights: {free / GIB:.2f} of "
        f"{total / GIB:.2f} GiB are free; lower "
        f"{'--max-num-batched-tokens' if phase == PREFILL else '--max-num-seqs'}"
    )

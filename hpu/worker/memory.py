"""How device memory is split, once, before anything is captured: weights lie there already; the
rest goes to KV blocks, graphs and a reserve. Pure; the arithmetic is memory_plan's."""

import math
from dataclasses import dataclass

from config.engine import CacheConfig
from config.errors import ConfigError
from hpu.worker.memory_plan import num_blocks, plan_memory

HOST_SHARE = 0.25
"""Of the host's free memory, for KV blocks of a device that shares it."""

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the cache has to serve."""

    block_size: int
    block_bytes: int
    max_model_len: int
    max_num_seqs: int

    @property
    def context_blocks(self) -> int:
        """Blocks of one full context."""
        return math.ceil(self.max_model_len / self.block_size)


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured once the weights had been loaded, in bytes."""

    free: int
    reserve: int
    """What the largest launch takes while it runs."""
    is_measured: bool = True
    """Whether `reserve` is the peak of such a launch; if not, it was estimated."""


@dataclass(frozen=True, slots=True)
class Split:
    """Blocks to lend (the pad block comes on top), and bytes that graphs may take."""

    num_blocks: int
    graph_bytes: int
    usable_bytes: int = 0
    """GraphCache and KV blocks together, where the device's memory is its own."""


def split_memory(
    cache: CacheConfig,
    wanted: Wanted,
    found: Found,
    *,
    shares_host_memory: bool,
    graph_share: float,
) -> Split:
    """Decide the number of KV blocks: as told, as many as the bytes told hold, or what fits.

    `graph_share` of what may be used is for captured graphs, 0 when nothing is captured. What may
    be used is the configured share of what is free beside the largest launch. Raises ConfigError
    when not even one full context fits, or when more is told than is free.
    """
    free = found.free
    plan = plan_memory(
        max(0, free - found.reserve),
        utilization=cache.gpu_memory_utilization,
        graph_reserved=graph_share,
    )
    if cache.num_blocks is not None:
        count, cure = cache.num_blocks, "raise --num-gpu-blocks-override"
    elif cache.kv_cache_memory_bytes is not None:
        count = cache.kv_cache_memory_bytes // wanted.block_bytes - 1
        cure = "raise --kv-cache-memory-bytes"
    elif shares_host_memory:
        within = int(free * HOST_SHARE) // wanted.block_bytes - 1
        count = min(wanted.max_num_seqs * wanted.context_blocks, within)
        cure = "set --kv-cache-memory-bytes"
    else:
        count = num_blocks(plan.kv, wanted.block_bytes)
        cure = "raise --gpu-memory-utilization, or lower --max-num-batched-tokens"
    _check_context(count, wanted, cure)
    needed = (count + 1) * wanted.block_bytes
    if needed > free:
        raise ConfigError(
            f"{count} KV blocks take {needed / GIB:.2f} GiB, {free / GIB:.2f} GiB are "
            f"free: lower --num-gpu-blocks-override or --kv-cache-memory-bytes"
        )
    return Split(count, int(plan.graphs), int(plan.usable))


def _check_context(count: int, wanted: Wanted, cure: str) -> None:
    if count >= wanted.context_blocks:
        return
    holds = max(0, count) * wanted.block_size
    needed = (wanted.context_blocks + 1) * wanted.block_bytes
    advice = f"lower --max-model-len to {holds} or less, or {cure}" if holds else cure
    raise ConfigError(
        f"the KV cache holds {holds} tokens in {max(0, count)} blocks, one full context of "
        f"{wanted.max_model_len} tokens needs {wanted.context_blocks} blocks "
        f"({needed / GIB:.2f} GiB): {advice}"
    )

"""How device memory is split, once, before anything is captured: weights lie there already; the
rest goes to KV blocks, graphs and a reserve. Pure."""

import math
from dataclasses import dataclass

from config.engine import CacheConfig
from config.errors import ConfigError

GRAPH_SHARE = 0.1
"""Of what may be used after the weights, for captured graphs."""

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
class Split:
    """Blocks to lend (the pad block comes on top), and bytes that graphs may take."""

    num_blocks: int
    graph_bytes: int


def split_memory(
    cache: CacheConfig,
    wanted: Wanted,
    *,
    free_bytes: int,
    reserve_bytes: int,
    shares_host_memory: bool,
    captures: bool,
) -> Split:
    """Decide the number of KV blocks: as told, as many as the bytes told hold, or what fits.

    `reserve_bytes` are for activations. Raises ConfigError when not even one full context fits, or
    when more is told than is free.
    """
    usable = int(free_bytes * cache.memory_utilization) - reserve_bytes
    graph_bytes = max(0, int(usable * GRAPH_SHARE)) if captures else 0
    if cache.num_blocks is not None:
        num_blocks, cure = cache.num_blocks, "raise --num-gpu-blocks-override"
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = cache.kv_cache_memory_bytes // wanted.block_bytes - 1
        cure = "raise --kv-cache-memory-bytes"
    elif shares_host_memory:
        within = int(free_bytes * HOST_SHARE) // wanted.block_bytes - 1
        num_blocks = min(wanted.max_num_seqs * wanted.context_blocks, within)
        cure = "set --kv-cache-memory-bytes"
    else:
        num_blocks = (usable - graph_bytes) // wanted.block_bytes - 1
        cure = "raise --gpu-memory-utilization"
    _check_context(num_blocks, wanted, cure)
    needed = (num_blocks + 1) * wanted.block_bytes
    if needed > free_bytes:
        raise ConfigError(
            f"{num_blocks} KV blocks take {needed / GIB:.2f} GiB, {free_bytes / GIB:.2f} GiB are "
            f"free: lower --num-gpu-blocks-override or --kv-cache-memory-bytes"
        )
    return Split(num_blocks, graph_bytes)


def _check_context(num_blocks: int, wanted: Wanted, cure: str) -> None:
    if num_blocks >= wanted.context_blocks:
        return
    holds = max(0, num_blocks) * wanted.block_size
    needed = (wanted.context_blocks + 1) * wanted.block_bytes
    advice = f"lower --max-model-len to {holds} or less, or {cure}" if holds else cure
    raise ConfigError(
        f"the KV cache holds {holds} tokens in {max(0, num_blocks)} blocks, one full context of "
        f"{wanted.max_model_len} tokens needs {wanted.context_blocks} blocks "
        f"({needed / GIB:.2f} GiB): {advice}"
    )

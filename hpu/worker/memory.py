"""Memory split after loading: KV blocks, graphs, and a reserve.

Pure functions without torch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from config.engine import CacheConfig
from config.errors import ConfigError, bytes_text

HOST_TOKENS_PER_SEQ = 2048
"""Tokens for each of max_num_seqs sequences in the default KV cache of a device that uses host
memory."""

HOST_MEMORY_FRACTION = 0.1
"""Share of the host's free memory that the default KV cache takes at most, unless a single full
context needs more (HOST_CONTEXT_FRACTION)."""

HOST_CONTEXT_FRACTION = 0.25
"""Share of the host's free memory that the default KV cache takes at most if a single full context
needs more than HOST_MEMORY_FRACTION."""


class MemoryPlan(NamedTuple):
    """Parts of the free memory, all in the same unit."""

    usable: float
    graphs: float
    kv: float
    margin: float
    """Memory that is left unused."""


def plan_memory(free: float, *, utilization: float, graph_memory_fraction: float) -> MemoryPlan:
    """Split the free memory. `utilization`: share of the free memory (not of the card's memory).
    Graphs get `graph_memory_fraction` of the usable part, KV blocks the rest. Raises ConfigError
    for a share outside 0 to 1."""
    _check_share("utilization", utilization)
    _check_share("graph_memory_fraction", graph_memory_fraction)
    usable = free * utilization
    graphs = usable * graph_memory_fraction
    return MemoryPlan(usable, graphs, usable - graphs, free - usable)


def num_blocks(kv_bytes: float, block_bytes: int) -> int:
    """Number of whole blocks in `kv_bytes`, without the pad block."""
    return max(0, int(kv_bytes // block_bytes) - 1)


@dataclass(frozen=True, slots=True)
class KVCacheDemand:
    """Requirements of the KV cache."""

    block_size: int
    block_bytes: int
    max_model_len: int
    max_num_seqs: int
    window_bytes: int = 0
    """Bytes of sliding-window caches, which are part of the configured bytes."""

    @property
    def context_blocks(self) -> int:
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def host_blocks(self) -> int:
        """Blocks that the default KV cache of a host holds if its memory is sufficient."""
        tokens = min(self.max_model_len, HOST_TOKENS_PER_SEQ)
        return max(self.context_blocks, self.max_num_seqs * math.ceil(tokens / self.block_size))

    @property
    def context_bytes(self) -> int:
        return (self.context_blocks + 1) * self.block_bytes


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Device memory after the weights are loaded, in bytes."""

    free: int
    reserve: int
    """Memory peak of the largest launch or of the image encoder."""
    is_measured: bool = True
    """Whether the largest launch was run; otherwise `reserve` is an estimate."""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Number of KV blocks without the pad block, and the budget of graphs."""

    num_blocks: int
    graph_bytes: int
    usable_bytes: int = 0
    """Bytes for graphs and KV blocks together, on a device with its own memory."""


def kv_budget(
    cache: CacheConfig,
    memory: FreeMemory,
    *,
    shares_host_memory: bool,
    graph_memory_fraction: float,
) -> int:
    """Bytes for the KV cache: as configured, or the planned share of the free memory. If a number
    of blocks is configured: all free memory."""
    if cache.num_blocks is not None:
        return memory.free
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if shares_host_memory:
        return int(memory.free * HOST_MEMORY_FRACTION)
    plan = plan_memory(
        max(0, memory.free - memory.reserve),
        utilization=cache.gpu_memory_utilization,
        graph_memory_fraction=graph_memory_fraction,
    )
    return int(plan.kv)


def split_memory(
    cache: CacheConfig,
    demand: KVCacheDemand,
    memory: FreeMemory,
    *,
    num_sharing: int,
    graph_memory_fraction: float,
) -> MemorySplit:
    """Number of KV blocks: as configured, as many as the configured bytes hold, or as many as fit.

    The usable memory is the configured share of the memory that the largest launch leaves free.
    Graphs get `graph_memory_fraction` of it; 0 if nothing is captured. Raises ConfigError if a full
    context does not fit, or if more is configured than is free.

    Args:
        num_sharing: number of ranks that share the host's memory; 0: the device has its own memory.
    """
    free = memory.free
    plan = plan_memory(
        max(0, free - memory.reserve),
        utilization=cache.gpu_memory_utilization,
        graph_memory_fraction=graph_memory_fraction,
    )
    if configured := _configured(cache, demand):
        count, fix = configured
    elif num_sharing:
        count = _host_blocks(demand, free / num_sharing)
        fix = f"set --kv-cache-memory-bytes to {_rounded_up(demand)}"
    else:
        count = num_blocks(plan.kv, demand.block_bytes)
        fix = "raise --gpu-memory-utilization, or lower --max-num-batched-tokens"
    _check_context(count, demand, fix)
    needed = (count + 1) * demand.block_bytes
    if needed > free:
        raise ConfigError(
            f"{count} KV blocks take {bytes_text(needed)}, {bytes_text(free)} are "
            f"free: lower --num-gpu-blocks-override or --kv-cache-memory-bytes"
        )
    return MemorySplit(count, int(plan.graphs), int(plan.usable))


def _host_blocks(demand: KVCacheDemand, free: float) -> int:
    """Default number of KV blocks of a rank that shares its `free` bytes of host memory with other
    programs."""
    within = num_blocks(free * HOST_MEMORY_FRACTION, demand.block_bytes)
    for_context = num_blocks(free * HOST_CONTEXT_FRACTION, demand.block_bytes)
    return max(min(demand.host_blocks, within), min(demand.context_blocks, for_context))


def host_rule(cache: CacheConfig, demand: KVCacheDemand) -> str:
    """The rule of the default size of a host's KV cache, for its log line; empty if the size is
    configured."""
    if _configured(cache, demand):
        return ""
    return (
        f" (default: {HOST_TOKENS_PER_SEQ} tokens for each of {demand.max_num_seqs} sequences, at "
        f"most {HOST_MEMORY_FRACTION:.0%} of the free memory, {HOST_CONTEXT_FRACTION:.0%} if one "
        "full context needs it; --kv-cache-memory-bytes sets the size)"
    )


def check_configured(cache: CacheConfig, demand: KVCacheDemand) -> None:
    """Raise ConfigError if the configured KV cache is too small for a full context. Can be called
    before the weights are loaded."""
    if configured := _configured(cache, demand):
        _check_context(configured[0], demand, configured[1])


def _configured(cache: CacheConfig, demand: KVCacheDemand) -> tuple[int, str] | None:
    """(configured number of KV blocks, how to raise it); None if nothing is configured."""
    if cache.num_blocks is not None:
        return cache.num_blocks, f"raise --num-gpu-blocks-override to {demand.context_blocks}"
    if cache.kv_cache_memory_bytes is not None:
        left = max(0, cache.kv_cache_memory_bytes - demand.window_bytes)
        fix = f"raise --kv-cache-memory-bytes to {_rounded_up(demand)}"
        return left // demand.block_bytes - 1, fix
    return None


def _check_context(count: int, demand: KVCacheDemand, fix: str) -> None:
    if count >= demand.context_blocks:
        return
    holds = max(0, count) * demand.block_size
    advice = f"lower --max-model-len to {holds} or less, or {fix}" if holds else fix
    raise ConfigError(
        f"the KV cache holds {holds} tokens in {max(0, count)} blocks, one full context of "
        f"{demand.max_model_len} tokens needs {demand.context_blocks} blocks "
        f"({bytes_text(demand.context_bytes)}): {advice}"
    )


def _rounded_up(demand: KVCacheDemand) -> str:
    """Bytes of a full context as the value of a flag: `181M (189480960 bytes)`."""
    num_bytes = demand.window_bytes + demand.context_bytes
    return f"{math.ceil(num_bytes / 2**20)}M ({num_bytes} bytes)"


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}, it must be between 0 and 1")

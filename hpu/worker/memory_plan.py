"""The documented split of a card's memory, as numbers: for plans made without one. Pure."""

from typing import NamedTuple

from config.errors import ConfigError

GRAPH_RESERVED = 0.1
"""Of what may be used (VLLM_GRAPH_RESERVED_MEM)."""

PROMPT_RATIO = 0.3
"""Of the graphs' memory, for prompts (VLLM_GRAPH_PROMPT_RATIO)."""


class MemoryPlan(NamedTuple):
    """Parts of the memory that is free after loading, all in its unit."""

    usable: float
    graphs: float
    kv: float
    margin: float
    """Never planned for."""


def plan_memory(
    free: float, *, utilization: float, graph_reserved: float = GRAPH_RESERVED
) -> MemoryPlan:
    """`utilization` is a share of what is free, not of the card; graphs get a share of that, and
    KV blocks the rest."""
    _check_share("utilization", utilization)
    _check_share("graph_reserved", graph_reserved)
    usable = free * utilization
    graphs = usable * graph_reserved
    return MemoryPlan(usable, graphs, usable - graphs, free - usable)


def split_graphs(graphs: float, *, prompt_ratio: float = PROMPT_RATIO) -> tuple[float, float]:
    """(prompt, decode) parts of the graphs' memory."""
    _check_share("prompt_ratio", prompt_ratio)
    prompt = graphs * prompt_ratio
    return prompt, graphs - prompt


def num_blocks(kv_bytes: float, block_bytes: int) -> int:
    """Whole blocks in `kv_bytes`, one of which is for padding and not counted."""
    return max(0, int(kv_bytes // block_bytes) - 1)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}, it must be between 0 and 1")

"""Cost model: a step's time by batch size, context and cards, from measured and published numbers.
Pure arithmetic; prints the tables of docs/scaling.md, and the load of a node.
Run: python benchmarks/scaling.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.model.model_config import ModelConfig
from hpu.model_loader.size_estimate import count_parameters

DTYPE_BYTES = 2
"""Bytes of a bfloat16 element."""
ENGINE_US = (13.0, 0.37)
"""Microseconds per step and per request in a step: benchmarks/results/host-2026-11-21.md."""
WORKER_US = (502.0, 0.32)
"""Microseconds of host logic and launching per step and per request:
benchmarks/results/launch-2026-11-21.md."""
API_SERVER_TOKENS = 60_000
"""Tokens per second of one core: about the lower end of the range in benchmarks/README.md."""
ALL_REDUCE_US = 10.0
"""Latency of an all-reduce, without the time of its bytes. An assumption: no published figure was
found."""
GATHER_PASSES = 3
"""Passes over a cached byte when blocks are gathered: read, written, read again."""
CHUNK_BYTES = 252
"""Bytes of a streamed token: one event of a chat with the demo model, mean of 65 events,
2026-11-21."""
LINKS_TO_A_CARD = 3


@dataclass(frozen=True)
class Card:
    """Published peaks: memory bytes/s, bfloat16 operations/s, bytes/s of a link in a direction."""

    name: str
    memory: float
    arithmetic: float
    link: float


CARDS = (Card("Gaudi 2", 2.45e12, 432e12, 12.5e9), Card("Gaudi 3", 3.7e12, 1835e12, 25e9))


def llama(hidden: int, inner: int, layers: int, heads: int) -> ModelConfig:
    """A model shaped like Llama 3.1, which has 8 KV heads in each size."""
    return ModelConfig(
        "none", "LlamaForCausalLM", 128_256, hidden, inner, layers, heads, 8, 128, 131_072
    )


SMALL, LARGE = llama(4096, 14_336, 32, 32), llama(8192, 28_672, 80, 64)


def weights(model: ModelConfig) -> int:
    """Bytes that a decode reads: all weights but the embedding table."""
    return (count_parameters(model) - model.vocab_size * model.hidden_size) * DTYPE_BYTES


def kv_bytes(model: ModelConfig) -> int:
    """Bytes of a token's keys and values in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * DTYPE_BYTES


def memory_ms(
    card: Card, model: ModelConfig, batch: int, context: int, cards: int = 1, passes: int = 1
) -> float:
    """Time to read the weights once and each request's cached tokens `passes` times."""
    cached = passes * kv_bytes(model) * batch * context
    return (weights(model) + cached) / cards / card.memory * 1e3


def arithmetic_ms(card: Card, model: ModelConfig, tokens: int, cards: int = 1) -> float:
    """Time of the matrix products for `tokens`: a multiplication and an addition per weight."""
    return 2 * weights(model) / DTYPE_BYTES * tokens / cards / card.arithmetic * 1e3


def all_reduce_ms(card: Card, model: ModelConfig, batch: int, cards: int) -> float:
    """Time of two all-reduces per layer over one hidden state per request, each a reduce-scatter
    and an all-gather."""
    if cards == 1:
        return 0.0
    sent = 2 * (cards - 1) / cards * batch * model.hidden_size * DTYPE_BYTES
    speed = (cards - 1) * LINKS_TO_A_CARD * card.link
    return 2 * model.num_layers * (sent / speed * 1e3 + ALL_REDUCE_US / 1e3)


def step_ms(
    card: Card, model: ModelConfig, batch: int, context: int, cards: int = 1, passes: int = 1
) -> float:
    """Time of a decode step: the longer of memory and arithmetic, plus the all-reduces; at least
    the time of the engine or the worker, which run in parallel."""
    device = max(
        memory_ms(card, model, batch, context, cards, passes),
        arithmetic_ms(card, model, batch, cards),
    )
    device += all_reduce_ms(card, model, batch, cards)
    return max(device, host_ms(ENGINE_US, batch), host_ms(WORKER_US, batch))


def host_ms(cost: tuple[float, float], batch: int) -> float:
    return (cost[0] + cost[1] * batch) / 1e3


def table(head: list[str], lines: list[list[str]]) -> str:
    all_lines = [head, ["---:"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in all_lines) + "\n"


def one_card() -> str:
    """The small model on one card of each generation."""
    lines = []
    for batch, context in ((1, 1024), (64, 1024), (256, 1024), (32, 8192)):
        cells = [f"{batch}", f"{context}"]
        for card in CARDS:
            steps = [
                step_ms(card, SMALL, batch, context, passes=passes) for passes in (1, GATHER_PASSES)
            ]
            cells.append(" to ".join(f"{step:.1f}" for step in steps))
            cells.append(" to ".join(f"{batch / step * 1e3:,.0f}" for step in reversed(steps)))
        lines.append(cells)
    head = ["batch", "context"]
    for card in CARDS:
        head += [f"{card.name}: step", "tokens/s"]
    return table(head, lines)


def several_cards() -> str:
    """Both models, tensor-parallel over the cards of a Gaudi 3 node."""
    card, batch, context = CARDS[1], 256, 1024
    lines = []
    for name, model, counts in (("8B", SMALL, (1, 8)), ("70B", LARGE, (4, 8))):
        for cards in counts:
            step = step_ms(card, model, batch, context, cards)
            lines.append(
                [
                    name,
                    f"{cards}",
                    f"{step:.1f}",
                    f"{batch / step * 1e3:,.0f}",
                    f"{batch / step * 1e3 / cards:,.0f}",
                ]
            )
    return table(["model", "cards", "step", "tokens/s", "tokens/s per card"], lines)


def one_node() -> str:
    """Load of every part of eight servers of the small model. Each has a card and an API server."""
    batch, cards = 256, 8
    lines = []
    for card in CARDS:
        tokens_per_s = batch / step_ms(card, SMALL, batch, 1024) * 1e3
        engine, worker = (batch / host_ms(cost, batch) * 1e3 for cost in (ENGINE_US, WORKER_US))
        lines.append(
            [
                card.name,
                f"{tokens_per_s / engine:.1%}",
                f"{tokens_per_s / worker:.1%}",
                f"{tokens_per_s / API_SERVER_TOKENS:.0%}",
                f"{cards * tokens_per_s:,.0f}",
                f"{cards * tokens_per_s * CHUNK_BYTES * 8 / 1e9:.2f}",
            ]
        )
    head = ["card", "engine's share of a core", "worker's share"]
    head += ["API server's share", "tokens/s per node", "Gbit/s of streams"]
    return table(head, lines)


if __name__ == "__main__":
    print(one_card(), several_cards(), one_node(), sep="\n", end="")

"""Scale on paper: what a step costs by rows, context and cards, from measured and published facts.
Pure arithmetic; prints the tables of docs/scaling.md. Run: python benchmarks/scaling.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.model.model_config import ModelConfig
from hpu.model_loader.size_estimate import count_parameters

WIDTH = 2
"""Bytes of a number: bfloat16."""
ENGINE_US = (13.0, 0.37)
"""Of a step, and of a row in it: benchmarks/results/host-2026-11-21.md."""
WORKER_US = (502.0, 0.32)
"""The same, host logic and launching together: benchmarks/results/launch-2026-11-21.md."""
FRONT_END_TOKENS = 60_000
"""A second of one core: docs/performance.md, the lower end."""
ALL_REDUCE_US = 10.0
"""Of an all-reduce beside its bytes. An assumption: no published figure was found."""
GATHERED = 3
"""How often a cached byte is moved where blocks are gathered: read, written, read again."""
CHUNK_BYTES = 252
"""Of a streamed token: an event of a chat with the demo model, mean of 65, 2026-11-21."""
LINKS_TO_A_CARD = 3


@dataclass(frozen=True)
class Card:
    """Published peaks: bytes a second of memory, bfloat16 operations a second, bytes a second of
    one link in one direction."""

    name: str
    memory: float
    arithmetic: float
    link: float


CARDS = (Card("Gaudi 2", 2.45e12, 432e12, 12.5e9), Card("Gaudi 3", 3.7e12, 1835e12, 25e9))


def llama(hidden: int, inner: int, layers: int, heads: int) -> ModelConfig:
    """In the proportions of Llama 3.1, which has 8 key heads in each size."""
    return ModelConfig(
        "none", "LlamaForCausalLM", 128_256, hidden, inner, layers, heads, 8, 128, 131_072
    )


SMALL, LARGE = llama(4096, 14_336, 32, 32), llama(8192, 28_672, 80, 64)


def weights(model: ModelConfig) -> int:
    """Bytes that a decode reads: all but the table of embeddings."""
    return (count_parameters(model).total - model.vocab_size * model.hidden_size) * WIDTH


def kv_bytes(model: ModelConfig) -> int:
    """Of one token in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * WIDTH


def memory_ms(
    card: Card, model: ModelConfig, rows: int, context: int, cards: int = 1, moves: int = 1
) -> float:
    """Weights once, and every row's cached tokens `moves` times."""
    cached = moves * kv_bytes(model) * rows * context
    return (weights(model) + cached) / cards / card.memory * 1e3


def arithmetic_ms(card: Card, model: ModelConfig, tokens: int, cards: int = 1) -> float:
    """The products of so many tokens, a multiplication and an addition for each weight."""
    return 2 * weights(model) / WIDTH * tokens / cards / card.arithmetic * 1e3


def all_reduce_ms(card: Card, model: ModelConfig, rows: int, cards: int) -> float:
    """Two in a layer, of one hidden state a row: every card sends all others their share of it, and
    then its share of the sum."""
    if cards == 1:
        return 0.0
    sent = 2 * (cards - 1) / cards * rows * model.hidden_size * WIDTH
    speed = (cards - 1) * LINKS_TO_A_CARD * card.link
    return 2 * model.num_layers * (sent / speed * 1e3 + ALL_REDUCE_US / 1e3)


def step_ms(
    card: Card, model: ModelConfig, rows: int, context: int, cards: int = 1, moves: int = 1
) -> float:
    """A decode's: the longer of memory and arithmetic, and the all-reduces; at least what the
    engine or the worker take, which work meanwhile."""
    device = max(
        memory_ms(card, model, rows, context, cards, moves), arithmetic_ms(card, model, rows, cards)
    )
    device += all_reduce_ms(card, model, rows, cards)
    return max(device, host_ms(ENGINE_US, rows), host_ms(WORKER_US, rows))


def host_ms(cost: tuple[float, float], rows: int) -> float:
    return (cost[0] + cost[1] * rows) / 1e3


def table(head: list[str], lines: list[list[str]]) -> str:
    made = [head, ["---:"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in made) + "\n"


def one_card() -> str:
    """The small model on one card of each generation."""
    lines = []
    for rows, context in ((1, 1024), (64, 1024), (256, 1024), (32, 8192)):
        cells = [f"{rows}", f"{context}"]
        for card in CARDS:
            steps = [step_ms(card, SMALL, rows, context, moves=moves) for moves in (1, GATHERED)]
            cells.append(f"{arithmetic_ms(card, SMALL, rows):.2f}")
            cells.append(" to ".join(f"{step:.1f}" for step in steps))
            cells.append(" to ".join(f"{rows / step * 1e3:,.0f}" for step in reversed(steps)))
        hosts = [host_ms(cost, rows) for cost in (ENGINE_US, WORKER_US)]
        lines.append([*cells, *(f"{host:.2f}" for host in hosts)])
    head = ["rows", "context"]
    for card in CARDS:
        head += [f"{card.name}: products", "step", "tokens/s"]
    return table([*head, "engine", "worker"], lines)


def several_cards() -> str:
    """Both models divided among the cards of a Gaudi 3 node."""
    card, rows, context = CARDS[1], 256, 1024
    lines = []
    for name, model, counts in (("8B", SMALL, (1, 2, 4, 8)), ("70B", LARGE, (4, 8))):
        for cards in counts:
            step = step_ms(card, model, rows, context, cards)
            lines.append(
                [
                    name,
                    f"{cards}",
                    f"{memory_ms(card, model, rows, context, cards):.1f}",
                    f"{all_reduce_ms(card, model, rows, cards):.1f}",
                    f"{step:.1f}",
                    f"{rows / step * 1e3:,.0f}",
                    f"{rows / step * 1e3 / cards:,.0f}",
                ]
            )
    return table(
        ["model", "cards", "memory", "all-reduces", "step", "tokens/s", "tokens/s a card"], lines
    )


def one_node() -> str:
    """Eight servers of the small model, a card and a front end each: what every part is asked for
    and what it carries, in tokens a second."""
    rows, cards = 256, 8
    lines = []
    for card in CARDS:
        asked = rows / step_ms(card, SMALL, rows, 1024) * 1e3
        engine, worker = (rows / host_ms(cost, rows) * 1e3 for cost in (ENGINE_US, WORKER_US))
        lines.append(
            [
                card.name,
                f"{asked:,.0f}",
                f"{asked / engine:.1%}",
                f"{asked / worker:.1%}",
                f"{asked / FRONT_END_TOKENS:.0%}",
                f"{cards * asked:,.0f}",
                f"{cards * asked * CHUNK_BYTES * 8 / 1e9:.2f}",
            ]
        )
    head = ["card", "tokens/s of a card", "its engine's share of a core", "its worker's"]
    return table([*head, "its front end's", "tokens/s of a node", "Gbit/s of streams"], lines)


if __name__ == "__main__":
    print(one_card(), several_cards(), one_node(), sep="\n", end="")

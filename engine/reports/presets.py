"""Presets: settings for a model and the cards of a host, computed by `plan`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.model_config import ModelConfig
from config.startup_checks import choose_max_model_len
from engine.reports.plan import GRAPH_BYTES, Plan, Target, make_plan
from hpu.doctor.cards import find_cards
from hpu.doctor.machine import Machine

KEYS = (
    "tensor-parallel-size",
    "data-parallel-size",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "block-size",
    "gpu-memory-utilization",
    "graph-reserved-mem",
    "bucketing-strategy",
)
"""The settings of a preset, as flags."""

CARDS = (1, 2, 4, 8)
"""Cards of a group on a node of eight."""
TYPICAL_TOKENS = 2048
"""Length of the sequences that --max-num-seqs and the number of cards are chosen for."""
ENOUGH_SEQS = 32
"""Sequences of that length that a group of cards should hold at once, if more cards allow it."""
MAX_NUM_SEQS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
MIN_MODEL_LEN = 1024
MAX_GRAPH_MEMORY = 0.4


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for one host, by flag, and the plan of one of its engines."""

    settings: Mapping[str, int | float | str]
    plan: Plan
    num_cards: int
    """Of the host; those that no engine takes included."""


def make_preset(
    facts: ModelConfig,
    config: EngineConfig,
    target: Target,
    num_cards: int,
    *,
    max_model_len: int | None = None,
) -> Preset:
    """Settings for a host with `num_cards`; those of `config` that a preset does not have stay.

    The fewest cards that hold a full context and enough sequences make an engine, and the host has
    as many engines as that allows. Without `max_model_len` a context that no number of cards holds
    is halved until it fits. Raises ConfigError if nothing does.
    """
    wanted = choose_max_model_len(
        max_model_len, facts, allows_longer=config.allow_long_max_model_len
    )
    length = wanted
    while True:
        plans = [
            plan
            for cards in CARDS
            if cards <= num_cards
            and (plan := _best(facts, _with(config, cards, length), target)) is not None
        ]
        if plans or max_model_len is not None or length // 2 < MIN_MODEL_LEN:
            break
        length //= 2
    if not plans:
        raise ConfigError(
            f"{facts.path} does not fit into {num_cards} {target.device} cards, even with a "
            f"context of {length} tokens: see `gaudiserve plan`"
        )
    typical = min(TYPICAL_TOKENS, length)
    plan = next((one for one in plans if one.card.sequences(typical) >= ENOUGH_SEQS), plans[-1])
    demand = plan.card.demand
    values = (
        demand.num_cards,
        num_cards // demand.num_cards,
        demand.max_model_len,
        demand.max_num_seqs,
        demand.max_num_batched_tokens,
        demand.block_size,
        demand.utilization,
        demand.graph_reserved,
        plan.strategy,
    )
    return Preset(dict(zip(KEYS, values, strict=True)), plan, num_cards)


def _with(config: EngineConfig, cards: int, length: int) -> EngineConfig:
    parallel = replace(config.parallel, tensor_parallel_size=cards)
    return replace(config, max_model_len=length, parallel=parallel)


def _best(facts: ModelConfig, config: EngineConfig, target: Target) -> Plan | None:
    """The plan with the most sequences at once that fits; None if none does, or if the model cannot
    be divided among so many cards."""
    for count in MAX_NUM_SEQS:
        for plan in _plans(facts, config, target, count):
            typical = min(TYPICAL_TOKENS, plan.card.demand.max_model_len)
            if plan.card.fits and plan.card.sequences(typical) >= count:
                return plan
    return None


def _plans(facts: ModelConfig, config: EngineConfig, target: Target, count: int) -> Iterator[Plan]:
    """With memory for all graphs, if there may be that much, and with the usual share."""
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=count))
    try:
        plan = make_plan(facts, config, target)
    except ConfigError:
        return
    if plan.table is not None and plan.captures:
        most = len(plan.table.reachable) * GRAPH_BYTES[1]
        share = math.ceil(100 * most / plan.card.parts.usable) / 100
        if plan.card.demand.graph_reserved < share <= MAX_GRAPH_MEMORY:
            warmup = replace(config.warmup, graph_memory_fraction=share)
            yield make_plan(facts, replace(config, warmup=warmup), target)
    yield plan


def free_cards(machine: Machine) -> tuple[str | None, int]:
    """(generation, number) of the cards that no process uses; no generation if the driver does not
    name it, or not the same for all."""
    cards = [card for card in find_cards(machine).cards if not card.holders]
    generations = {card.generation for card in cards}
    return (generations.pop() if len(generations) == 1 else None), len(cards)

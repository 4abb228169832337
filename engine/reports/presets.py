"""Presets: settings for a model on the cards of a host, computed by `plan`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from config.engine import EngineConfig
from config.errors import ConfigError, counted
from config.model.model_config import ModelConfig
from config.startup_checks import choose_max_model_len
from engine.reports.plan import Plan, Target, make_plan
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
"""Flags that a preset sets."""

CARDS = (1, 2, 4, 8)
"""Possible engine sizes in cards, on a node of eight cards."""
TYPICAL_TOKENS = 2048
"""Sequence length for which --max-num-seqs and the number of cards are chosen."""
ENOUGH_SEQS = 32
"""Sequences of TYPICAL_TOKENS that an engine should hold at once, if there are enough cards."""
MAX_NUM_SEQS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
MIN_MODEL_LEN = 1024
MAX_GRAPH_MEMORY = 0.4


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of a host, by flag, and the plan of each of its engines."""

    settings: Mapping[str, int | float | str]
    plan: Plan
    num_cards: int
    """Cards of the host, including unused cards."""


def make_preset(
    model_config: ModelConfig,
    config: EngineConfig,
    target: Target,
    num_cards: int,
    *,
    max_model_len: int | None = None,
) -> Preset:
    """Compute the settings of a host with `num_cards`. Settings of `config` that a preset does not
    include are kept.

    An engine gets the fewest cards that hold a full context and enough sequences, and the host runs
    as many engines as fit. Without `max_model_len`, a context that does not fit on any number of
    cards is halved until it fits. Raises ConfigError if nothing fits.
    """
    wanted = choose_max_model_len(
        max_model_len, model_config, allows_longer=config.allow_long_max_model_len
    )
    length = wanted
    # Fitting buckets takes seconds per plan; exponential-v3 is fast and makes at least as many
    # buckets.
    quick = replace(config, buckets=config.buckets.resolved("exponential-v3"))
    while True:
        plans = [
            found
            for cards in CARDS
            if cards <= num_cards
            and (found := _best(model_config, _with(quick, cards, length), target)) is not None
        ]
        if plans or max_model_len is not None or length // 2 < MIN_MODEL_LEN:
            break
        length //= 2
    if not plans:
        raise ConfigError(
            f"{model_config.path} does not fit into "
            f"{counted(num_cards, f'{target.device} card')}, even with a context of {length} "
            "tokens: see `gaudiserve plan`"
        )
    typical = min(TYPICAL_TOKENS, length)
    chosen, _ = next(
        (found for found in plans if found[1].card.sequences(typical) >= ENOUGH_SEQS), plans[-1]
    )
    plan = make_plan(model_config, replace(chosen, buckets=config.buckets), target)
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


def _best(
    model_config: ModelConfig, config: EngineConfig, target: Target
) -> tuple[EngineConfig, Plan] | None:
    """(settings, plan) of the fitting plan with the most concurrent sequences; None if no plan fits
    or the model cannot be sharded across this many cards."""
    for count in MAX_NUM_SEQS:
        for tried, plan in _plans(model_config, config, target, count):
            typical = min(TYPICAL_TOKENS, plan.card.demand.max_model_len)
            if plan.fits and plan.card.sequences(typical) >= count:
                return tried, plan
    return None


def _plans(
    model_config: ModelConfig, config: EngineConfig, target: Target, count: int
) -> Iterator[tuple[EngineConfig, Plan]]:
    """At most two (settings, plan) pairs: first with enough graph memory for all graphs, if that
    share is allowed, then with the configured share."""
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=count))
    try:
        plan = make_plan(model_config, config, target)
    except ConfigError:
        return
    if plan.table is not None and plan.captures:
        share = math.ceil(100 * plan.graph_bytes[1] / plan.card.parts.usable) / 100
        if plan.card.demand.graph_reserved < share <= MAX_GRAPH_MEMORY:
            larger = replace(config.warmup, graph_memory_fraction=share)
            larger_config = replace(config, warmup=larger)
            yield larger_config, make_plan(model_config, larger_config, target)
    yield config, plan


def card_generation(machine: Machine) -> str:
    """Generation of the cards of `machine`. Raises ConfigError if it has no card, or cards of an
    unknown generation or of several."""
    found = {card.generation for card in find_cards(machine).cards}
    if len(found) == 1 and (generation := found.pop()):
        return generation
    what = "cards of an unknown generation, or of several" if found else "no Gaudi card"
    raise ConfigError(
        f"--device is hpu, and this machine has {what}: set --device gaudi2 or gaudi3"
    )


def free_cards(machine: Machine) -> tuple[str | None, int]:
    """(generation, number) of the unused cards. The generation is None if the driver does not
    report it or the cards differ."""
    cards = [card for card in find_cards(machine).cards if not card.holders]
    generations = {card.generation for card in cards}
    return (generations.pop() if len(generations) == 1 else None), len(cards)

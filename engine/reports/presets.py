"""Presets: settings for a model on the cards of a host, computed by `plan`."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from config.data_parallel import MAX_ENGINES
from config.engine import EngineConfig
from config.errors import CheckpointError, ConfigError, counted
from config.model.model_config import ModelConfig
from config.startup_checks import choose_max_model_len, unserved_weights
from engine.reports.plan import UNSERVED, Plan, Target, changes_of, make_plan
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
"""Tensor-parallel sizes to try, on a node of eight cards."""
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
    num_engines: int
    """Engines on the host."""

    @property
    def cards_per_engine(self) -> int:
        """Cards of the host that an engine uses."""
        return self.plan.card.demand.num_cards * self.plan.card.demand.num_stages

    @property
    def num_unused(self) -> int:
        """Cards of the host that no engine uses."""
        return self.num_cards - self.cards_per_engine * self.num_engines


def make_preset(
    model_config: ModelConfig,
    config: EngineConfig,
    target: Target,
    num_cards: int,
    given: Collection[str],
) -> Preset:
    """Compute the settings of a host with `num_cards`. `given`: the KEYS whose values in `config`
    are kept, as are all settings of `config` that a preset does not include.

    An engine gets the fewest cards that hold a full context and enough sequences, or the most cards
    if no number holds enough. The host runs as many engines as fit, unless their number is given. A
    context that fits on no number of cards is halved until it fits, unless it is given. Raises
    ConfigError if nothing fits, and CheckpointError for weights that are not served.
    """
    if reason := unserved_weights(model_config, config.model_impl):
        raise CheckpointError(UNSERVED.format(reason))
    sizes = _engine_sizes(config, num_cards, given)
    has_length = "max-model-len" in given
    length = choose_max_model_len(
        config.max_model_len if has_length else None,
        model_config,
        allows_longer=config.allow_long_max_model_len,
    )
    # Fitting buckets takes seconds per plan; exponential-v3 is fast and usually makes more buckets.
    quick = replace(config, buckets=config.buckets.resolved("exponential-v3"))
    while True:
        plans = [
            found
            for cards, engines in sizes
            if (found := _best(model_config, quick, target, given, (cards, engines, length)))
            is not None
        ]
        if plans or has_length or length // 2 < MIN_MODEL_LEN:
            break
        length //= 2
    if not plans:
        cards, engines = sizes[-1]
        smallest = (cards, engines, length, _max_num_seqs(config, given)[-1])
        tried = [plan for _, plan in _plans(model_config, quick, target, given, smallest)]
        changes = changes_of(tried[-1]) if tried else []
        raise ConfigError(
            f"{model_config.path} does not fit into "
            f"{counted(num_cards, f'{target.device} card')}, even with a context of {length} "
            f"tokens: {'; or '.join(changes) or 'see `gaudiserve plan`'}"
        )
    typical = min(TYPICAL_TOKENS, length)
    enough = min(ENOUGH_SEQS, *_max_num_seqs(config, given)[:1])
    chosen, _ = next(
        (found for found in plans if found[1].card.sequences(typical) >= enough), plans[-1]
    )
    plan = make_plan(model_config, replace(chosen, buckets=config.buckets), target)
    demand = plan.card.demand
    values = (
        demand.num_cards,
        chosen.data_parallel.data_parallel_size,
        demand.max_model_len,
        demand.max_num_seqs,
        demand.max_num_batched_tokens,
        demand.block_size,
        demand.utilization,
        chosen.warmup.graph_memory_fraction,
        plan.strategy,
    )
    settings: dict[str, int | float | str] = dict(zip(KEYS, values, strict=True))
    return Preset(settings, plan, num_cards, chosen.data_parallel.num_local)


def _engine_sizes(
    config: EngineConfig, num_cards: int, given: Collection[str]
) -> list[tuple[int, int]]:
    """Possible (tensor-parallel size, data-parallel size) on a host with `num_cards`, fewest cards
    per engine first. Raises ConfigError if the given sizes need more cards."""
    parallel, data = config.parallel, config.data_parallel
    sizes = (parallel.tensor_parallel_size,) if "tensor-parallel-size" in given else CARDS
    is_fixed = "data-parallel-size" in given or bool(data.data_parallel_size_local)
    engines = data.num_local if is_fixed else 1
    smallest = sizes[0] * parallel.pipeline_parallel_size * engines
    if smallest > num_cards:
        raise ConfigError(
            f"--tensor-parallel-size {sizes[0]} x --pipeline-parallel-size "
            f"{parallel.pipeline_parallel_size} x {counted(engines, 'engine')} takes "
            f"{counted(smallest, 'card')}, and the host has {num_cards}"
        )
    widths = ((cards, cards * parallel.pipeline_parallel_size) for cards in sizes)
    if is_fixed:
        own = data.data_parallel_size
        return [(cards, own) for cards, width in widths if width * engines <= num_cards]
    return [
        (cards, min(num_cards // width, MAX_ENGINES))
        for cards, width in widths
        if width <= num_cards
    ]


def _max_num_seqs(config: EngineConfig, given: Collection[str]) -> tuple[int, ...]:
    """Values of --max-num-seqs to try, largest first."""
    return (config.scheduler.max_num_seqs,) if "max-num-seqs" in given else MAX_NUM_SEQS


def _best(
    model_config: ModelConfig,
    config: EngineConfig,
    target: Target,
    given: Collection[str],
    size: tuple[int, int, int],
) -> tuple[EngineConfig, Plan] | None:
    """(settings, plan) of the fitting plan with the most concurrent sequences; None if no plan fits
    or the model cannot be sharded this way. `size`: tensor-parallel size, data-parallel size and
    context."""
    for count in _max_num_seqs(config, given):
        for tried, plan in _plans(model_config, config, target, given, (*size, count)):
            typical = min(TYPICAL_TOKENS, plan.card.demand.max_model_len)
            holds = "max-num-seqs" in given or plan.card.sequences(typical) >= count
            if plan.fits and holds:
                return tried, plan
    return None


def _plans(
    model_config: ModelConfig,
    config: EngineConfig,
    target: Target,
    given: Collection[str],
    size: tuple[int, int, int, int],
) -> Iterator[tuple[EngineConfig, Plan]]:
    """At most two (settings, plan) pairs: first with enough graph memory for all graphs, if that
    share is allowed and none is given, then with the configured share. `size`: as for `_best`, and
    --max-num-seqs."""
    cards, engines, length, count = size
    try:
        config = replace(
            config,
            max_model_len=length,
            parallel=replace(config.parallel, tensor_parallel_size=cards),
            data_parallel=replace(config.data_parallel, data_parallel_size=engines),
            scheduler=replace(config.scheduler, max_num_seqs=count),
        )
        plan = make_plan(model_config, config, target)
    except ConfigError:
        return
    if "graph-reserved-mem" not in given and plan.num_graphs:
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
    report it, the cards differ or no card is free."""
    cards = [card for card in find_cards(machine).cards if not card.holders]
    generations = {card.generation for card in cards}
    return (generations.pop() if len(generations) == 1 else None), len(cards)

"""Report of `gaudiserve plan`: a model's memory per card, its buckets, and changes that would make
it fit. Reads no device and no weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from config.engine import EngineConfig
from config.errors import ConfigError, bytes_text
from config.execution import PACKED_EXPERTS_FLAG
from config.json_text import Json
from config.model.architectures import is_native
from config.model.kv_cache_dtype import AUTO, ON_GAUDI, kv_width
from config.model.model_config import ModelConfig
from config.startup_checks import (
    check_format_at_load,
    choose_max_model_len,
    chosen_quantization,
    facts_at_load,
    unserved_weights,
)
from engine.reports.buckets import BLOCK_SIZE, SECONDS_PER_GRAPH, planned_table
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.select import GAUDI_STRATEGY
from hpu.gaudi_devices import GIB, generation
from hpu.model_loader.size_estimate import (
    count_active_parameters,
    count_parameters,
    has_packed_experts,
    state_bytes,
)
from hpu.protocol import PREFILL
from hpu.worker.card_plan import CardDemand, CardPlan, changes, plan_card, with_companions

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
LENGTHS = (512, 2000, 8000, 32000)
"""Default sequence lengths of the report, besides the full context."""

GRAPH_BYTES = (5_000_000, 20_000_000)
"""(smallest, largest) memory of a captured graph, from published calculators."""

READ_BYTES_PER_S = 500_000_000
"""Assumed read bandwidth of weights from storage."""

_MIN_BILLIONS = 0.1
"""Smaller parameter counts are shown in millions."""

STARTUP_MARGIN_S = 600
"""Allowance for process start, acquisition of the cards and the profile run."""

PROBE_PERIOD_S = 10
"""`periodSeconds` of the startup probes in deploy/kubernetes."""

QUANTIZED_NOTE = (
    "the checkpoint's weights are quantized in a format that is not supported: they are counted "
    "in {}"
)
UNSERVED = "It is not served: {} (docs/quantization.md#not-served)"
EXPANDED_NOTE = f"packed experts are counted in {{}}: --{PACKED_EXPERTS_FLAG} keeps them in 4 bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Card type and report settings that are not settings of the server."""

    device: str
    card_bytes: int | None = None
    lengths: tuple[int, ...] = ()
    seconds_per_graph: float = SECONDS_PER_GRAPH

    def __post_init__(self) -> None:
        generation(self.device)


@dataclass(frozen=True, slots=True)
class Plan:
    """Data of the text and JSON reports."""

    model_config: ModelConfig
    target: Target
    dtype: str
    card: CardPlan
    lengths: tuple[int, ...]
    table: BucketTable | None
    """None if the model does not fit."""
    strategy: str
    num_graphs: int
    """Number of buckets that a warm-up compiles and captures."""
    notes: tuple[str, ...]
    kv_cache_dtype: str
    not_served: str = ""
    """Why a server refuses the checkpoint's weights; empty if it does not."""

    @property
    def graph_bytes(self) -> tuple[int, int]:
        """(smallest, largest) estimate of the memory of all graphs, from GRAPH_BYTES."""
        least, most = GRAPH_BYTES
        return self.num_graphs * least, self.num_graphs * most

    @property
    def fits(self) -> bool:
        """Whether the model fits the card, and the smallest estimate of the graphs' memory fits the
        reserve."""
        return self.card.fits and self.graph_bytes[0] <= self.card.parts.graphs

    @property
    def is_served(self) -> bool:
        """Whether a server with these settings starts, as far as the plan knows."""
        return self.fits and not self.not_served

    @property
    def startup_seconds(self) -> float:
        """Seconds that a startup probe should allow: twice the estimated time to read the weights
        and to warm up, and a margin."""
        demand = self.card.demand
        weights = self.card.weight_bytes * demand.num_cards * demand.num_stages
        warmup = self.num_graphs * self.target.seconds_per_graph
        return STARTUP_MARGIN_S + 2 * (weights / READ_BYTES_PER_S + warmup)

    @property
    def probe_failures(self) -> int:
        """`failureThreshold` of a startup probe that allows `startup_seconds`."""
        return math.ceil(self.startup_seconds / PROBE_PERIOD_S)


def with_sizes(model_config: ModelConfig, model_impl: str) -> ModelConfig:
    """`model_config` with all sizes that a plan needs. transformers computes the size of models
    that are not built in, and of vision towers of unknown size. Raises ConfigError."""
    # Imported here: these modules load torch and transformers, which few models need.
    if not is_native(model_config, model_impl):
        model_config = import_module("hpu.models.registry").transformers_facts(model_config)
    if model_config.vision is not None and not model_config.num_tower_parameters:
        count: int = import_module("hpu.multimodal.select").count_tower(model_config)
        model_config = replace(model_config, num_tower_parameters=count)
    return model_config


def make_plan(model_config: ModelConfig, config: EngineConfig, target: Target) -> Plan:
    """Compute a plan. Raises ConfigError."""
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    not_served = unserved_weights(model_config, config.model_impl)
    chosen_quantization(config.quantization, model_config, target.device)
    check_format_at_load(config.quantization, model_config, target.device)
    model_config = facts_at_load(config.quantization, model_config)
    max_model_len = choose_max_model_len(
        config.max_model_len, model_config, allows_longer=config.allow_long_max_model_len
    )
    cache, schedule = config.cache, config.scheduler
    schedule.check_whole_prompts(max_model_len)
    if cache.kv_cache_dtype not in ON_GAUDI:
        raise ConfigError(
            f"--kv-cache-dtype is {cache.kv_cache_dtype} and the cards are {target.device}: Gaudi "
            f"caches keys and values in one of {', '.join(ON_GAUDI)}"
        )
    demand = CardDemand(
        device=target.device,
        num_cards=config.parallel.tensor_parallel_size,
        num_stages=config.parallel.pipeline_parallel_size,
        num_engines=config.num_coupled_engines,
        width=WIDTHS[dtype],
        kv_width=kv_width(cache.kv_cache_dtype, WIDTHS[dtype]),
        max_model_len=max_model_len,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.token_budget(max_model_len),
        block_size=cache.block_size or BLOCK_SIZE,
        utilization=cache.gpu_memory_utilization,
        graph_reserved=0.0 if config.enforce_eager else config.warmup.graph_memory_fraction,
        slices=config.execution.slice_sizes,
        num_blocks=cache.num_blocks,
        kv_bytes=cache.kv_cache_memory_bytes,
        card_bytes=target.card_bytes,
        cross_images=cache.cross_attention_images,
        max_prefill_batch=schedule.prefill_batch(),
        prefix_caching=cache.enable_prefix_caching,
        distributes_experts=config.parallel.enable_expert_parallel,
        packs_experts=config.execution.packs_experts,
        offload=config.offload,
    )
    demand = with_companions(demand, config, model_config)
    card = plan_card(model_config, demand)
    table = _table(model_config, config, card) if card.fits else None
    strategy = config.buckets.resolved(GAUDI_STRATEGY).strategy
    notes = []
    if model_config.is_quantized and model_config.quantization is None:
        if not has_packed_experts(model_config):
            notes.append(QUANTIZED_NOTE.format(dtype))
        elif not demand.packs_experts:
            notes.append(EXPANDED_NOTE.format(dtype))
    if card.tiers is not None and not card.tiers.fits:
        notes.append(
            f"--kv-offloading-size and --swap-space have room for {card.tiers.host_blocks} KV "
            f"blocks of {card.block_bytes} bytes, too few for a server"
        )
    plan = Plan(
        model_config,
        target,
        dtype,
        card,
        _lengths(target.lengths, max_model_len),
        table,
        strategy,
        0 if table is None or config.enforce_eager else len(table.reachable),
        tuple(notes),
        dtype if cache.kv_cache_dtype == AUTO else cache.kv_cache_dtype,
        not_served,
    )
    return replace(plan, notes=(*plan.notes, *_graph_notes(plan)))


def _lengths(requested: Sequence[int], max_model_len: int) -> tuple[int, ...]:
    for length in requested:
        if not 1 <= length <= max_model_len:
            raise ConfigError(
                f"a length is {length}, it must be between 1 and --max-model-len, {max_model_len}"
            )
    shorter = [length for length in LENGTHS if length < max_model_len]
    return tuple(requested) or (*shorter, max_model_len)


def _table(model_config: ModelConfig, config: EngineConfig, card: CardPlan) -> BucketTable:
    """Bucket table that a worker would make for this model and card."""
    demand = card.demand
    states = state_bytes(model_config, width=demand.width, num_seqs=1, num_cards=demand.num_cards)
    cache = replace(
        config.cache,
        num_blocks=max(2, card.num_blocks),
        block_size=demand.block_size,
        # Recurrent states are not cached.
        enable_prefix_caching=config.cache.enable_prefix_caching and not states,
    )
    return planned_table(
        replace(config, max_model_len=demand.max_model_len, cache=cache),
        has_windows=model_config.sliding_window is not None,
    )


def _graph_notes(plan: Plan) -> list[str]:
    """A note if the plan fits, but the largest estimate of the graphs' memory exceeds the
    reserve."""
    least, most = plan.graph_bytes
    reserve = plan.card.parts.graphs
    if not plan.fits or most <= reserve:
        return []
    return [
        f"{plan.num_graphs} graphs may not all fit into {reserve / GIB:.2f} GiB: they take "
        f"{least / GIB:.2f} to {most / GIB:.2f} GiB, and launches without a graph are slower; "
        + ", or ".join(_graph_changes(plan))
    ]


def _graph_changes(plan: Plan) -> list[str]:
    """Changes after which all graphs fit into the reserve."""
    wanted = math.ceil(100 * plan.graph_bytes[1] / plan.card.parts.usable) / 100
    larger = [f"--graph-reserved-mem {wanted:g}"] if wanted < 1 else []
    return [*larger, "fewer buckets (`gaudiserve buckets fit`)"]


def as_text(plan: Plan) -> str:
    """The report as text."""
    lines = [*_head(plan), "", *_memory(plan)]
    if plan.card.num_blocks:
        lines += ["", *_sequences(plan)]
    if plan.card.tiers is not None:
        lines += ["", *_offload(plan.card)]
    if plan.table is not None:
        lines += ["", *_buckets(plan, plan.table)]
    lines.append("")
    if plan.fits:
        lines += [] if plan.not_served else ["It fits."]
    else:
        lines.append(f"It does not fit: {_shortage(plan)}. Changes that make it fit:")
        lines += [f"  {change}" for change in changes_of(plan)]
    lines += [f"note: {note}" for note in plan.notes]
    lines += [UNSERVED.format(plan.not_served)] if plan.not_served else []
    return "\n".join(lines)


def _in_words(num_parameters: float) -> str:
    """Parameter count in billions or, for a small model, in millions."""
    if num_parameters < _MIN_BILLIONS * 1e9:
        return f"{num_parameters / 1e6:.2f} million"
    return f"{num_parameters / 1e9:.2f} billion"


def _head(plan: Plan) -> list[str]:
    card, target = plan.card, plan.target
    parameters = count_parameters(plan.model_config) + plan.model_config.num_tower_parameters
    title, demand = generation(target.device).title, card.demand
    chosen = _active_parameters(plan.model_config)
    active = "" if chosen is None else f" ({_in_words(chosen)} active)"
    num_cards = demand.num_cards * demand.num_stages * demand.num_engines
    cards = f"{num_cards} cards" if num_cards > 1 else "1 card"
    if demand.num_stages > 1:
        cards += f" in {demand.num_stages} stages"
    if demand.num_engines > 1:
        cards += f" of {demand.num_engines} engines"
    if demand.num_cards * demand.num_engines > 1 and demand.distributes_experts:
        cards += ", whole experts on each"
    return [
        f"{plan.model_config.path}: {plan.model_config.architecture}, {_in_words(parameters)} "
        f"parameters{active}, {_dtypes(plan)}",
        f"{title}, {cards}; context {demand.max_model_len} tokens, "
        f"{demand.max_num_seqs} sequences, {demand.max_num_batched_tokens} tokens a step",
    ]


def _dtypes(plan: Plan) -> str:
    """Formats of weights, KV cache and activations, as text."""
    stored = plan.model_config.quantization
    weights = plan.dtype if stored is None else stored.method
    if {weights, plan.kv_cache_dtype} == {plan.dtype}:
        return plan.dtype
    return f"weights {weights}, KV cache {plan.kv_cache_dtype}, activations {plan.dtype}"


def _active_parameters(model_config: ModelConfig) -> int | None:
    """Parameters that each token uses in a mixture-of-experts model; None for a dense model."""
    return None if model_config.moe is None else count_active_parameters(model_config)


def _memory(plan: Plan) -> list[str]:
    card, demand = plan.card, plan.card.demand
    is_fixed = demand.num_blocks is not None or demand.kv_bytes is not None
    kv = (card.num_blocks + 1) * card.block_bytes if is_fixed else card.parts.kv
    blocks = (
        f"{card.num_blocks} blocks of {demand.block_size} tokens, "
        f"{bytes_text(card.block_bytes)} each{', as set' if is_fixed else ''}"
    )
    states = [("states", card.state_bytes, f"of {demand.max_num_seqs} sequences")]
    rings = [("windows", card.ring_bytes, f"of {demand.max_num_seqs} sequences")]
    staging = [("copies", card.staging_bytes, "of blocks to host memory and back")]
    adapters = [("adapters", card.adapter_bytes, "of all slots")]
    weights = ""
    if card.drafter.weight_bytes:
        weights = f"{card.drafter.weight_bytes / GIB:.2f} of them for the drafter"
    elif card.host_weight_bytes:
        weights = f"two layers at a time, {card.host_weight_bytes / GIB:.2f} GiB in host memory"
    rows = (
        ("memory", card.card_bytes, "available to a process"),
        ("weights", card.weight_bytes, weights),
        ("activations", card.activation_bytes, "of the widest launch, estimated"),
        *(adapters if card.adapter_bytes else ()),
        *(states if card.state_bytes else ()),
        *(rings if card.ring_bytes else ()),
        *(staging if card.staging_bytes else ()),
        ("free", max(0, card.free_bytes), ""),
        ("  usable", card.parts.usable, f"{demand.utilization:g} of the free memory"),
        ("    graphs", card.parts.graphs, f"{demand.graph_reserved:g} of the usable memory"),
        ("    KV cache", kv, blocks),
        ("  margin", card.parts.margin, "not planned"),
    )
    which = "each card"
    if demand.num_stages > 1:
        which = f"stage {card.stage.rank + 1} of {demand.num_stages}"
    lines = [f"{which:<16}{'GiB':>8}"]
    lines += [f"{name:<16}{size / GIB:>8.2f}  {what}".rstrip() for name, size, what in rows]
    return lines


def _sequences(plan: Plan) -> list[str]:
    card, most = plan.card, plan.card.demand.max_num_seqs
    lines = [f"{'tokens':>8}{'sequences at once':>20}"]
    for length in plan.lengths:
        count = card.sequences(length)
        limit = f"  --max-num-seqs allows {most}" if count > most else ""
        lines.append(f"{length:>8}{count:>20}{limit}")
    return lines


def _offload(card: CardPlan) -> list[str]:
    """Lines about the KV offload tiers: host memory and files."""
    tiers = card.tiers
    assert tiers is not None, "blocks leave the cards"
    what = "preempted requests" if tiers.only_preempted else "evicted blocks, preempted requests"
    rows = [("host memory", tiers.host_bytes, tiers.host_blocks)]
    if tiers.file_blocks:
        rows.append(("files", tiers.file_bytes, tiers.file_blocks))
    size = card.demand.block_size
    return [
        f"{'KV offload':<16}{'GiB':>8}  for each card; {what}",
        *(
            f"{name:<16}{num_bytes / GIB:>8.2f}  {count} blocks, {count * size} tokens"
            for name, num_bytes, count in rows
        ),
    ]


def _buckets(plan: Plan, table: BucketTable) -> list[str]:
    prompts, decodes = _counts(table)
    count, seconds = plan.num_graphs, plan.target.seconds_per_graph
    lines = [f"buckets, {plan.strategy}: {prompts} for prompts, {decodes} for decodes"]
    if not count:
        lines.append("warm-up: no graphs are captured")
    else:
        least, most = (size / GIB for size in plan.graph_bytes)
        lines.append(
            f"warm-up: {count} graphs, about {count * seconds / 60:.1f} minutes at {seconds:g} s "
            f"each, {least:.2f} to {most:.2f} GiB of {plan.card.parts.graphs / GIB:.2f}"
        )
    probe = f"failureThreshold {plan.probe_failures}, periodSeconds {PROBE_PERIOD_S}"
    return [*lines, f"startup probe: {probe}"]


def _counts(table: BucketTable) -> tuple[int, int]:
    prompts = sum(1 for bucket in table.buckets if bucket[0] == PREFILL)
    return prompts, len(table.buckets) - prompts


def changes_of(plan: Plan) -> list[str]:
    """Changes that would make the plan fit."""
    if plan.fits:
        return []
    return _graph_changes(plan) if plan.card.fits else changes(plan.model_config, plan.card)


def _shortage(plan: Plan) -> str:
    card = plan.card
    if card.fits:
        return (
            f"{plan.num_graphs} graphs take {plan.graph_bytes[0] / GIB:.2f} GiB at least, "
            f"{card.parts.graphs / GIB:.2f} GiB are reserved for graphs"
        )
    if card.free_bytes <= 0:
        needed = card.card_bytes - card.free_bytes
        more = [
            ("adapters", card.adapter_bytes),
            ("states", card.state_bytes),
            ("windows", card.ring_bytes),
            ("copies", card.staging_bytes),
        ]
        what = ["weights", "activations", *(name for name, size in more if size)]
        names = f"{', '.join(what[:-1])} and {what[-1]}"
        return f"{names} take {bytes_text(needed)}, a card has {bytes_text(card.card_bytes)}"
    if card.num_blocks < card.context_blocks:
        return (
            f"a full context of {card.demand.max_model_len} tokens takes {card.context_blocks} "
            f"blocks, there are {card.num_blocks}"
        )
    needed = (card.num_blocks + 1) * card.block_bytes
    return (
        f"{card.num_blocks} blocks take {bytes_text(needed)}, "
        f"{bytes_text(card.free_bytes)} are free"
    )


def as_json(plan: Plan) -> Json:
    """The report as JSON; sizes in bytes are per card."""
    card, demand = plan.card, plan.card.demand
    return {
        "model": plan.model_config.path,
        "architecture": plan.model_config.architecture,
        "parameters": count_parameters(plan.model_config) + plan.model_config.num_tower_parameters,
        "active_parameters": _active_parameters(plan.model_config),
        "dtype": plan.dtype,
        "device": plan.target.device,
        "tensor_parallel_size": demand.num_cards,
        "pipeline_parallel_size": demand.num_stages,
        "stage": card.stage.rank,
        "num_coupled_engines": demand.num_engines,
        "enable_expert_parallel": demand.distributes_experts,
        "max_model_len": demand.max_model_len,
        "max_num_seqs": demand.max_num_seqs,
        "block_size": demand.block_size,
        "memory_bytes": card.card_bytes,
        "weight_bytes": card.weight_bytes,
        "host_weight_bytes": card.host_weight_bytes,
        "drafter_weight_bytes": card.drafter.weight_bytes,
        "drafter_block_bytes": card.drafter.block_bytes,
        "adapter_bytes": card.adapter_bytes,
        "activation_bytes": card.activation_bytes,
        "state_bytes": card.state_bytes,
        "window_bytes": card.ring_bytes,
        "offload": _offload_json(card),
        "free_bytes": card.free_bytes,
        "usable_bytes": int(card.parts.usable),
        "graph_bytes": int(card.parts.graphs),
        "kv_bytes": int(card.parts.kv),
        "margin_bytes": int(card.parts.margin),
        "block_bytes": card.block_bytes,
        "num_blocks": card.num_blocks,
        "sequences": {str(length): card.sequences(length) for length in plan.lengths},
        "buckets": _buckets_json(plan),
        "startup_seconds": math.ceil(plan.startup_seconds),
        "fits": plan.fits,
        "not_served": plan.not_served or None,
        "changes": changes_of(plan),
        "notes": list(plan.notes),
    }


def _offload_json(card: CardPlan) -> Json | None:
    tiers, size = card.tiers, card.demand.block_size
    if tiers is None:
        return None
    return {
        **tiers._asdict(),
        "host_tokens": tiers.host_blocks * size,
        "file_tokens": tiers.file_blocks * size,
    }


def _buckets_json(plan: Plan) -> Json | None:
    if plan.table is None:
        return None
    prompts, decodes = _counts(plan.table)
    graphs = plan.num_graphs
    least, most = plan.graph_bytes
    return {
        "strategy": plan.strategy,
        "prompts": prompts,
        "decodes": decodes,
        "graphs": graphs,
        "least_bytes": least,
        "most_bytes": most,
        "warmup_seconds": graphs * plan.target.seconds_per_graph,
    }

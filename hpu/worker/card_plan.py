"""CardPlan: whether a model fits a card's memory, and settings that would make it fit. Computed
without a device."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from config.checkpoint.weight_maps.shard import ShardRank
from config.engine import EngineConfig
from config.errors import ConfigError, bytes_text
from config.model.architectures import ARCHITECTURES
from config.model.model_config import ModelConfig
from config.model.multimodal.vision import VisionFacts, cross_cache_tiles, encoder_cache_rows
from config.model.split import check_split, check_stages
from config.model.window_cache import rings_fit_more_blocks
from config.parallel import WHOLE, Stage
from config.params.offload import OffloadConfig
from config.startup_checks import facts_at_load
from hpu.gaudi_devices import GENERATIONS, generation
from hpu.lora.slot_sizes import adapter_slot_bytes
from hpu.model_loader.size_estimate import (
    activation_bytes,
    context_bytes,
    cross_activation_bytes,
    cross_tile_bytes,
    flag_bytes,
    kv_block_bytes,
    kv_cache_sizes,
    layer_bytes,
    state_bytes,
    weight_bytes,
)
from hpu.offload.host_layers import freed_bytes, host_layers
from hpu.spec_decode.drafter_sizes import NO_DRAFTER, DrafterSizes, drafter_sizes
from hpu.worker.memory import MemoryPlan, num_blocks, plan_memory
from hpu.worker.offload_plan import OffloadTiers, offload_tiers

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
"""Tensor-parallel sizes to propose for a machine of eight cards."""
PIPELINE_PARALLEL_SIZES = (2, 3, 4)
"""Numbers of machines (of eight cards each) to propose."""

NO_OFFLOAD = OffloadConfig()


def no_drafter(num_cards: int) -> DrafterSizes:
    return NO_DRAFTER


def no_adapters(at: ShardRank, stage: Stage) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CardDemand:
    """The settings that determine the memory use of a model, and the cards."""

    device: str
    num_cards: int
    """Number of cards among which each layer is divided (tensor parallelism)."""
    num_stages: int = 1
    """Number of pipeline stages, each of `num_cards` cards."""
    num_engines: int = 1
    """Number of engines that share experts, each of `num_cards` cards."""
    width: int
    """Bytes per weight or activation."""
    kv_width: int
    """Bytes per element of the KV cache."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    utilization: float
    graph_reserved: float
    slices: tuple[int, int] | None = None
    """(threshold, tokens per slice) of sliced attention; None: never sliced."""
    num_blocks: int | None = None
    """Configured number of blocks; None: as many as fit."""
    kv_bytes: int | None = None
    """Configured KV cache bytes per card; None: the planned share of the free memory."""
    card_bytes: int | None = None
    """Memory of a card; None: the generation's default."""
    cross_images: int = 1
    """Maximum number of images per request, for cross-attention."""
    max_prefill_batch: int = 1
    """Maximum number of prompts in a launch."""
    prefix_caching: bool = True
    distributes_experts: bool = False
    """Expert parallelism: each card has whole experts instead of a part of each expert."""
    packs_experts: bool = False
    """Whether experts that are stored in 4-bit floats stay in 4 bits."""
    max_tokens_per_step: int = 1
    """Tokens of a sequence in a decode: 1 + draft tokens. If above 1, sliding-window layers cache
    the whole context."""
    drafter_sizes: Callable[[int], DrafterSizes] = no_drafter
    """Returns the drafter's sizes per card, given the number of cards."""
    adapter_bytes: Callable[[ShardRank, Stage], int] = no_adapters
    """Returns the memory of the adapter slots on a card of a stage."""
    offload: OffloadConfig = NO_OFFLOAD


@dataclass(frozen=True, slots=True)
class CardPlan:
    """Bytes on each card, and the KV blocks: as configured, or as many as fit."""

    demand: CardDemand
    card_bytes: int
    weight_bytes: int
    activation_bytes: int
    parts: MemoryPlan
    """Split of the memory that is free after the weights, the largest launch, states, rings,
    adapter slots and staging buffers."""
    block_bytes: int
    num_blocks: int
    """Number of KV blocks without the pad block."""
    state_bytes: int = 0
    """Bytes of per-sequence states, and on the first stage of image embeddings or of the keys and
    values of image tiles."""
    ring_bytes: int = 0
    """Bytes of sliding-window rings, which are not part of blocks."""
    stage: Stage = WHOLE
    """Pipeline stage of these cards."""
    tiers: OffloadTiers | None = None
    """None without KV offloading."""
    host_weight_bytes: int = 0
    """Bytes of the layers that are kept in host memory and copied to the cards during launches."""
    adapter_bytes: int = 0
    """Memory of the adapter slots."""
    drafter: DrafterSizes = NO_DRAFTER
    """The drafter's share of `weight_bytes` and `block_bytes`."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers for block copies between card and host."""
        return 0 if self.tiers is None else self.tiers.staging_bytes

    @property
    def free_bytes(self) -> int:
        fixed = self.state_bytes + self.ring_bytes + self.staging_bytes + self.adapter_bytes
        return self.card_bytes - self.weight_bytes - self.activation_bytes - fixed

    @property
    def context_blocks(self) -> int:
        return math.ceil(self.demand.max_model_len / self.demand.block_size)

    @property
    def fits(self) -> bool:
        """Whether the weights, a full context and the configured blocks fit."""
        if self.num_blocks < self.context_blocks:
            return False
        return (self.num_blocks + 1) * self.block_bytes <= self.free_bytes

    def sequences(self, num_tokens: int) -> int:
        """Number of sequences of `num_tokens` that fit the cache, ignoring the scheduler's
        limits."""
        return self.num_blocks // math.ceil(num_tokens / self.demand.block_size)


def with_companions(
    demand: CardDemand, config: EngineConfig, model_config: ModelConfig
) -> CardDemand:
    """`demand` plus the drafter and the adapters that `config` adds to the model `model_config`."""

    def sizes_of_drafter(num_cards: int) -> DrafterSizes:
        return drafter_sizes(
            config,
            model_config,
            num_cards=num_cards,
            width=demand.width,
            kv_width=demand.kv_width,
            block_size=demand.block_size,
            max_model_len=demand.max_model_len,
        )

    def bytes_of_adapters(at: ShardRank, stage: Stage) -> int:
        return adapter_slot_bytes(config, model_config, at=at, width=demand.width, stage=stage)

    return replace(
        demand,
        max_tokens_per_step=config.speculation.max_tokens_per_step(),
        drafter_sizes=sizes_of_drafter,
        adapter_bytes=bytes_of_adapters,
    )


def plan_card(model_config: ModelConfig, demand: CardDemand) -> CardPlan:
    """Plan the memory of a card. With pipeline stages, returns the plan of a stage that does not
    fit, or else of the stage with the fewest blocks, since all stages have the same number of
    blocks. Raises ConfigError."""
    if demand.num_stages > 1 and model_config.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{model_config.path} is a {model_config.architecture}, which has no native "
            f"implementation, and --pipeline-parallel-size is {demand.num_stages}: use "
            "--tensor-parallel-size"
        )
    check_stages(model_config, demand.num_stages)
    stages = (Stage(rank, demand.num_stages) for rank in range(demand.num_stages))
    plans = [_plan_stage(model_config, demand, stage) for stage in stages]
    return min(plans, key=lambda plan: (plan.fits, plan.num_blocks, plan.free_bytes))


def _plan_stage(model_config: ModelConfig, demand: CardDemand, stage: Stage) -> CardPlan:
    distributes_experts = demand.distributes_experts and demand.num_cards * demand.num_engines > 1
    check_split(
        model_config,
        demand.num_cards,
        distributes_experts=distributes_experts,
        num_engines=demand.num_engines,
    )
    card = demand.card_bytes or generation(demand.device).usable_bytes
    weights = weight_bytes(
        model_config,
        num_cards=demand.num_cards,
        width=demand.width,
        length=demand.max_model_len,
        distributes_experts=distributes_experts,
        num_engines=demand.num_engines,
        stage=stage,
        packs_experts=demand.packs_experts,
    )
    # Only the last stage has a drafter.
    drafter = demand.drafter_sizes(demand.num_cards) if stage.is_last else NO_DRAFTER
    weights += drafter.weight_bytes
    freed = in_host = 0
    if demand.offload.cpu_offload_gb and stage.size == 1:
        layers = layer_bytes(model_config, num_cards=demand.num_cards, width=demand.width)
        chosen = host_layers(demand.offload, layers)
        freed, in_host = freed_bytes(layers, chosen), sum(layers[index] for index in chosen)
    weights -= freed
    activations = activation_bytes(
        model_config,
        num_cards=demand.num_cards,
        width=demand.width,
        num_tokens=demand.max_num_batched_tokens,
        num_logit_rows=demand.max_num_seqs * demand.max_tokens_per_step,
        num_engines=demand.num_engines,
    )
    activations += context_bytes(
        model_config,
        num_cards=demand.num_cards,
        width=demand.width,
        num_tokens=demand.max_num_batched_tokens,
        max_model_len=demand.max_model_len,
        block_size=demand.block_size,
        slices=demand.slices,
    )
    activations += cross_activation_bytes(
        model_config,
        num_cards=demand.num_cards,
        width=demand.width,
        num_tokens=demand.max_num_batched_tokens,
        num_seqs=demand.max_num_seqs,
        num_prompts=demand.max_prefill_batch,
        images_per_request=demand.cross_images,
    )
    states = state_bytes(
        model_config,
        width=demand.width,
        num_seqs=demand.max_num_seqs,
        num_cards=demand.num_cards,
    )
    has_states = states > 0
    if model_config.vision is not None and stage.is_first:
        states += _image_bytes(model_config, model_config.vision, demand)
    sizes = kv_cache_sizes(
        model_config,
        num_cards=demand.num_cards,
        width=demand.kv_width,
        block_size=demand.block_size,
        num_seqs=demand.max_num_seqs,
    )
    block_bytes = sizes.block
    if stage.size > 1:
        block_bytes = kv_block_bytes(
            model_config,
            num_cards=demand.num_cards,
            width=demand.kv_width,
            block_size=demand.block_size,
            stage=stage,
        )
    flags = flag_bytes(width=demand.width, block_size=demand.block_size) if stage.is_last else 0
    sizes = sizes.with_further(flags)
    block_bytes += flags + drafter.block_bytes
    at = ShardRank(
        size=demand.num_cards,
        expert_size=demand.num_cards * demand.num_engines if distributes_experts else 1,
    )
    adapters = demand.adapter_bytes(at, stage)
    tiers = offload_tiers(demand.offload, block_bytes, demand.num_cards * demand.num_stages)
    free = card - weights - activations - states - adapters
    free -= 0 if tiers is None else tiers.staging_bytes
    parts, rings = _parts(demand, free), 0
    kv_bytes = parts.kv if demand.kv_bytes is None else demand.kv_bytes
    context_blocks = math.ceil(demand.max_model_len / demand.block_size)
    # A model with states has no prefix caching, and pipeline stages have no rings.
    if (
        stage.size == 1
        and demand.max_tokens_per_step == 1
        and (not demand.prefix_caching or has_states)
        and rings_fit_more_blocks(
            sizes,
            int(kv_bytes) if demand.num_blocks is None else max(0, free),
            demand.num_blocks or demand.max_num_seqs * context_blocks,
        )
    ):
        block_bytes, rings = sizes.full_block, sizes.rings
        parts = _parts(demand, free - rings)
        kv_bytes = parts.kv if demand.kv_bytes is None else demand.kv_bytes - rings
    blocks = demand.num_blocks
    if blocks is None:
        blocks = num_blocks(kv_bytes, block_bytes)
    return CardPlan(
        *(demand, card, weights, activations, parts, block_bytes, blocks, states, rings, stage),
        tiers,
        in_host,
        adapters,
        drafter,
    )


def _image_bytes(model_config: ModelConfig, vision: VisionFacts, demand: CardDemand) -> int:
    """Bytes of cached image embeddings, or of cross-attention keys and values."""
    if vision.cross is not None:
        tiles = cross_cache_tiles(vision.cross, demand.cross_images, demand.max_num_seqs)
        return tiles * cross_tile_bytes(
            model_config, num_cards=demand.num_cards, width=demand.width
        )
    rows = encoder_cache_rows(demand.max_model_len, demand.max_num_batched_tokens)
    return rows * vision.embeddings_per_row * model_config.hidden_size * demand.width


def _parts(demand: CardDemand, free: int) -> MemoryPlan:
    return plan_memory(
        max(0, free),
        utilization=demand.utilization,
        graph_memory_fraction=demand.graph_reserved,
    )


def changes(model_config: ModelConfig, plan: CardPlan) -> list[str]:
    """Changes that would make the plan fit; advice to use a smaller model if there are none."""
    suggestions = [
        *_smaller_demands(plan),
        *_quantized(model_config, plan.demand),
        *_more_memory(model_config, plan),
    ]
    return suggestions or ["no setting makes it fit: use a smaller model"]


def _smaller_demands(plan: CardPlan) -> Iterator[str]:
    demand, needed = plan.demand, (plan.context_blocks + 1) * plan.block_bytes
    free = plan.free_bytes
    if plan.num_blocks >= plan.context_blocks:
        most = max(0, free // plan.block_bytes - 1)
        flag = "--num-gpu-blocks-override" if demand.num_blocks else "--kv-cache-memory-bytes"
        yield (
            f"lower {flag}: {plan.num_blocks} blocks take "
            f"{bytes_text((plan.num_blocks + 1) * plan.block_bytes)}, {bytes_text(max(0, free))} "
            f"are free, which is {most} blocks"
        )
        return
    capacity = plan.num_blocks * demand.block_size
    if capacity:
        yield f"--max-model-len {capacity}: the capacity of {plan.num_blocks} blocks"
    if demand.num_blocks is not None or demand.kv_bytes is not None or free <= needed:
        return
    share = math.ceil(100 * needed / (free * (1 - demand.graph_reserved))) / 100
    if demand.graph_reserved < 1 and demand.utilization < share < 1:
        yield (
            f"--gpu-memory-utilization {share:g}: a full context takes {bytes_text(needed)}, "
            f"{bytes_text(plan.parts.kv)} are left for KV at {demand.utilization:g}"
        )
    reserve = math.floor(100 * (1 - needed / (free * demand.utilization))) / 100
    if 0.01 <= reserve < demand.graph_reserved:
        yield f"--graph-reserved-mem {reserve:g}: graphs then have {reserve:.0%} of the memory"


def _quantized(model_config: ModelConfig, demand: CardDemand) -> Iterator[str]:
    """Suggest to quantize the weights while loading, if they then fit on these cards: with the same
    context, otherwise with the longest context that fits."""
    if model_config.is_quantized or model_config.architecture not in ARCHITECTURES:
        return
    flag, quantized = "--quantization fp8", facts_at_load("fp8", model_config)
    demand = replace(demand, num_blocks=None, kv_bytes=None)
    if text := _fitting(quantized, demand):
        yield f"{flag}: {text}"
        return
    try:
        length = plan_card(quantized, demand).num_blocks * demand.block_size
    except ConfigError:
        return
    if 0 < length < demand.max_model_len and (
        text := _fitting(quantized, replace(demand, max_model_len=length))
    ):
        yield f"{flag} --max-model-len {length}: {text}"


def _more_memory(model_config: ModelConfig, plan: CardPlan) -> Iterator[str]:
    """More cards, or cards of another generation, on which the model would fit."""
    demand = replace(plan.demand, num_blocks=None, kv_bytes=None)
    yield from itertools.islice(_more_cards(model_config, demand), 1)
    if demand.card_bytes is None:
        for name, other in GENERATIONS.items():
            larger = other.memory_bytes > generation(demand.device).memory_bytes
            if larger and (text := _fitting(model_config, replace(demand, device=name))):
                yield f"--device {name}: {text}"


def _more_cards(model_config: ModelConfig, demand: CardDemand) -> Iterator[str]:
    """More cards of a machine, then several machines of eight cards with a pipeline stage on
    each."""
    for count in TENSOR_PARALLEL_SIZES:
        if count > demand.num_cards and (
            text := _fitting(model_config, replace(demand, num_cards=count))
        ):
            yield f"--tensor-parallel-size {count}: {text}"
    # Engines that share experts cannot have pipeline stages.
    for stages in PIPELINE_PARALLEL_SIZES if demand.num_engines == 1 else ():
        more = replace(demand, num_cards=TENSOR_PARALLEL_SIZES[-1], num_stages=stages)
        if stages > demand.num_stages and (text := _fitting(model_config, more)):
            flags = f"--tensor-parallel-size {more.num_cards} --pipeline-parallel-size {stages}"
            yield f"{flags}, on {stages} machines: {text}"


def _fitting(model_config: ModelConfig, demand: CardDemand) -> str | None:
    """Summary of the plan if it fits; None if it does not fit or is invalid."""
    try:
        plan = plan_card(model_config, demand)
    except ConfigError:
        return None
    if not plan.fits:
        return None
    weights = bytes_text(plan.weight_bytes)
    return f"{weights} of weights and {plan.num_blocks} blocks on each card"

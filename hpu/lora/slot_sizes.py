"""Memory of the adapter slots of a card, computed from the model's config. Imports no torch."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import WeightSpec
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.checkpoint.weight_maps.shard import ShardRank, shard_of
from config.engine import EngineConfig
from config.lora.base_modules import BaseModule, BaseModules, module_of
from config.lora.configured import extra_targets
from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig
from config.parallel import Stage
from config.params.lora import EMBEDDING, EXPERTS, EXTRA_TARGETS, HEAD
from hpu.model_loader.size_estimate import stage_entries


def adapter_slot_bytes(
    config: EngineConfig, model_config: ModelConfig, *, at: ShardRank, width: int, stage: Stage
) -> int:
    """Bytes of the slots of --max-loras adapters on rank `at` of a pipeline stage, with `width`
    bytes per number; 0 without --enable-lora. Raises ConfigError."""
    lora = config.lora
    if not lora.enable_lora:
        return 0
    targets = extra_targets(lora, BaseModules(model_config), config.download_dir)
    shards = at.size if lora.fully_sharded_loras else 1
    rank = -(-lora.max_lora_rank // shards) * shards
    weight_map = decoder_weight_map(model_config, decoder_spec(model_config))
    entries = list(stage_entries(weight_map, stage, is_tied=model_config.tie_word_embeddings))
    if model_config.tie_word_embeddings and stage.is_last and HEAD in targets:
        entries += _tied_heads(entries)
    numbers = sum(_numbers(spec, targets, at, rank, shards) for spec in entries)
    return lora.max_loras * numbers * width


def _tied_heads(entries: list[WeightSpec]) -> Iterator[WeightSpec]:
    for spec in entries:
        module = module_of(spec)
        if module is not None and module.kind == EMBEDDING:
            yield spec._replace(name="lm_head.weight", parameter="lm_head.weight")


def _numbers(
    spec: WeightSpec, targets: tuple[str, ...], at: ShardRank, rank: int, shards: int
) -> int:
    """Elements of a slot for the weight `spec`: `rank` rows of its inputs and of its outputs."""
    module = module_of(spec)
    if module is None or spec.is_scales or not _has_slots(module, targets):
        return 0
    shard = shard_of(spec, at)
    if shard is None:
        return 0
    if module.kind == EMBEDDING:
        # The embedding table of an adapter has all tokens on each rank.
        return rank * (spec.shape[0] + spec.shape[1])
    own = shard.spec
    count = own.num_experts or 1
    outputs, inputs = own.features
    if module.kind == EXPERTS or spec.shard_dim is None or module.kind == HEAD:
        return count * rank * (len(own.outputs or (0,)) * inputs + outputs)
    is_row_parallel = spec.shard_dim == 1
    rank_a = rank if is_row_parallel else rank // shards
    rank_b = rank // shards if is_row_parallel else rank
    return rank_a * len(own.outputs or (0,)) * inputs + rank_b * outputs


def _has_slots(module: BaseModule, targets: tuple[str, ...]) -> bool:
    if module.kind in EXTRA_TARGETS:
        return module.kind in targets
    # Decodes use kv_b_proj in absorbed form, so it has no slots.
    return not module.name.endswith(".kv_b_proj")

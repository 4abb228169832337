"""Memory of a drafter on each card, computed from its config.json without loading weights."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from config.checkpoint.draft import check_target, draft_facts, draft_folder
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.draft_heads import (
    eagle3_weight_map,
    eagle_weight_map,
    mtp_weight_map,
)
from config.checkpoint.weight_maps.hidden_heads import (
    medusa_weight_map,
    mlp_speculator_weight_map,
    read_head_sizes,
)
from config.engine import EngineConfig
from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig
from config.params.speculation import (
    DRAFT_MODEL,
    EAGLE,
    EAGLE3,
    MEDUSA,
    MLP_SPECULATOR,
    SpeculationMethod,
)
from hpu.model_loader.size_estimate import flag_bytes, kv_block_bytes, weight_bytes


class DrafterSizes(NamedTuple):
    """Bytes of a drafter on each card."""

    weight_bytes: int = 0
    block_bytes: int = 0
    """Bytes per KV block of the target: the drafter's keys and values, and hidden states or
    flags."""


NO_DRAFTER = DrafterSizes()


def drafter_sizes(
    config: EngineConfig,
    target: ModelConfig,
    *,
    num_cards: int,
    width: int,
    kv_width: int,
    block_size: int,
    max_model_len: int,
) -> DrafterSizes:
    """Sizes of the drafter of --speculative-config on each of the `num_cards` cards of the model
    `target`; zero without a drafter. The weights of a head are counted in full, because every card
    has its projections. Raises ConfigError if the drafter does not match the target.

    Args:
        width, kv_width: bytes of a weight, and of a KV cache element.
    """
    method = config.speculation.choose()
    if method is None:
        return NO_DRAFTER
    check_target(method, target)
    if not method.has_drafter:
        return NO_DRAFTER
    folder = draft_folder(config, method) if method.model else config.model
    hidden_bytes = block_size * target.hidden_size * width
    if method.method in (MEDUSA, MLP_SPECULATOR):
        sizes = read_head_sizes(method, folder, target)
        medusa = method.method == MEDUSA
        weight_map = medusa_weight_map(sizes) if medusa else mlp_speculator_weight_map(sizes)
        return DrafterSizes(_num_elements(weight_map) * width, hidden_bytes)
    model_config = draft_facts(config, method, folder, target)
    if method.method == DRAFT_MODEL:
        weights = weight_bytes(model_config, num_cards=num_cards, width=width, length=max_model_len)
        beside = flag_bytes(width=width, block_size=block_size)
    else:
        weights = _num_elements(_head_map(method, model_config, target)) * width
        beside = hidden_bytes * (3 if method.method == EAGLE3 else 1)
        model_config = replace(model_config, num_layers=1)
    kv = kv_block_bytes(model_config, num_cards=num_cards, width=kv_width, block_size=block_size)
    return DrafterSizes(weights, kv + beside)


def _head_map(
    method: SpeculationMethod, model_config: ModelConfig, target: ModelConfig
) -> WeightMap:
    spec = decoder_spec(model_config)
    if method.method == EAGLE:
        return eagle_weight_map(model_config, spec)
    if method.method == EAGLE3:
        vocab_size = model_config.fields.count("draft_vocab_size", model_config.vocab_size)
        hidden = target.hidden_size
        return eagle3_weight_map(model_config, spec, target_hidden=hidden, draft_vocab=vocab_size)
    return mtp_weight_map(model_config, spec)


def _num_elements(weight_map: WeightMap) -> int:
    return sum(spec.num_elements() for spec in _specs(weight_map))


def _specs(weight_map: WeightMap) -> Iterator[WeightSpec]:
    """Weights of a head, which has only the last layer of the map."""
    yield from weight_map.outer
    if weight_map.layers:
        yield from weight_map.layers[-1]

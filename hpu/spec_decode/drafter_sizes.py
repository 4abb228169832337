"""Memory of a drafter on each card, computed from its config.json without loading weights."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from config.checkpoint.draft import check_target, draft_facts, draft_folder
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.engine import EngineConfig
from config.model.model_config import ModelConfig
from config.speculation.drafter import facts_of
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
    `target`; zero without a drafter. The weights of a head are counted in full, which is an upper
    bound for several cards. Raises ConfigError if the drafter does not match the target.

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
    facts, model_config = facts_of(method), draft_facts(config, method, folder, target)
    if facts.is_whole_model:
        weights = weight_bytes(model_config, num_cards=num_cards, width=width, length=max_model_len)
        block_bytes = flag_bytes(width=width, block_size=block_size)
    else:
        weights = width * _num_elements(facts.weights(method, folder, model_config, target))
        block_bytes = block_size * target.hidden_size * width * max(1, facts.num_kept_layers)
        model_config = replace(model_config, num_layers=1)
    if facts.has_kv_cache:
        block_bytes += kv_block_bytes(
            model_config, num_cards=num_cards, width=kv_width, block_size=block_size
        )
    return DrafterSizes(weights, block_bytes)


def _num_elements(weight_map: WeightMap) -> int:
    return sum(spec.num_elements() for spec in _specs(weight_map))


def _specs(weight_map: WeightMap) -> Iterator[WeightSpec]:
    """Weights of a head, which has only the last layer of the map."""
    yield from weight_map.outer
    if weight_map.layers:
        yield from weight_map.layers[-1]

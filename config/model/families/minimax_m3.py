"""MiniMax-M3: block-sparse attention, clamped SwiGLU in all MLPs, routed experts with a shared
expert."""

import operator
from collections.abc import Mapping
from dataclasses import replace

from config.errors import ConfigError
from config.json_text import Json
from config.model.decoder_spec import (
    ClampedSwiGLU,
    DecoderSpec,
    Family,
    IndexerSpec,
    MoESpec,
    uniform_layers,
)
from config.model.families.moe import EXPERT_LAYERS, listed_expert_layers
from config.model.json_fields import Fields, shown
from config.model.model_config import ModelConfig
from config.model.moe import MoEFields

_SPARSE = "sparse_attention_config"
_KIND = "minimax_m3_sparse"
"""Layer type, in layer_types, of a layer with an indexer."""
_PUBLISHED = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""transformers' name of an indexer field -> its name in sparse_attention_config, which has
precedence."""
_INDEX_DEFAULTS = {
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
_ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "qk_norm_type": ("per_head",),
    "use_qk_norm": (True,),
    "use_gemma_norm": (True,),
    "attention_output_gate": (False,),
    "scoring_func": ("sigmoid",),
}
"""The supported values of each field."""
_ONLY_SPARSE_VALUES: Mapping[str, tuple[object, ...]] = {
    "sparse_score_type": ("max",),
    "sparse_init_block": (0,),
}


def _minimax_m3(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    swiglu = ClampedSwiGLU(
        fields.number("swiglu_alpha", 1.702, above=0.0),
        fields.number("swiglu_limit", 7.0, above=0.0),
        interleaved=False,
    )
    is_indexed = _indexed_layers(config)
    return DecoderSpec(
        layers=tuple(
            layer._replace(indexed=indexed)
            for layer, indexed in zip(uniform_layers(config), is_indexed, strict=True)
        ),
        norm_offset=True,
        qk_norm="heads",
        mlp_swiglu=swiglu,
        indexer=_indexer(config) if any(is_indexed) else None,
        moe=MoESpec(
            scoring="sigmoid",
            float32_router=True,
            block="block_sparse_moe",
            correction_bias="e_score_correction_bias",
            projections=("w1", "w3", "w2"),
            shared="shared_experts",
            clamped_swiglu=swiglu,
        ),
        names={
            f"self_attn.indexer.{x}_{kind}": f"self_attn.index_{x}_{kind}"
            for x in "qk"
            for kind in ("proj", "norm")
        },
    )


def _in_memory(config: ModelConfig) -> DecoderSpec:
    """Spec with transformers' in-memory names, which it also saves for a standalone text model."""
    spec = _minimax_m3(config)
    assert spec.moe
    moe = replace(spec.moe, block="mlp", correction_bias="gate.e_score_correction_bias")
    return replace(spec, moe=moe, fused_gate_up=True, names={})


def _sparse_fields(fields: Fields) -> Fields:
    return Fields(fields.get(_SPARSE, dict, {}), fields.file)


def _indexed_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer has an indexer."""
    fields, count = config.fields, config.num_layers
    sparse = _sparse_fields(fields)
    flags = sparse.get("sparse_attention_freq", list, [])
    if not sparse.get("use_sparse_attention", bool, True):
        flags = []
    kinds = fields.get("layer_types", list, [])
    if kinds:
        flags = [kind == _KIND for kind in kinds]
    if flags and len(flags) < count:
        raise ConfigError(
            f"sparse_attention_freq or layer_types in {fields.file} has {len(flags)} entries, it "
            f"must have {count}"
        )
    is_indexed = [bool(flag) for flag in flags[:count]] or [False] * count
    without_values = sparse.get("sparse_disable_index_value", list, [True] * count)
    if any(map(operator.gt, is_indexed, map(bool, without_values))):
        raise ConfigError(
            f"sparse_disable_index_value in {fields.file} is false for a layer with an indexer: "
            "index values are not supported"
        )
    return is_indexed


def _indexer(config: ModelConfig) -> IndexerSpec:
    fields = config.fields
    sparse = _sparse_fields(fields)
    numbers = {
        name: sparse.count(published, fields.count(name, _INDEX_DEFAULTS[name]))
        for name, published in _PUBLISHED.items()
    }
    _check_values(sparse, _ONLY_SPARSE_VALUES)
    spec = IndexerSpec(
        num_heads=numbers["index_n_heads"],
        head_dim=numbers["index_head_dim"],
        block_size=numbers["index_block_size"],
        top_blocks=numbers["index_topk_blocks"],
        local_blocks=numbers["index_local_blocks"],
    )
    if spec.num_heads != config.num_kv_heads:
        raise ConfigError(
            f"{fields.file} has {spec.num_heads} index heads and {config.num_kv_heads} KV heads: "
            "the numbers must be equal"
        )
    rotated = config.rope.rotated_size(config.head_dim)
    if spec.head_dim < rotated:
        raise ConfigError(
            f"{fields.file} has index heads of {spec.head_dim} dimensions, rope needs at least "
            f"{rotated}"
        )
    return spec


def _check_values(fields: Fields, known: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in known.items():
        value = fields.raw.get(name)
        if value not in (None, *values):
            raise ConfigError(f"{name} in {fields.file} is {shown(value)}, it must be {values[0]}")


def _fields(fields: Fields) -> Json:
    _check_values(fields, _ONLY_VALUES)
    # hidden_act is swigluoai in published files; transformers saves silu.
    found: Json = {"hidden_act": "silu", **listed_expert_layers(fields)}
    flags = fields.get("moe_layer_freq", list, [])
    if flags and EXPERT_LAYERS not in found:
        found[EXPERT_LAYERS] = [index for index, flag in enumerate(flags) if flag]
    rope = fields.get("rope_parameters", dict, None) or {}
    if not (fields.raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor")):
        size = fields.count("head_dim")
        found["partial_rotary_factor"] = fields.count("rotary_dim", size // 2) / size
    count = fields.integer("n_shared_experts", 1)
    found["shared_intermediate_size"] = count * fields.integer("shared_intermediate_size", 0)
    return found


_FAMILY = Family(
    _minimax_m3,
    "MiniMax-M3 (text)",
    defaults={
        "rope_theta": 5000000.0,
        "head_dim": 128,
        "routed_scaling_factor": 2.0,
        "shared_intermediate_size": 3072,
        "dense_intermediate_size": 12288,
    },
    moe=MoEFields(
        "num_local_experts",
        dense_size="dense_intermediate_size",
        shared_size="shared_intermediate_size",
        scaling_factor="routed_scaling_factor",
        expert_layers=EXPERT_LAYERS,
    ),
    derive=_fields,
)

FAMILIES: Mapping[str, Family] = {
    "MiniMaxM3SparseForCausalLM": _FAMILY,
    "MiniMaxM3VLForCausalLM": _FAMILY._replace(
        make_spec=_in_memory, models="MiniMax-M3 (text), as transformers saves it"
    ),
}

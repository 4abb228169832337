"""DeepSeek MoE, V2 and V3, and related families: MLA or Llama's attention, and grouped experts."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family, MLASpec, MoESpec, uniform_layers
from config.model.families.dense import llama
from config.model.families.moe import EXPERT_LAYERS, GLM_FIELDS, listed_expert_layers
from config.model.json_fields import Fields, shown
from config.model.model_config import MAX_WIDTH, ModelConfig

Kind = TypeVar("Kind")

_SCORING: Mapping[str, Literal["softmax", "sigmoid"]] = {"softmax": "softmax", "sigmoid": "sigmoid"}
_GROUP_SCORING: Mapping[str, Literal["top2", "max", "none"]] = {
    "greedy": "none",
    "group_limited_greedy": "max",
    "noaux_tc": "top2",
}
"""topk_method -> MoESpec.group_scoring."""


def _deepseek_v2(config: ModelConfig) -> DecoderSpec:
    """DeepSeek V2. DeepSeek-VL2-Tiny and DeepSeek-OCR disable MLA with use_mla."""
    if not config.fields.get("use_mla", bool, True):
        return _deepseek_moe(config)
    mla = _mla(config)
    return DecoderSpec(
        layers=tuple(
            layer._replace(attention="mla", window=None) for layer in uniform_layers(config)
        ),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
        interleaved_rope=config.fields.get("rope_interleave", bool, True),
        attention_scale=_softmax_scale(config, mla.qk_head_dim),
        moe=_moe(config),
        mla=mla,
    )


def _deepseek_moe(config: ModelConfig) -> DecoderSpec:
    return replace(llama(config), moe=_moe(config))


def _deepseek_v3(config: ModelConfig) -> DecoderSpec:
    """DeepSeek V3 and R1, Kimi K2 and Moonlight."""
    return replace(_deepseek_v2(config), mlp_bias=False)


def _mla(config: ModelConfig) -> MLASpec:
    fields = config.fields

    def count(name: str) -> int:
        return fields.count(name, maximum=MAX_WIDTH)

    mla = MLASpec(
        q_lora_rank=fields.count_or_none("q_lora_rank", maximum=MAX_WIDTH),
        kv_lora_rank=count("kv_lora_rank"),
        qk_nope_head_dim=count("qk_nope_head_dim"),
        qk_rope_head_dim=count("qk_rope_head_dim"),
        v_head_dim=count("v_head_dim"),
    )
    rotated = config.rope.rotated_size(config.head_dim)
    if rotated != mla.qk_rope_head_dim:
        raise ConfigError(
            f"{fields.file} applies rope to {rotated} dimensions of a head (head_dim), it must be "
            f"qk_rope_head_dim, {mla.qk_rope_head_dim}"
        )
    return mla


def _softmax_scale(config: ModelConfig, head_dim: int) -> float:
    """Attention scale: 1/sqrt(head_dim); with mscale_all_dim, times the square of
    yarn_get_mscale(factor, mscale_all_dim) of the published code."""
    scaling, scale = config.rope.scaling, 1 / math.sqrt(head_dim)
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return scale
    factor = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
    return scale * factor * factor


def _moe(config: ModelConfig) -> MoESpec:
    fields = config.fields
    return MoESpec(
        scoring=_choice(config, "scoring_func", _SCORING),
        float32_router=True,
        group_scoring=_choice(config, "topk_method", _GROUP_SCORING),
        correction_bias=(
            "gate.e_score_correction_bias"
            if fields.get("topk_method", str, None) == "noaux_tc"
            else ""
        ),
        shared="shared_experts",
    )


def _choice(config: ModelConfig, name: str, kinds: Mapping[str, Kind]) -> Kind:
    value = config.fields.get(name, str, None)
    if value not in kinds:
        raise ConfigError(
            f"{name} in {config.fields.file} is {shown(value)}, it must be one of "
            f"{', '.join(kinds)}"
        )
    return kinds[value]


_MOE = GLM_FIELDS._replace(
    layer_step="moe_layer_freq", first_of_step=True, expert_layers=EXPERT_LAYERS
)
_ROTATED = {"qk_rope_head_dim": ("head_dim",)}
"""head_dim gets the value of qk_rope_head_dim: published files lack head_dim, and transformers
saves qk_rope_head_dim as head_dim."""

_SOFTMAX = {"scoring_func": "softmax", "topk_method": "greedy"}


def _v2_fields(fields: Fields) -> Mapping[str, Any]:
    """Expert layers, and the head_dim of a model without MLA: its published files have
    qk_rope_head_dim 0, which must not become the head_dim."""
    found = dict(listed_expert_layers(fields))
    if not fields.get("use_mla", bool, True) and not fields.raw.get("head_dim"):
        found["head_dim"] = None
    return found


FAMILIES: Mapping[str, Family] = {
    "DeepseekForCausalLM": Family(
        _deepseek_moe,
        "DeepSeek-MoE-16B; the text models of DeepSeek-OCR",
        defaults=_SOFTMAX,
        moe=_MOE,
        derive=listed_expert_layers,
    ),
    "DeepseekV2ForCausalLM": Family(
        _deepseek_v2,
        "DeepSeek-V2, V2-Lite, V2.5, DeepSeek-Coder-V2",
        renamed=_ROTATED,
        defaults=_SOFTMAX,
        moe=_MOE,
        derive=_v2_fields,
    ),
    "DeepseekV3ForCausalLM": Family(
        _deepseek_v3,
        "DeepSeek-V3, V3.1, R1; Kimi K2, Moonlight",
        renamed=_ROTATED,
        defaults={
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
        },
        moe=_MOE,
        derive=listed_expert_layers,
    ),
}

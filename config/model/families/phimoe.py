"""Phi-3.5-MoE: SparseMixer routing, which selects two experts sequentially."""

from collections.abc import Mapping
from typing import Any

from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family, MoESpec, uniform_layers
from config.model.json_fields import Fields, shown
from config.model.model_config import ModelConfig
from config.model.moe import MoEFields

TOP_K = 2
"""Number of experts per token; SparseMixer supports no other number."""


def _phimoe(config: ModelConfig) -> DecoderSpec:
    if config.moe is not None and config.moe.top_k != TOP_K:
        raise ConfigError(
            f"num_experts_per_tok in {config.fields.file} is {config.moe.top_k}, the router of "
            f"this architecture requires {TOP_K}"
        )
    return DecoderSpec(
        layers=uniform_layers(config),
        norm="layer",
        norm_bias=True,
        head_bias=config.fields.get("lm_head_bias", bool, False),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        moe=MoESpec(
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            sparse_mixer=config.fields.number_or_none("router_jitter_noise", minimum=0.0) or 0.0,
        ),
    )


def _rope_factor(fields: Fields) -> Mapping[str, Any]:
    """Attention factor of longrope, which this family stores under its own field names."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.raw.get(name)
        if not isinstance(rope, dict) or "short_mscale" not in rope:
            continue
        short, long = rope["short_mscale"], rope.get("long_mscale")
        if short != long:
            raise ConfigError(
                f"short_mscale in {fields.file} is {shown(short)} and long_mscale {shown(long)}, "
                "they must be equal"
            )
        return {name: {**rope, "attention_factor": short}}
    return {}


_PHIMOE = Family(
    _phimoe,
    "Phi-3.5-MoE",
    defaults={"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "router_jitter_noise": 0.01},
    moe=MoEFields("num_local_experts"),
    derive=_rope_factor,
)

FAMILIES: Mapping[str, Family] = {
    "PhimoeForCausalLM": _PHIMOE._replace(models="Phi-3.5-MoE, as transformers saves it"),
    "PhiMoEForCausalLM": _PHIMOE,
}

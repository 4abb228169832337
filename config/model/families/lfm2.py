"""LFM2: attention layers and gated short convolutions, with MLPs or experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family, MoESpec
from config.model.families.hybrid import (
    NO_PREFIX_CACHING,
    attention_layers,
    kernel_size,
    layers_with_states,
)
from config.model.json_fields import Fields, shown
from config.model.model_config import MAX_LAYERS, ModelConfig
from config.model.moe import MoEFields
from config.model.state_space import ShortConvSpec

_CONV, _FULL = "conv", "full_attention"


def _lfm2(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=layers_with_states(config, "short_conv", attention_layers(config, (_CONV,))),
        qk_norm="heads",
        short_conv=ShortConvSpec(
            conv_size=config.hidden_size,
            conv_kernel=kernel_size(config, "conv_L_cache", 3),
            bias=config.fields.get("conv_bias", bool, False),
        ),
        names={
            "model.norm": "model.embedding_norm",
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.o_proj": "self_attn.out_proj",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
    )


def _lfm2_moe(config: ModelConfig) -> DecoderSpec:
    has_bias = config.fields.get("use_expert_bias", bool, True)
    return replace(
        _lfm2(config),
        moe=MoESpec(
            scoring="sigmoid",
            block="feed_forward",
            correction_bias="expert_bias" if has_bias else "",
            projections=("w1", "w3", "w2"),
        ),
    )


def _common_fields(fields: Fields) -> dict[str, Any]:
    """Fields of dense and MoE models. Published files call tie_word_embeddings tie_embedding, and
    may have full_attn_idxs instead of layer_types."""
    found: dict[str, Any] = {"rms_norm_eps": fields.number("norm_eps", 1e-5, above=0.0)}
    tied = fields.get("tie_embedding", bool, None)
    if tied is not None:
        found["tie_word_embeddings"] = tied
    if fields.raw.get("layer_types") is not None:
        return found
    count = fields.count("num_hidden_layers", maximum=MAX_LAYERS)
    layers = fields.get("full_attn_idxs", list, list(range(count)))
    if any(type(layer) is not int or not 0 <= layer < count for layer in layers):
        raise ConfigError(
            f"full_attn_idxs in {fields.file} is {shown(layers)}, it must list layers from 0 to "
            f"{count - 1}"
        )
    found["layer_types"] = [_FULL if index in layers else _CONV for index in range(count)]
    return found


def _dense_fields(fields: Fields) -> Mapping[str, Any]:
    """Fields of dense models. The intermediate size is 2/3 of block_ff_dim, times
    block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of; if
    block_auto_adjust_ff_dim is false, it is block_ff_dim. transformers saves block_ff_dim as
    intermediate_size."""
    size = fields.count_or_none("block_ff_dim") or fields.count("intermediate_size")
    if fields.get("block_auto_adjust_ff_dim", bool, True):
        factor = fields.number("block_ffn_dim_multiplier", 1.0, above=0.0)
        multiple = fields.count("block_multiple_of", 256)
        size = int(factor * int(2 * size / 3))
        size = multiple * -(-size // multiple)
    return {**_common_fields(fields), "intermediate_size": size}


_DEFAULTS = {"rope_theta": 1000000.0, "tie_word_embeddings": True}

FAMILIES: Mapping[str, Family] = {
    "Lfm2ForCausalLM": Family(
        _lfm2,
        "LFM2 350M, 700M, 1.2B, 2.6B",
        NO_PREFIX_CACHING,
        defaults=_DEFAULTS,
        derive=_dense_fields,
    ),
    "Lfm2MoeForCausalLM": Family(
        _lfm2_moe,
        "LFM2 8B-A1B",
        NO_PREFIX_CACHING,
        defaults={**_DEFAULTS, "num_dense_layers": 2, "norm_topk_prob": True},
        moe=MoEFields(
            "num_experts",
            inner_size="moe_intermediate_size",
            renormalize="norm_topk_prob",
            scaling_factor="routed_scaling_factor",
            first_layer="num_dense_layers",
        ),
        derive=_common_fields,
    ),
}

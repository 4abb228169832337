"""GPT-2 and other families with layer norms and plain MLPs, most of them with biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family, uniform_layers, without_rope
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig

_EPS = {"layer_norm_epsilon": ("rms_norm_eps",), "layer_norm_eps": ("rms_norm_eps",)}
"""Names of the layer-norm epsilon."""


def _inner(fields: Fields) -> Mapping[str, Any]:
    default = 4 * fields.count("hidden_size")
    return {"intermediate_size": fields.count("intermediate_size", default)}


def _kv_heads(fields: Fields, *, single: bool = False) -> Mapping[str, Any]:
    """One KV head (multi-query), or as many as query heads."""
    return {"num_key_value_heads": 1 if single else fields.count("num_attention_heads")}


def _is_multi_query(fields: Fields) -> bool:
    return bool(fields.get("multi_query", bool, True))


def _layer_normed(config: ModelConfig, **features: Any) -> DecoderSpec:
    """Spec with layer norms and a plain MLP."""
    features = {"layers": uniform_layers(config), **features}
    return DecoderSpec(norm="layer", gated_mlp=False, **features)


_GPT2_NAMES = {
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def _gpt2(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    if fields.get("scale_attn_by_inverse_layer_idx", bool, False):
        raise ConfigError(
            f"scale_attn_by_inverse_layer_idx in {fields.file} is true, which is not supported"
        )
    return _layer_normed(
        config,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm_bias=True,
        layers=without_rope(uniform_layers(config), (False,) * config.num_layers),
        learned_positions=True,
        attention_scale=None if fields.get("scale_attn_weights", bool, True) else 1.0,
        qkv_layout="fused",
        transposed=True,
        names=_GPT2_NAMES,
        # Buffers with causal masks.
        unused=(".attn.bias", ".attn.masked_bias"),
    )


def _gpt_bigcode(config: ModelConfig) -> DecoderSpec:
    """GPT-2 with multi-query attention, or with a QKV weight grouped by head."""
    # The grouped layout equals the fused layout if there is a single KV head.
    return replace(_gpt2(config), transposed=False, qkv_layout="grouped")


def _gpt_neox(config: ModelConfig) -> DecoderSpec:
    is_parallel = config.fields.get("use_parallel_residual", bool, True)
    return _layer_normed(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        mlp_bias=True,
        norm_bias=True,
        arrangement="parallel_two_norms" if is_parallel else "before",
        qkv_layout="grouped",
        names={
            "model.layers": "gpt_neox.layers",
            "model.embed_tokens": "gpt_neox.embed_in",
            "model.norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        unused=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    )


def _starcoder2(config: ModelConfig) -> DecoderSpec:
    has_bias = config.fields.get("use_bias", bool, True)
    return _layer_normed(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        norm_bias=True,
        names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    )


def _phi(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    if fields.get("qk_layernorm", bool, False):
        raise ConfigError(f"qk_layernorm in {fields.file} is true, which is not supported")
    return _layer_normed(
        config,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        norm_bias=True,
        arrangement="parallel",
        names={
            "model.norm": "model.final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
    )


def _nemotron(config: ModelConfig) -> DecoderSpec:
    return _layer_normed(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
        norm_bias=True,
        norm_offset=True,
    )


def _falcon(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    has_bias, is_new = fields.get("bias", bool, False), _has_new_layers(fields)
    has_two_norms = is_new and fields.integer("num_ln_in_parallel_attn", 2) == 2
    is_parallel = is_new or fields.get("parallel_attn", bool, True)
    names = {
        "model.layers": "transformer.h",
        "model.embed_tokens": "transformer.word_embeddings",
        "model.norm": "transformer.ln_f",
        "self_attn.qkv_proj": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    if has_two_norms:
        names |= {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    spec = _layer_normed(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        norm_bias=True,
        qkv_layout="grouped",
        names=names,
    )
    if fields.get("alibi", bool, False):
        layers = without_rope(spec.layers, (False,) * config.num_layers)
        # The scale of the attention scores also applies to the biases.
        scale = config.head_dim**-0.5
        spec = replace(spec, layers=layers, alibi_max_bias=8.0, alibi_scale=scale)
    if has_two_norms:
        return replace(spec, arrangement="parallel_two_norms")
    return replace(spec, arrangement="parallel" if is_parallel else "before")


def _has_new_layers(fields: Fields) -> bool:
    return bool(fields.get("new_decoder_architecture", bool, False))


def _falcon_fields(fields: Fields) -> Mapping[str, Any]:
    if _has_new_layers(fields):
        return _inner(fields)
    # The first Falcon architecture ignores the number of KV heads.
    return {**_inner(fields), **_kv_heads(fields, single=_is_multi_query(fields))}


def _refined_web_fields(fields: Fields) -> Mapping[str, Any]:
    """Falcon fields of early (RefinedWeb) checkpoints, in which the presence of n_head_kv means the
    new decoder architecture."""
    num_kv_heads = fields.count_or_none("n_head_kv")
    found: dict[str, Any] = {"new_decoder_architecture": num_kv_heads is not None}
    if num_kv_heads is not None:
        found["num_key_value_heads"] = num_kv_heads
    return {**found, **_falcon_fields(Fields({**fields.raw, **found}, fields.file))}


_PARTIAL = {
    "rotary_pct": ("partial_rotary_factor",),
    "rope_pct": ("partial_rotary_factor",),
    "rope_percent": ("partial_rotary_factor",),
    "rope_percentage": ("partial_rotary_factor",),
    "rotary_emb_base": ("rope_theta",),
}
"""Rotary field names in early checkpoints."""

_FALCON = Family(
    _falcon,
    "Falcon 7B, 11B, 40B, 180B, RW",
    renamed={**_EPS, "activation": ("hidden_act",)},
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    derive=_falcon_fields,
)

FAMILIES: Mapping[str, Family] = {
    "GPTBigCodeForCausalLM": Family(
        _gpt_bigcode,
        "Granite code 20B and 34B, StarCoder, SantaCoder",
        renamed={**_EPS, "activation_function": ("hidden_act",)},
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        derive=lambda fields: {
            **_kv_heads(fields, single=_is_multi_query(fields)),
            **_inner(fields),
        },
    ),
    "GPTNeoXForCausalLM": Family(
        _gpt_neox,
        "GPT-NeoX-20B, Pythia, Dolly 2, RedPajama-INCITE",
        renamed={**_EPS, **_PARTIAL},
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
        },
        derive=_kv_heads,
    ),
    "Starcoder2ForCausalLM": Family(
        _starcoder2,
        "StarCoder2",
        renamed={"norm_epsilon": ("rms_norm_eps",)},
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "PhiForCausalLM": Family(
        _phi,
        "Phi-1, Phi-1.5, Phi-2",
        "`qk_layernorm` is refused",
        renamed=_EPS,
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
        },
    ),
    "NemotronForCausalLM": Family(
        _nemotron,
        "Nemotron-3-8B, Nemotron-4, Minitron",
        renamed={"norm_eps": ("rms_norm_eps",), **_PARTIAL},
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    ),
    "FalconForCausalLM": _FALCON,
    "RWForCausalLM": _FALCON._replace(
        models="Falcon 7B, 40B and RW, as first published", derive=_refined_web_fields
    ),
    "GPT2LMHeadModel": Family(
        _gpt2,
        "GPT-2, DistilGPT2, Cerebras-GPT",
        "`scale_attn_by_inverse_layer_idx` is refused",
        renamed={**_EPS, "activation_function": ("hidden_act",)},
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True},
        derive=lambda fields: {**_kv_heads(fields), **_inner(fields)},
    ),
}

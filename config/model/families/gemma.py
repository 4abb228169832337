"""Gemma: norm weights stored minus 1, and scaled embeddings; from Gemma 2 on also sliding windows
in some layers, and norms before and after attention and MLP (VaultGemma: only before)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family
from config.model.families.dense import llama
from config.model.json_fields import Fields
from config.model.model_config import LAYER_TYPES, ModelConfig


def _gemma(config: ModelConfig) -> DecoderSpec:
    return replace(
        llama(config),
        norm_offset=True,
        embedding_multiplier=config.hidden_size**0.5,
        rounded_embedding_multiplier=True,
    )


def _gemma2(config: ModelConfig) -> DecoderSpec:
    return replace(
        _with_caps(config, attention=50.0, logits=30.0),
        arrangement="around",
    )


def _vaultgemma(config: ModelConfig) -> DecoderSpec:
    """Gemma 2 without the norms after attention and MLP."""
    return replace(
        _with_caps(config, attention=50.0, logits=30.0),
        names={"post_attention_layernorm": "pre_feedforward_layernorm"},
    )


def _gemma3(config: ModelConfig) -> DecoderSpec:
    return replace(_with_caps(config), arrangement="around", qk_norm="heads")


def _with_caps(
    config: ModelConfig, *, attention: float | None = None, logits: float | None = None
) -> DecoderSpec:
    """The spec with the soft caps of config.json. `attention` and `logits`: defaults for absent
    fields."""
    fields = config.fields
    if fields.get("use_bidirectional_attention", bool, False):
        raise ConfigError(
            f"use_bidirectional_attention in {fields.file} is true, which is not supported"
        )
    return replace(
        _gemma(config),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0, above=0.0) ** -0.5,
        attention_soft_cap=_cap(fields, "attn_logit_softcapping", attention),
        logits_soft_cap=_cap(fields, "final_logit_softcapping", logits),
    )


def _cap(fields: Fields, name: str, default: float | None) -> float | None:
    """Soft cap from the field `name`: null means no soft cap, an absent field means `default`."""
    return fields.number_or_none(name, above=0.0) if name in fields.raw else default


def _activation(fields: Fields) -> Mapping[str, Any]:
    # The files also have hidden_act, which is not used.
    return {"hidden_act": fields.get("hidden_activation", str, _DEFAULTS["hidden_act"])}


def _gemma3_fields(fields: Fields) -> Mapping[str, Any]:
    """Fields of Gemma 3. If the rope of a layer type has no theta, it gets rope_theta or
    rope_local_base_freq."""
    found = _activation(fields)
    ropes = fields.get("rope_parameters", dict, {})
    if not any(kind in ropes for kind in LAYER_TYPES):
        return found
    for kind, base in (LAYER_TYPES[0], "rope_theta"), (LAYER_TYPES[1], "rope_local_base_freq"):
        theta = {"rope_theta": fields.raw[base]}
        ropes = {**ropes, kind: {**theta, **(Fields(ropes, fields.file).get(kind, dict, {}))}}
    return {**found, "rope_parameters": ropes}


_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
}
_WINDOWS: Mapping[str, Any] = {"sliding_window": 4096, "sliding_window_pattern": 2}
"""Sliding-window defaults: every second layer uses full attention."""

FAMILIES: Mapping[str, Family] = {
    "GemmaForCausalLM": Family(
        _gemma,
        "Gemma 1, CodeGemma",
        defaults=_DEFAULTS,
        # The published files say gelu but mean the tanh approximation.
        derive=lambda fields: (
            {"hidden_act": "gelu_pytorch_tanh"} if fields.raw.get("hidden_act") == "gelu" else {}
        ),
    ),
    "Gemma2ForCausalLM": Family(
        _gemma2,
        "Gemma 2, ShieldGemma",
        defaults={**_DEFAULTS, **_WINDOWS},
        derive=_activation,
    ),
    "VaultGemmaForCausalLM": Family(
        _vaultgemma,
        "VaultGemma",
        defaults={**_DEFAULTS, **_WINDOWS},
        derive=_activation,
    ),
    "Gemma3ForCausalLM": Family(
        _gemma3,
        "Gemma 3",
        "",
        defaults={
            **_DEFAULTS,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "max_position_embeddings": 131072,
        },
        derive=_gemma3_fields,
    ),
}

"""Llama and families with few differences from Llama."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.model.decoder_spec import DecoderSpec, Family, TemperatureTuning, uniform_layers
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig


def llama(config: ModelConfig) -> DecoderSpec:
    """Llama 2 and 3."""
    return DecoderSpec(
        layers=uniform_layers(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
    )


def _mistral(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(layers=uniform_layers(config))


def _ministral3(config: ModelConfig) -> DecoderSpec:
    """Mistral with position-dependent query scaling."""
    spec, scaling = _mistral(config), config.rope.scaling
    rope = Fields(config.fields.get("rope_parameters", dict, {}), config.fields.file)
    scale = rope.number_or_none("llama_4_scaling_beta")
    if scale is None or scaling is None or scaling.original_max_position is None:
        return spec
    return replace(
        spec,
        layers=tuple(layer._replace(tunes_temperature=True) for layer in spec.layers),
        temperature=TemperatureTuning(scale, float(scaling.original_max_position)),
    )


def _qwen2(config: ModelConfig) -> DecoderSpec:
    """Qwen 2 and 2.5."""
    return DecoderSpec(layers=uniform_layers(config), qkv_bias=True)


def qwen3(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=uniform_layers(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        qk_norm="heads",
    )


def granite(config: ModelConfig) -> DecoderSpec:
    """Granite 3: Llama with four multipliers."""
    return replace(
        llama(config),
        attention_scale=config.attention_multiplier,
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_divisor=config.logits_scaling,
    )


def _phi3(config: ModelConfig) -> DecoderSpec:
    """The Phi-3 and Phi-4 models without experts."""
    return DecoderSpec(layers=uniform_layers(config), qkv_layout="fused", fused_gate_up=True)


QWEN_WINDOWS: Mapping[str, Any] = {"use_sliding_window": False, "max_window_layers": 28}
"""Defaults of the transformers classes for a config.json that has only `sliding_window`."""

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(llama, "Llama 2, 3, 3.1, 3.2, 3.3, and others of this shape"),
    "MistralForCausalLM": Family(_mistral, "Mistral 7B, Nemo, Small"),
    "Ministral3ForCausalLM": Family(_ministral3, "Ministral 3 3B, 8B, 14B"),
    "Qwen2ForCausalLM": Family(_qwen2, "Qwen2, Qwen2.5", defaults=QWEN_WINDOWS),
    "Qwen3ForCausalLM": Family(qwen3, "Qwen3", defaults=QWEN_WINDOWS),
    "GraniteForCausalLM": Family(granite, "Granite 3"),
    "Phi3ForCausalLM": Family(_phi3, "Phi-3, Phi-3.5 mini, Phi-4, Phi-4-mini"),
}

"""Registry of the decoder architectures: an entry per family says how it differs from the others.

The models, the weight map and the size estimate are built from it; it imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from config.errors import ConfigError
from config.model.model_config import ModelConfig


class LayerSpec(NamedTuple):
    """What one layer consists of."""

    window: int | None = None
    """Tokens that a query sees, its own included; None: all."""
    attention: Literal["dense"] = "dense"
    feed_forward: Literal["mlp"] = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Where the decoder families differ."""

    layers: tuple[LayerSpec, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head."""
    fused_weights: bool = False
    """The checkpoint holds qkv_proj and gate_up_proj, not their parts."""
    attention_scale: float | None = None
    """None: 1/sqrt(head_dim)."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


def _layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """All layers are windowed, or those that the checkpoint names, if it has a window at all."""
    if config.sliding_window is None:
        return (LayerSpec(),) * config.num_layers
    full, windowed = LayerSpec(), LayerSpec(window=config.sliding_window)
    if not config.window_layers:
        return (windowed,) * config.num_layers
    return tuple(windowed if is_windowed else full for is_windowed in config.window_layers)


def _llama(config: ModelConfig) -> DecoderSpec:
    """Llama 2 and 3."""
    return DecoderSpec(
        layers=_layers(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
    )


def _mistral(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(layers=_layers(config))


def _qwen2(config: ModelConfig) -> DecoderSpec:
    """Qwen 2 and 2.5."""
    return DecoderSpec(layers=_layers(config), qkv_bias=True)


def _qwen3(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=_layers(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        qk_norm=True,
    )


def _granite(config: ModelConfig) -> DecoderSpec:
    """Granite 3: a Llama with four multipliers."""
    return replace(
        _llama(config),
        attention_scale=config.attention_multiplier,
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_divisor=config.logits_scaling,
    )


def _phi3(config: ModelConfig) -> DecoderSpec:
    """Phi 3 and 4-mini."""
    return DecoderSpec(layers=_layers(config), fused_weights=True)


ARCHITECTURES: Mapping[str, Callable[[ModelConfig], DecoderSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GraniteForCausalLM": _granite,
    "Phi3ForCausalLM": _phi3,
}

HEADLESS_ENDINGS = ("Model", "ForSequenceClassification")
"""Of the same families without an output head."""


def decoder_spec(config: ModelConfig, *, has_head: bool = True) -> DecoderSpec:
    """The spec of the decoder; without `has_head` the family's other endings are accepted too.
    ConfigError for an architecture that is not supported."""
    name = config.architecture
    if not has_head:
        name = causal_name(name)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{config.path} is a {config.architecture}, supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name](config)


def causal_name(architecture: str) -> str:
    """The name that the family has with an output head."""
    for ending in HEADLESS_ENDINGS:
        if architecture.endswith(ending):
            return f"{architecture.removesuffix(ending)}ForCausalLM"
    return architecture

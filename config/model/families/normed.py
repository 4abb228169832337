"""Families with Llama's gated MLP and other norms, norm positions (on the outputs of attention and
MLP, on both sides, or parallel) or another rope."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.errors import ConfigError
from config.model.decoder_spec import (
    DecoderSpec,
    Family,
    LayerSpec,
    uniform_layers,
    without_rope,
)
from config.model.families.dense import llama
from config.model.json_fields import Fields
from config.model.model_config import MAX_LAYERS, ModelConfig


def _olmo2(config: ModelConfig) -> DecoderSpec:
    return replace(llama(config), arrangement="after", qk_norm="all")


def _cohere(config: ModelConfig) -> DecoderSpec:
    """Command R, Command R+ and Aya."""
    return replace(
        llama(config),
        norm="layer",
        arrangement="parallel",
        qk_norm="each_head" if config.use_qk_norm else "none",
        interleaved_rope=True,
        logits_divisor=1 / config.fields.number("logit_scale", 0.0625, above=0.0),
    )


def _glm(config: ModelConfig) -> DecoderSpec:
    """GLM-4-9B (2024) and GLM-Edge."""
    return replace(llama(config), o_bias=False, interleaved_rope=True, fused_gate_up=True)


def _glm4(config: ModelConfig) -> DecoderSpec:
    """GLM-4 of 2025: norms before and after attention and MLP."""
    names = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    return replace(_glm(config), arrangement="around", names=names)


def _ernie(config: ModelConfig) -> DecoderSpec:
    """ERNIE 4.5 without experts."""
    return replace(llama(config), interleaved_rope=True)


def _stablelm(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    has_head_norms = fields.get("qk_layernorm", bool, False)
    is_parallel = fields.get("use_parallel_residual", bool, False)
    return DecoderSpec(
        layers=uniform_layers(config),
        qkv_bias=config.attention_bias,
        norm="layer",
        norm_bias=True,
        arrangement="parallel" if is_parallel else "before",
        qk_norm="each_head" if has_head_norms else "none",
        single_head_norms=True,
        names={
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
        },
    )


def _cohere2(config: ModelConfig) -> DecoderSpec:
    """Command R7B and Command A: only sliding-window layers use rope."""
    return replace(_cohere(config), qk_norm="none", layers=_rotated_with_windows(config))


def _exaone4(config: ModelConfig) -> DecoderSpec:
    """EXAONE 4. If some layers use a sliding window, only these layers use rope."""
    layers = uniform_layers(config)
    if config.sliding_window is not None:
        layers = _rotated_with_windows(config)
    return DecoderSpec(layers=layers, arrangement="after", qk_norm="heads")


def _rotated_with_windows(config: ModelConfig) -> tuple[LayerSpec, ...]:
    layers = uniform_layers(config)
    return without_rope(layers, (layer.window is not None for layer in layers))


def _windows(fields: Fields) -> Mapping[str, Any]:
    """Layer types from sliding_window_pattern: a number n (default 4) means that every n-th layer
    uses full attention. EXAONE 4 has a string of letters (L: window), and full attention in its
    last layer."""
    window = fields.raw.get("sliding_window")
    if window is None or fields.raw.get("layer_types"):
        return {}
    count = fields.count("num_hidden_layers", maximum=MAX_LAYERS)
    pattern = fields.raw.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        windowed = [pattern[i % len(pattern)] == "L" and i < count - 1 for i in range(count)]
    else:
        step = fields.count("sliding_window_pattern", 4)
        windowed = [(i + 1) % step != 0 for i in range(count)]
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[is_windowed] for is_windowed in windowed]}


def _smollm3(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    step = fields.count("no_rope_layer_interval", 4)
    # 1 in the list means that the layer uses rope.
    flags = fields.get("no_rope_layers", list, [])
    flags = flags or [(i + 1) % step != 0 for i in range(config.num_layers)]
    if len(flags) < config.num_layers:
        raise ConfigError(
            f"no_rope_layers in {fields.file} has {len(flags)} entries, it must have "
            f"{config.num_layers}"
        )
    layers = without_rope(uniform_layers(config), map(bool, flags[: config.num_layers]))
    return replace(llama(config), layers=layers)


_GLM_DEFAULTS = {
    "rms_norm_eps": 1.5625e-07,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}

_ERNIE = Family(
    _ernie,
    "ERNIE-4.5-0.3B",
    renamed={"use_bias": ("attention_bias", "attention_out_bias", "mlp_bias")},
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "head_dim": 128,
    },
)
_STABLELM = Family(
    _stablelm,
    "StableLM 2 1.6B and 12B, StableLM 3B, Stable Code",
    renamed={
        "use_qkv_bias": ("attention_bias",),
        "layer_norm_eps": ("rms_norm_eps",),
        "norm_eps": ("rms_norm_eps",),
        "rope_pct": ("partial_rotary_factor",),
    },
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
)

FAMILIES: Mapping[str, Family] = {
    "Olmo2ForCausalLM": Family(_olmo2, "OLMo 2", defaults={"rms_norm_eps": 1e-5}),
    "CohereForCausalLM": Family(
        _cohere,
        "Command R, Command R+, Aya 23, Aya Expanse",
        renamed={"layer_norm_eps": ("rms_norm_eps",)},
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
    "Cohere2ForCausalLM": Family(
        _cohere2,
        "Command R7B, Command A, Aya",
        renamed={"layer_norm_eps": ("rms_norm_eps",)},
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 4096},
        derive=_windows,
    ),
    "SmolLM3ForCausalLM": Family(
        _smollm3,
        "SmolLM3",
        defaults={
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "rope_theta": 2000000.0,
        },
    ),
    "Exaone4ForCausalLM": Family(
        _exaone4, "EXAONE 4.0", defaults={"rms_norm_eps": 1e-5}, derive=_windows
    ),
    "GlmForCausalLM": Family(_glm, "GLM-4-9B (2024), GLM-Edge", defaults=_GLM_DEFAULTS),
    "Glm4ForCausalLM": Family(
        _glm4,
        "GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
        defaults={**_GLM_DEFAULTS, "rms_norm_eps": 1e-5},
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_ForCausalLM": _ERNIE._replace(models="ERNIE-4.5-0.3B, as first published"),
    "StableLmForCausalLM": _STABLELM,
    "StableLMEpochForCausalLM": _STABLELM._replace(models="StableLM, as first published"),
}

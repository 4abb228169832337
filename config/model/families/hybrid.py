"""Hybrid families with attention layers and state-space layers: Mamba 2 or gated DeltaNet."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family, LayerSpec, MoESpec, without_rope
from config.model.families.dense import granite
from config.model.families.moe import GRANITE_MOE, QWEN_FIELDS
from config.model.json_fields import shown
from config.model.model_config import ModelConfig
from config.model.moe import MoEFields
from config.model.state_space import GatedDeltaSpec, Mamba2Spec, StateKind

_STATE_KINDS = ("linear_attention", "mamba")
_ATTENTION_KINDS = ("full_attention", "attention")
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""time_step_limit of published models, as written by transformers 4 and 5."""
MAX_KERNEL = 16
"""Maximum kernel size of a convolution; published models have 3 or 4."""


def _granite_hybrid(config: ModelConfig) -> DecoderSpec:
    """Granite 4: Mamba 2 and attention layers, each with routed experts and a shared MLP, or only
    the shared MLP."""
    fields = config.fields
    kind = fields.get("position_embedding_type", str, "nope")
    if kind not in ("rope", "nope"):
        raise ConfigError(
            f"position_embedding_type in {fields.file} is {shown(kind)}, it must be rope or nope"
        )
    layers = layers_with_states(config, "mamba2", attention_layers(config))
    return replace(
        granite(config),
        layers=without_rope(layers, [kind == "rope"] * len(layers)),
        mlp_bias=False,
        moe=None if config.moe is None else GRANITE_MOE,
        mamba2=_mamba2(config),
        mlp_size=fields.count("shared_intermediate_size", 1024),
        merged_mlp=True,
    )


def _mamba2(config: ModelConfig) -> Mamba2Spec:
    fields = config.fields
    num_heads = fields.count("mamba_n_heads", 128)
    inner = fields.count("mamba_expand", 2) * config.hidden_size
    head_dim = inner // num_heads
    if fields.raw.get("mamba_d_head", "auto") != "auto":
        head_dim = fields.count("mamba_d_head")
    if num_heads * head_dim != inner:
        raise ConfigError(
            f"mamba_n_heads in {fields.file} is {num_heads} and mamba_d_head is {head_dim}, their "
            f"product must be mamba_expand * hidden_size, {inner}"
        )
    num_groups = fields.count("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise ConfigError(
            f"mamba_n_groups in {fields.file} is {num_groups}, it must divide mamba_n_heads, "
            f"{num_heads}"
        )
    limit = fields.get("time_step_limit", list, None)
    if limit is not None and limit not in _NO_LIMITS:
        raise ConfigError(
            f"time_step_limit in {fields.file} is {shown(limit)}, which is not supported"
        )
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=fields.count("mamba_d_state", 256),
        conv_kernel=kernel_size(config, "mamba_d_conv"),
        conv_bias=fields.get("mamba_conv_bias", bool, True),
        proj_bias=fields.get("mamba_proj_bias", bool, False),
    )


def _qwen3_next(config: ModelConfig) -> DecoderSpec:
    return _qwen_hybrid(config, fused_weights=True)


def _qwen3_5(config: ModelConfig) -> DecoderSpec:
    """The text model of Qwen3.5 and 3.6."""
    return _qwen_hybrid(config, fused_weights=False)


def _qwen_hybrid(config: ModelConfig, *, fused_weights: bool) -> DecoderSpec:
    """Gated DeltaNet layers, and attention layers with an output gate."""
    fields = config.fields
    num_key_heads = fields.count("linear_num_key_heads", 16)
    num_value_heads = fields.count("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        raise ConfigError(
            f"linear_num_key_heads in {fields.file} is {num_key_heads}, it must divide "
            f"linear_num_value_heads, {num_value_heads}"
        )
    kinds = attention_layers(config)
    if not fields.raw.get("layer_types"):
        step = fields.count("full_attention_interval", 4)
        kinds = tuple((index + 1) % step == 0 for index in range(config.num_layers))
    moe = MoESpec(shared="shared_expert", shared_gate="shared_expert_gate")
    return DecoderSpec(
        layers=layers_with_states(config, "gated_delta", kinds),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        qk_norm="heads",
        moe=None if config.moe is None else moe,
        gated_delta=GatedDeltaSpec(
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=fields.count("linear_key_head_dim", 128),
            value_dim=fields.count("linear_value_head_dim", 128),
            conv_kernel=kernel_size(config, "linear_conv_kernel_dim"),
            fused_weights=fused_weights,
        ),
        attention_gate=True,
        norm_offset=True,
    )


def kernel_size(config: ModelConfig, name: str, default: int = 4) -> int:
    kernel = config.fields.count(name, default, maximum=MAX_KERNEL)
    if kernel < 2:
        raise ConfigError(f"{name} in {config.fields.file} is {kernel}, it must be at least 2")
    return kernel


def attention_layers(
    config: ModelConfig, state_kinds: tuple[str, ...] = _STATE_KINDS
) -> tuple[bool, ...]:
    """For each layer, True for attention and False for a layer of `state_kinds`, from layer_types;
    empty if layer_types is absent. Raises ConfigError."""
    fields = config.fields
    kinds: list[Any] = fields.get("layer_types", list, [])
    # check_shapes first maps the model without layers (num_layers 0): skip the length check then.
    if config.num_layers and len(kinds) not in (0, config.num_layers):
        raise ConfigError(
            f"layer_types in {fields.file} has {len(kinds)} entries, it must have "
            f"{config.num_layers}"
        )
    known = (*state_kinds, *_ATTENTION_KINDS)
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise ConfigError(
            f"layer_types in {fields.file} has unknown kinds {shown(unknown[:1])}, it may have "
            f"{', '.join(known)}"
        )
    return tuple(kind in _ATTENTION_KINDS for kind in kinds[: config.num_layers])


def layers_with_states(
    config: ModelConfig, state: StateKind, is_attention: tuple[bool, ...]
) -> tuple[LayerSpec, ...]:
    if config.num_layers and not any(is_attention):
        raise ConfigError(
            f"{config.path} has no attention layer, and models with only recurrent layers are not "
            "supported"
        )
    return tuple(
        LayerSpec(
            attention="dense" if attends else state,
            feed_forward="moe" if config.moe and config.moe.has_experts(index) else "mlp",
        )
        for index, attends in enumerate(is_attention)
    )


NO_PREFIX_CACHING = "no prefix caching"
_QWEN_DEFAULTS = {"partial_rotary_factor": 0.25, "head_dim": 256}

FAMILIES: Mapping[str, Family] = {
    "GraniteMoeHybridForCausalLM": Family(
        _granite_hybrid,
        "Granite 4 Micro, H-Micro, H-Tiny, H-Small",
        NO_PREFIX_CACHING,
        moe=MoEFields(
            "num_local_experts", shared_size="shared_intermediate_size", may_be_none=True
        ),
    ),
    "Qwen3NextForCausalLM": Family(
        _qwen3_next,
        "Qwen3-Next-80B-A3B",
        NO_PREFIX_CACHING,
        renamed={"num_local_experts": ("num_experts",)},
        defaults={**_QWEN_DEFAULTS, "norm_topk_prob": True},
        moe=QWEN_FIELDS._replace(shared_size="shared_expert_intermediate_size", may_be_none=True),
    ),
    "Qwen3_5ForCausalLM": Family(
        _qwen3_5,
        "Qwen3.5 and 3.6, 0.8B to 27B (text)",
        NO_PREFIX_CACHING,
        defaults=_QWEN_DEFAULTS,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        _qwen3_5,
        "Qwen3.5 and 3.6, 35B-A3B to 397B-A17B (text)",
        NO_PREFIX_CACHING,
        renamed={
            "num_local_experts": ("num_experts",),
            "moe_intermediate_size": ("intermediate_size",),
        },
        defaults=_QWEN_DEFAULTS,
        moe=MoEFields(
            "num_experts",
            inner_size="moe_intermediate_size",
            shared_size="shared_expert_intermediate_size",
        ),
    ),
}

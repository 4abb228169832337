"""Registry of the decoder architectures: an entry per family says how it differs from the others.

The models, the weight map and the size estimate are built from it; it imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from config.engine import AUTO, NATIVE
from config.errors import ConfigError
from config.model.family_fields import causal_name
from config.model.model_config import ModelConfig


class LayerSpec(NamedTuple):
    """What one layer consists of."""

    window: int | None = None
    """Tokens that a query sees, its own included; None: all."""
    attention: Literal["dense"] = "dense"
    feed_forward: Literal["mlp", "moe"] = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Where the families with experts differ: the router, and names in the checkpoint."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    float32_router: bool = False
    """The router multiplies in float32, not in the model's dtype."""
    block: str = "mlp"
    """Before the following names."""
    gate: str = "gate"
    correction_bias: str = ""
    """Added to the scores for the choice of experts; empty: there is none."""
    correction_rows: tuple[int, ...] = ()
    """Dimensions of the correction bias in front of that of the experts."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of an expert."""
    shared: str = ""
    """The expert for all tokens."""
    shared_gate: str = ""
    """What weighs it; empty: it counts fully."""
    merged: bool = False
    """The checkpoint holds input_linear, gate before up, and output_linear, each for all experts;
    those of the expert for all tokens, called shared_mlp, are outside `block`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Where the decoder families differ."""

    layers: tuple[LayerSpec, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "heads", "all"] = "none"
    """RMS norm of queries and keys before rotation: of each head, or of all heads at once."""
    fused_weights: bool = False
    """The checkpoint holds qkv_proj and gate_up_proj, not their parts."""
    interleaved_rope: bool = False
    """Neighbours in a head are rotated together, not entries of its two halves."""
    attention_scale: float | None = None
    """None: 1/sqrt(head_dim)."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    moe: MoESpec | None = None
    """Of the layers with experts."""


def _layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """All layers are windowed, or those that the checkpoint names, if it has a window at all."""
    window, moe = config.sliding_window, config.moe
    windowed = config.window_layers or (window is not None,) * config.num_layers
    return tuple(
        LayerSpec(
            window=window if is_windowed else None,
            feed_forward="moe" if moe is not None and moe.has_experts(index) else "mlp",
        )
        for index, is_windowed in enumerate(windowed)
    )


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
        qk_norm="heads",
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


def _mixtral(config: ModelConfig) -> DecoderSpec:
    moe = MoESpec(block="block_sparse_moe", projections=("w1", "w3", "w2"))
    return DecoderSpec(layers=_layers(config), moe=moe)


def _qwen2_moe(config: ModelConfig) -> DecoderSpec:
    """Qwen 1.5 and 2 with experts."""
    moe = MoESpec(shared="shared_expert", shared_gate="shared_expert_gate")
    return DecoderSpec(layers=_layers(config), qkv_bias=config.attention_bias, moe=moe)


def _qwen3_moe(config: ModelConfig) -> DecoderSpec:
    return replace(_qwen3(config), moe=MoESpec())


def _olmoe(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=_layers(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        qk_norm="all",
        moe=MoESpec(),
    )


def _granite_moe(config: ModelConfig) -> DecoderSpec:
    moe = MoESpec(block="block_sparse_moe", gate="router.layer", merged=True)
    return replace(_granite(config), mlp_bias=False, moe=moe)


def _glm4_moe(config: ModelConfig) -> DecoderSpec:
    """GLM 4.5 to 4.7."""
    return DecoderSpec(
        layers=_layers(config),
        qkv_bias=config.attention_bias,
        qk_norm="heads" if config.use_qk_norm else "none",
        moe=MoESpec(
            scoring="sigmoid",
            float32_router=True,
            correction_bias="gate.e_score_correction_bias",
            shared="shared_experts",
        ),
    )


def _ernie_moe(config: ModelConfig) -> DecoderSpec:
    """ERNIE 4.5 with experts, text only."""
    return DecoderSpec(
        layers=_layers(config),
        interleaved_rope=True,
        moe=MoESpec(
            float32_router=True,
            correction_bias="moe_statics.e_score_correction_bias",
            correction_rows=(1,),
            shared="shared_experts",
        ),
    )


def _minimax_m2(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=_layers(config),
        qk_norm="all",
        moe=MoESpec(
            scoring="sigmoid",
            float32_router=True,
            block="block_sparse_moe",
            correction_bias="e_score_correction_bias",
            projections=("w1", "w3", "w2"),
        ),
    )


class Family(NamedTuple):
    """An entry of the registry."""

    make_spec: Callable[[ModelConfig], DecoderSpec]
    models: str
    """Published models, for the documentation."""
    limits: str = ""
    """What of them is not supported, likewise."""


_MTP = "layers for multi-token prediction are not loaded"

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(_llama, "Llama 2, 3, 3.1, 3.2, 3.3, and others of this shape"),
    "MistralForCausalLM": Family(_mistral, "Mistral 7B, Nemo, Small"),
    "Qwen2ForCausalLM": Family(_qwen2, "Qwen2, Qwen2.5"),
    "Qwen3ForCausalLM": Family(_qwen3, "Qwen3"),
    "GraniteForCausalLM": Family(_granite, "Granite 3"),
    "Phi3ForCausalLM": Family(_phi3, "Phi-3, Phi-3.5 mini, Phi-4, Phi-4-mini"),
    "MixtralForCausalLM": Family(_mixtral, "Mixtral 8x7B, 8x22B"),
    "Qwen2MoeForCausalLM": Family(_qwen2_moe, "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
    "Qwen3MoeForCausalLM": Family(_qwen3_moe, "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder"),
    "OlmoeForCausalLM": Family(_olmoe, "OLMoE-1B-7B", "`clip_qkv` is refused"),
    "GraniteMoeForCausalLM": Family(_granite_moe, "Granite 3 1B-A400M, 3B-A800M, PowerMoE"),
    "GraniteMoeSharedForCausalLM": Family(_granite_moe, "Granite with a shared expert"),
    "Glm4MoeForCausalLM": Family(_glm4_moe, "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7", _MTP),
    "Ernie4_5_MoeForCausalLM": Family(
        _ernie_moe, "ERNIE-4.5-21B-A3B, 300B-A47B", f"{_MTP}; `use_bias` is refused"
    ),
    "MiniMaxM2ForCausalLM": Family(
        _minimax_m2, "MiniMax-M2", "weights must be in bfloat16; the published ones are FP8"
    ),
}


def is_native(config: ModelConfig, model_impl: str = AUTO) -> bool:
    """Whether the generating model of `config` is built in, or to be refused by `decoder_spec`;
    otherwise transformers' code is run."""
    return model_impl == NATIVE or (model_impl == AUTO and config.architecture in ARCHITECTURES)


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
    return ARCHITECTURES[name].make_spec(config)

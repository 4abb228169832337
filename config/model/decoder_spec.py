"""DecoderSpec: where the decoder families differ; and Family, an entry of their registry.

The models, the weight map and the size estimate are built from a spec; nothing here imports torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from config.model.model_config import ModelConfig
from config.model.moe import MoEFields


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


def uniform_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
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


class Family(NamedTuple):
    """An entry of the registry."""

    make_spec: Callable[[ModelConfig], DecoderSpec]
    models: str
    """Published models, for the documentation."""
    limits: str = ""
    """What of them is not supported, likewise."""
    renamed: Mapping[str, tuple[str, ...]] = {}
    """A field of config.json, and the names under which it is read."""
    defaults: Mapping[str, Any] = {}
    """Values of absent fields, where they differ from those of most families."""
    moe: MoEFields | None = None
    """Names of the fields of its experts."""

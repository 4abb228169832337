"""DecoderSpec: where the decoder families differ; and Family, an entry of their registry.

The models, the weight map and the size estimate are built from a spec; nothing here imports torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from config.model.json_fields import Fields
from config.model.model_config import ModelConfig
from config.model.moe import MoEFields
from config.model.state_space import (
    GatedDeltaSpec,
    Mamba2Spec,
    ShortConvSpec,
    StateKind,
    StateSpec,
)

MXFP4_BLOCK = 32
"""Number of adjacent weights that share a scale (OCP Microscaling Formats, version 1.0)."""
Arrangement = Literal["before", "after", "around", "parallel", "parallel_two_norms"]
"""Position of a layer's norms: before attention and MLP, on their outputs, or both. Parallel:
attention and MLP read the same layer input, through a shared norm or through a norm each, and both
outputs are added to it."""

NORMS: Mapping[Arrangement, tuple[str, ...]] = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm",),
    "parallel_two_norms": ("input_layernorm", "post_attention_layernorm"),
}
"""The norms of a layer, as vLLM calls them: `post_attention_layernorm` is in front of the MLP where
norms are before, and behind the attention where they are after."""


class LayerSpec(NamedTuple):
    """What a layer consists of."""

    window: int | None = None
    """Tokens that a query sees, its own included; None: all."""
    chunk: int | None = None
    """Chunk size in tokens: a query sees only keys of its own chunk. Never set together with
    `window`."""
    rope: Literal["default", "local", "none"] = "default"
    """Queries and keys are rotated by ModelConfig.rope, by its local_rope, or not at all."""
    qk_norm: bool = True
    """Whether the layer has the norm that DecoderSpec.qk_norm names."""
    tunes_temperature: bool = False
    """Whether DecoderSpec.temperature applies."""
    sinks: bool = False
    """A learned logit of each head joins the softmax, and has no value: the tensor
    self_attn.sinks."""
    attention: Literal["dense", "mla", "cross"] | StateKind = "dense"
    """Or what takes its place. Cross: queries see the keys of images alone. Attention and MLP each
    add tanh(gate) times their output, and nothing in a text without images."""
    feed_forward: Literal["mlp", "moe"] = "mlp"


class ClampedSwiGLU(NamedTuple):
    """(min(max(up, -limit), limit) + 1) * gate * sigmoid(alpha * gate), with gate at most `limit`.
    Gate and up are interleaved in the rows of their weight."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Where the families with experts differ: the router, and names in the checkpoint."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    float32_router: bool = False
    """The router multiplies in float32, not in the model's dtype."""
    router_bias: bool = False
    sparse_mixer: float | None = None
    """Jitter of SparseMixer, which chooses two experts in succession; None: other routing.
    `scoring` and renormalization have no effect with SparseMixer."""
    scales_input: bool = False
    """The weight of an expert multiplies its input, not its output."""
    expert_bias: bool = False
    """Both products of an expert add a bias."""
    clamped_swiglu: ClampedSwiGLU | None = None
    """The activation of the experts, in place of the model's own."""
    block: str = "mlp"
    """Before the following names."""
    gate: str = "gate"
    group_scoring: Literal["top2", "max", "none"] = "top2"
    """What a group of experts is chosen by: the sum of its two best scores, or its best score;
    none: groups do not count."""
    correction_bias: str = ""
    """Added to the scores for the choice of experts; empty: there is none."""
    correction_rows: tuple[int, ...] = ()
    """Dimensions of the correction bias before the dimension of the experts. The first row counts;
    further rows belong to experts for images."""
    transposed_router: bool = False
    """The checkpoint holds the matrix of the router as (in, out)."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of an expert."""
    shared: str = ""
    """The expert for all tokens."""
    shared_gate: str = ""
    """What weighs it; empty: it counts fully."""
    layout: Literal["separate", "merged", "transposed", "mxfp4"] = "separate"
    """Layout of the routed experts' tensors. Separate: three tensors for each expert.

    Merged: input_linear, gate before up, and output_linear, each for all experts. The shared
    expert's tensors, called shared_mlp, are outside `block`.

    Transposed: gate_up_proj and down_proj, each for all experts, (experts, in, out).

    MXFP4: blocks and scales of gate_up_proj and of down_proj, (experts, out, in / 32, ...).
    """
    stacked: tuple[str, str] = ("gate_up_proj", "down_proj")
    """Names of the tensors for all experts in layouts other than merged."""


class TemperatureTuning(NamedTuple):
    """Queries times 1 + scale * log(1 + floor((position + offset) / floor))."""

    scale: float
    floor: float
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). Of each token one
    latent and one rotated key are cached; the keys and values of all heads are products of the
    latent."""

    q_lora_rank: int | None
    """Size of the latent that queries are products of; None: of the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Entries of a query or key head that are not rotated; the rotated ones are behind them."""
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    """Epsilon of the norms of latents. The published code uses this number, not rms_norm_eps."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def padded_head_dim(self) -> int:
        """Head size to which a prefill pads queries, keys and values: fused kernels need equal
        sizes."""
        return max(self.qk_head_dim, self.v_head_dim)

    @property
    def latent_size(self) -> int:
        """Numbers that a layer caches for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def absorbed_size(self) -> int:
        """Elements per head of the two matrices by which a decode multiplies queries and outputs
        (absorbed kv_b_proj)."""
        return self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Where the decoder families differ."""

    layers: tuple[LayerSpec, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp: str = "mlp"
    """What the checkpoint calls the MLP of a layer without experts."""
    qk_norm_after_rope: bool = False
    """Apply the query and key norm after the rotation instead of before it."""
    head_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    """RMS norm or layer norm."""
    norm_bias: bool = False
    norm_offset: bool = False
    """The checkpoint holds the weights of norms less 1; the norm is computed in float32."""
    arrangement: Arrangement = "before"
    gated_mlp: bool = True
    """down(act(gate) * up), not down(act(up))."""
    qk_norm: Literal["none", "heads", "all", "each_head", "unweighted"] = "none"
    """Kind of the norm of queries and keys, which is an RMS norm or a layer norm as `norm` says.
    heads: per head, with a weight that all heads share. all: over all heads together. each_head:
    per head, with a weight per head. unweighted: per head, without a weight."""
    learned_positions: bool = False
    """A row for each position is added to the embedding."""
    interleaved_rope: bool = False
    """Neighbours in a head are rotated together, not entries of its two halves."""
    attention_scale: float | None = None
    """None: 1/sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap)."""
    alibi_max_bias: float | None = None
    """ALiBi, with slopes from this and the number of heads (`alibi_slopes`): 8 in most families."""
    alibi_scale: float = 1.0
    """The slopes are multiplied by it."""
    temperature: TemperatureTuning | None = None
    """Temperature that scales queries by position, in layers with `tunes_temperature`."""
    num_further_embeddings: int = 0
    """Embedding rows after the vocabulary, for tokens that are never sampled."""
    embedding_multiplier: float = 1.0
    rounded_embedding_multiplier: bool = False
    """It is rounded to the model's dtype before the product."""
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """c * tanh(logits / c), after the division."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the checkpoint calls a module, by its path in the model; within a layer, relative to
    it. Paths that are absent are the same."""
    unused: tuple[str, ...] = ()
    """Ends of the names of tensors that a checkpoint may hold and nobody needs."""
    qkv_layout: Literal["separate", "fused", "grouped"] = "separate"
    """Checkpoint layout of queries, keys and values: three tensors (separate); a tensor with
    queries, then keys, then values (fused); a tensor with queries, key and value of each KV head
    together (grouped)."""
    fused_gate_up: bool = False
    """The checkpoint holds gate_up_proj, not its parts."""
    transposed: bool = False
    """The checkpoint holds the matrices of the layers as (in, out)."""
    single_head_norms: bool = False
    """The checkpoint holds the norm of each head as a tensor of its own."""
    normalized_head: bool = False
    """The rows of the head are scaled to a length of 1."""
    moe: MoESpec | None = None
    """Spec of the layers with experts."""
    mla: MLASpec | None = None
    """Spec of latent attention, which all layers have or none has."""

    mamba2: Mamba2Spec | None = None
    """Spec of the Mamba 2 layers."""
    gated_delta: GatedDeltaSpec | None = None
    """Spec of the gated DeltaNet layers."""
    short_conv: ShortConvSpec | None = None
    """Spec of the layers with a gated short convolution."""
    attention_gate: bool = False
    """q_proj gives each query head a gate behind it, whose sigmoid weighs the head's output."""
    mlp_size: int | None = None
    """Inner features of the MLPs without experts; None: intermediate_size."""
    merged_mlp: bool = False
    """Such an MLP is called shared_mlp, and has input_linear, gate before up, and
    output_linear."""

    @property
    def has_score_options(self) -> bool:
        """Whether scores are more than scaled and masked."""
        return self.attention_soft_cap is not None or any(layer.sinks for layer in self.layers)

    def state_of(self, layer: LayerSpec) -> StateSpec | None:
        """What the layer keeps of each request; None: keys and values."""
        specs: dict[str, StateSpec | None] = {
            "mamba2": self.mamba2,
            "gated_delta": self.gated_delta,
            "short_conv": self.short_conv,
        }
        return specs.get(layer.attention)

    @property
    def num_cross_layers(self) -> int:
        return sum(layer.attention == "cross" for layer in self.layers)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """State specs of the layers that have a recurrent state."""
        states = (self.state_of(layer) for layer in self.layers)
        return tuple(state for state in states if state is not None)


def uniform_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Layer specs from `layer_types` and `rope_layers` of the checkpoint. Without layer_types, all
    layers are windowed if the checkpoint has a window, and all use full attention otherwise."""
    moe = config.moe
    all_alike = "full_attention" if config.sliding_window is None else "sliding_attention"
    types = config.layer_types or (all_alike,) * config.num_layers
    rotates = config.rope_layers or (True,) * config.num_layers
    local: Literal["default", "local"] = "default" if config.local_rope is None else "local"
    return tuple(
        LayerSpec(
            window=config.sliding_window if kind == "sliding_attention" else None,
            chunk=config.attention_chunk_size if kind == "chunked_attention" else None,
            rope="none" if not is_rotated else "default" if kind == "full_attention" else local,
            feed_forward="moe" if moe is not None and moe.has_experts(index) else "mlp",
        )
        for index, (kind, is_rotated) in enumerate(zip(types, rotates, strict=True))
    )


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """ALiBi slope of each head, as in MPT, Baichuan, BLOOM and Falcon. For n heads, n a power of 2:
    2^(-max_bias * i / n), i from 1 to n. For other n: the slopes for the next lower power of 2,
    then every second slope for the next higher power of 2."""
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-max_bias * index / below) for index in range(1, below + 1)]
    odd = range(1, 2 * below, 2)
    slopes += [2 ** (-max_bias * index / (2 * below)) for index in odd]
    return tuple(slopes[:num_heads])


def without_rope(
    layers: tuple[LayerSpec, ...], is_rotated: Iterable[bool]
) -> tuple[LayerSpec, ...]:
    """`layers`, where only the layers that `is_rotated` selects rotate queries and keys."""
    return tuple(
        layer if rotates else layer._replace(rope="none")
        for layer, rotates in zip(layers, is_rotated, strict=True)
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
    quantizations: tuple[str, ...] = ()
    """Values of `quant_method` of checkpoints whose weights are dequantized while they are
    loaded."""
    derive: Callable[[Fields], Mapping[str, Any]] | None = None
    """Fields that follow from others, which they replace."""

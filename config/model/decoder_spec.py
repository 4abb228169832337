"""DecoderSpec: the differences between decoder families. Family: a registry entry. The models, the
weight map and the memory estimate are built from a spec. Imports no torch."""

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
attention and MLP read the same layer input, through a shared norm or separate norms, and both
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
"""The norms of a layer, in vLLM's names. `post_attention_layernorm` is the norm before the MLP in
`before` and `parallel_two_norms`, and the norm after the attention in `after` and `around`."""


class LayerSpec(NamedTuple):
    """Structure of a layer."""

    window: int | None = None
    """Sliding-window size in tokens, including the query's own token; None: full attention."""
    chunk: int | None = None
    """Chunk size in tokens for chunked attention: a query attends only to its own chunk. Never set
    together with `window`."""
    rope: Literal["default", "local", "none"] = "default"
    """Rope of queries and keys: ModelConfig.rope (default), ModelConfig.local_rope (local), or no
    rope (none)."""
    qk_norm: bool = True
    """Whether the layer has the norm DecoderSpec.qk_norm."""
    tunes_temperature: bool = False
    """Whether DecoderSpec.temperature applies."""
    sinks: bool = False
    """Whether each head has an attention sink: a learned logit that joins the softmax without a
    value (tensor self_attn.sinks)."""
    attention: Literal["dense", "mla", "cross"] | StateKind = "dense"
    """Kind of attention, or the state layer that replaces attention. cross: queries attend only to
    image keys; attention and MLP each add tanh(gate) times their output, and add nothing in a text
    without images."""
    feed_forward: Literal["mlp", "moe"] = "mlp"
    indexed: bool = False
    """Whether DecoderSpec.indexer selects the key blocks that a query attends to."""


class ClampedSwiGLU(NamedTuple):
    """(min(max(up, -limit), limit) + 1) * gate * sigmoid(alpha * gate), with gate at most
    `limit`."""

    alpha: float
    limit: float
    interleaved: bool = True
    """Whether the rows of gate and up are interleaved in their weight, instead of gate before
    up."""


class IndexerSpec(NamedTuple):
    """Indexer of block-sparse attention (MiniMax-M3). A query attends to the `top_blocks` blocks of
    `block_size` keys with the highest dot products of index query and index key; the last
    `local_blocks` blocks are always included."""

    num_heads: int
    """Number of index query heads, equal to the number of KV heads: each selects the blocks for a
    KV head."""
    head_dim: int
    block_size: int
    top_blocks: int
    local_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Differences between MoE families: router, activation, biases, and names and layout in the
    checkpoint."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    float32_router: bool = False
    """Whether the router runs in float32 instead of the model's dtype."""
    router_bias: bool = False
    sparse_mixer: float | None = None
    """Jitter of SparseMixer, which selects two experts sequentially; None: other routing. `scoring`
    and renormalization have no effect with SparseMixer."""
    scales_input: bool = False
    """Whether the router weight multiplies the input of an expert instead of the output."""
    expert_bias: bool = False
    """Whether both expert projections have biases."""
    clamped_swiglu: ClampedSwiGLU | None = None
    """Activation of the experts; None: the model's activation."""
    block: str = "mlp"
    """Name of the MoE block, which is the prefix of the names below."""
    gate: str = "gate"
    group_scoring: Literal["top2", "max", "none"] = "top2"
    """Score that selects expert groups: the sum of a group's two best scores, or its best score;
    none: no groups."""
    correction_bias: str = ""
    """Name of the bias that is added to the scores for expert selection; empty: no bias."""
    correction_rows: tuple[int, ...] = ()
    """Leading dimensions of the correction bias, before the expert dimension. Only the first row is
    used; further rows are for image experts."""
    transposed_router: bool = False
    """Whether the checkpoint stores the router weight as (in, out)."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections."""
    shared: str = ""
    """Name of the shared expert."""
    shared_gate: str = ""
    """Name of the shared expert's gate; empty: no gate."""
    layout: Literal["separate", "merged", "transposed", "mxfp4"] = "separate"
    """Layout of the routed experts' tensors. Separate: three tensors per expert. Merged:
    input_linear, gate before up, and output_linear, each for all experts; the shared expert's
    tensors, called shared_mlp, are outside `block`. Transposed: gate_up_proj and down_proj, each
    for all experts, (experts, in, out). MXFP4: blocks and scales of gate_up_proj and of down_proj,
    (experts, out, in / 32, ...)."""
    stacked: tuple[str, str] = ("gate_up_proj", "down_proj")
    """Names of the stacked expert tensors in the layouts transposed and MXFP4, and of experts that
    transformers 5 stacks."""


class TemperatureTuning(NamedTuple):
    """Query scaling by 1 + scale * log(1 + (position + offset) // floor)."""

    scale: float
    floor: float
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The cache stores a
    latent and a rotated key per token; keys and values of all heads are projections of the
    latent."""

    q_lora_rank: int | None
    """Size of the query latent; None: queries are projected directly from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Elements of a query or key head that are not rotated; they precede the rotated elements."""
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    """Epsilon of the latents' norms. The published code uses this value, not rms_norm_eps."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def padded_head_dim(self) -> int:
        """Head size to which a prefill pads queries, keys and values, since fused kernels need
        equal sizes."""
        return max(self.qk_head_dim, self.v_head_dim)

    @property
    def latent_size(self) -> int:
        """Number of elements that a layer caches per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def absorbed_size(self) -> int:
        """Elements per head of the two matrices that a decode applies to queries and outputs
        (absorbed kv_b_proj)."""
        return self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Differences between decoder families."""

    layers: tuple[LayerSpec, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp: str = "mlp"
    """Checkpoint name of the MLP in layers without experts."""
    qk_norm_after_rope: bool = False
    """Whether the query and key norms are applied after rope instead of before."""
    head_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    """Kind of the norms: RMS norm or layer norm."""
    norm_bias: bool = False
    norm_offset: bool = False
    """Whether the checkpoint stores norm weights minus 1; the norm is computed in float32."""
    arrangement: Arrangement = "before"
    gated_mlp: bool = True
    """Whether the MLP is down(act(gate) * up) instead of down(act(up))."""
    qk_norm: Literal["none", "heads", "all", "each_head", "unweighted"] = "none"
    """Query and key norm, an RMS norm or a layer norm according to `norm`. heads: per head, with a
    weight shared by all heads. all: over all heads together. each_head: per head, with a weight per
    head. unweighted: per head, without a weight."""
    learned_positions: bool = False
    """Whether a learned position embedding is added to the token embedding."""
    interleaved_rope: bool = False
    """Whether rope rotates adjacent elements of a head instead of elements of its two halves."""
    attention_scale: float | None = None
    """Scale of attention scores; None: 1/sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Soft cap of attention scores: soft_cap * tanh(score / soft_cap)."""
    alibi_max_bias: float | None = None
    """Maximum ALiBi bias, from which `alibi_slopes` computes the slopes; 8 in most families. None:
    no ALiBi."""
    alibi_scale: float = 1.0
    """Factor of the ALiBi slopes."""
    temperature: TemperatureTuning | None = None
    """Position-dependent query scaling in layers with `tunes_temperature`."""
    num_further_embeddings: int = 0
    """Embedding rows after the vocabulary, for tokens that are never sampled."""
    embedding_multiplier: float = 1.0
    rounded_embedding_multiplier: bool = False
    """Whether the embedding multiplier is rounded to the model's dtype first."""
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """Soft cap of logits after the division: c * tanh(logits / c)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Module path in the model -> checkpoint name; paths within a layer are relative to the layer.
    Other modules have the same name in both."""
    unused: tuple[str, ...] = ()
    """Suffixes of tensor names that a checkpoint may contain and that are not loaded."""
    qkv_layout: Literal["separate", "fused", "grouped"] = "separate"
    """Checkpoint layout of queries, keys and values: three tensors (separate); one tensor with
    queries, then keys, then values (fused); one tensor with queries, key and value of each KV head
    together (grouped)."""
    fused_gate_up: bool = False
    """Whether the checkpoint has gate_up_proj instead of gate_proj and up_proj."""
    transposed: bool = False
    """Whether the checkpoint stores linear weights of the layers as (in, out)."""
    single_head_norms: bool = False
    """Whether the checkpoint stores a separate norm tensor per head."""
    normalized_head: bool = False
    """Whether the rows of the head are scaled to length 1."""
    moe: MoESpec | None = None
    """Spec of the layers with experts."""
    mla: MLASpec | None = None
    """Spec of multi-head latent attention, which either all layers use or none."""

    indexer: IndexerSpec | None = None
    """Indexer of the layers with `indexed`."""

    mamba2: Mamba2Spec | None = None
    """Spec of the Mamba 2 layers."""
    gated_delta: GatedDeltaSpec | None = None
    """Spec of the gated DeltaNet layers."""
    short_conv: ShortConvSpec | None = None
    """Spec of the layers with a gated short convolution."""
    attention_gate: bool = False
    """Whether q_proj also produces a gate after each query head; the sigmoid of the gate scales the
    head's output."""
    mlp_swiglu: ClampedSwiGLU | None = None
    """Activation of the MLPs and of the shared expert; None: the model's activation."""
    mlp_size: int | None = None
    """Intermediate size of the MLPs without experts; None: intermediate_size of config.json."""
    merged_mlp: bool = False
    """Whether MLPs without experts are called shared_mlp and have input_linear (gate before up) and
    output_linear."""

    @property
    def has_score_options(self) -> bool:
        """Whether attention scores have options beyond scale and mask."""
        return self.attention_soft_cap is not None or any(layer.sinks for layer in self.layers)

    def state_of(self, layer: LayerSpec) -> StateSpec | None:
        """Spec of the layer's recurrent state; None for a layer with attention."""
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
        """State specs of the layers with a recurrent state."""
        states = (self.state_of(layer) for layer in self.layers)
        return tuple(state for state in states if state is not None)


def uniform_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Layer specs from the checkpoint's `layer_types` and `rope_layers`. Without layer_types, all
    layers use the window, or full attention if the model has no window."""
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
    """`layers` with rope only in the layers where `is_rotated` is true."""
    return tuple(
        layer if rotates else layer._replace(rope="none")
        for layer, rotates in zip(layers, is_rotated, strict=True)
    )


class Family(NamedTuple):
    """Registry entry of a decoder family."""

    make_spec: Callable[[ModelConfig], DecoderSpec]
    models: str
    """Published models, for the documentation."""
    limits: str = ""
    """Limits of these models, for the documentation."""
    renamed: Mapping[str, tuple[str, ...]] = {}
    """Field of config.json -> common names that get its value."""
    defaults: Mapping[str, Any] = {}
    """Defaults for absent fields, if they differ from most families."""
    moe: MoEFields | None = None
    """Names of the family's MoE fields."""
    quantizations: tuple[str, ...] = ()
    """Values of `quant_method` whose weights the family itself describes."""
    derive: Callable[[Fields], Mapping[str, Any]] | None = None
    """Computes fields that override the fields of config.json."""

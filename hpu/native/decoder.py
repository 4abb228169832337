"""CompiledDecoder: a decoder that runs each prefill and each decode in a single call of the C++
library. hpu/models/decoder.py is its reference."""

import ctypes
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from config.model.architectures import ARCHITECTURES, decoder_spec
from config.model.decoder_spec import DecoderSpec
from config.model.kv_cache_dtype import FLOAT16, FP8, FP8_INC, INT8
from config.model.model_config import ModelConfig
from hpu.distributed.agreement import Agreement
from hpu.layers.attention import SelfAttention
from hpu.layers.attention_base import Shape
from hpu.layers.cross_attention import CrossAttention
from hpu.layers.linear import LinearBase
from hpu.layers.metadata import (
    AttentionInputs,
    DecodeAttentionInputs,
    PrefillAttentionInputs,
    TextAttentionInputs,
    rotated_positions,
)
from hpu.layers.mlp import MLP, GatedMLP
from hpu.layers.moe import MoE, TopKRouter
from hpu.layers.non_finite import NonFiniteGuard
from hpu.layers.norm import QKNorm
from hpu.layers.state_cache import StateCacheSpec
from hpu.models.base import CausalLM, CompiledAdapters
from hpu.models.decoder import Decoder
from hpu.models.decoder_layer import DecoderLayer
from hpu.native.adapters import LINEARS, NativeAdapters, can_pack
from hpu.native.library import (
    ExpertsStructure,
    Library,
    PackedExperts,
    PackedLinear,
    Product,
)
from hpu.native.shared_sums import SharedSums

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256
MAX_QUERIES_PER_KV_HEAD = 16
BFLOAT16_CACHE = 0
CACHE_FORMATS = {FLOAT16: 1, FP8: 2, FP8_INC: 2, INT8: 3}
"""Values of `CacheFormat` in hpu/native/model.h by KV cache format."""


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "head_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "mixture")),
        ("window", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("key_scale", "value_scale")),
        *((f"low_{name}", ctypes.c_void_p) for name in LINEARS),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "norm", "embedding", "rotation")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "inner", "heads")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "head_dim", "rotated", "block_size")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "multiplier")),
        ("embedding_multiplier", ctypes.c_float),
        ("group", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("first_token", "num_tokens", "cache_format")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "blocks")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "slots", "block_list")),
        *((name, ctypes.c_void_p) for name in ("groups", "starts", "usage", "hidden", "total")),
        *((name, ctypes.c_void_p) for name in ("adapters", "low", "embeddings", "rotated_at")),
    )


class _Prompts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "length", "context")),
        *((name, ctypes.c_void_p) for name in ("query_lens", "context_lens")),
    )


class _Mixture(ctypes.Structure):
    """A mixture-of-experts layer: `Mixture` in hpu/native/experts.h."""

    _fields_ = (
        ("experts", ExpertsStructure),
        *((name, ctypes.c_void_p) for name in ("gate", "correction")),
        *((name, Product) for name in ("shared_gate_up", "shared_down")),
        ("shared_gate", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("is_float32", "top_k", "is_sigmoid")),
        *((name, ctypes.c_int64) for name in ("renormalizes", "groups", "top_groups")),
        ("scaling", ctypes.c_float),
    )


class _LayerWeights(NamedTuple):
    """Packed weights of a layer."""

    qkv: PackedLinear
    out: PackedLinear
    mlp: tuple[PackedLinear, PackedLinear] | _Mixture
    """(gate_up, down) of a dense MLP, or the addresses of a mixture of experts."""
    attention_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None
    """(heads + kv_heads, head_dim)"""
    window: int
    """Sliding window in tokens, the query's own token included; 0: full attention."""
    attention: SelfAttention
    """Attention layer with the scales of the KV cache."""


class _Sizes(NamedTuple):
    """Sizes and constants that all layers share, in the field order of `_Model`."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    block_size: int
    eps: float
    scale: float
    multiplier: float
    embedding_multiplier: float

    @property
    def are_supported(self) -> bool:
        return (
            self.hidden % 16 == self.inner % 16 == 0
            and self.head_dim % 32 == self.rotated % 32 == 0
            and self.head_dim <= MAX_HEAD_DIM
            and self.heads // self.kv_heads <= MAX_QUERIES_PER_KV_HEAD
        )


class CompiledDecoder(CausalLM):
    """Runs `model` in the C++ library, with the PackedLinear kernels of its linear layers. Falls
    back to `model` itself if a layer has no kernel, if the library does not support the
    architecture or the sizes, and after `keep_hidden_states`. `model` also runs launches with
    adapters that the library cannot apply, with deepstack embeddings or with complete texts, and
    launches before `bind_caches`."""

    def __init__(self, model: Decoder, library: Library, sums: SharedSums | None = None) -> None:
        """`sums`: shared memory for all-reduce if the layers are split across ranks."""
        super().__init__()
        self.config = model.config
        self.dtype = model.dtype
        self.model = model
        self._library = library
        self._sums = sums
        self._layers = _layer_weights(model) if _is_supported(model) else []
        """Empty if the library does not run the decoder."""
        if sums is not None and not Agreement(model.group).all_true(self.is_compiled):
            self._layers = []
        self._launcher: _Launcher | None = None
        """Set by `bind_caches`."""
        self._adapters = NativeAdapters({}, 0, 0, has_tiles=library.has_tiles)

    @property
    def is_compiled(self) -> bool:
        """Whether the library runs the whole prefill and decode, not only single matmuls."""
        return bool(self._layers)

    def make_adapters(self, max_loras: int, max_rank: int) -> CompiledAdapters:
        if not self.is_compiled:
            return super().make_adapters(max_loras, max_rank)
        names = _adapter_names(self.model)
        self._adapters = NativeAdapters(
            names, max_loras, max_rank, has_tiles=self._library.has_tiles
        )
        return self._adapters

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        slots = inputs.features.lora_slots
        if slots is not None and not self._adapters.knows(slots):
            return self.model(tokens, inputs)  # type: ignore[no-any-return]
        is_wide = tokens.dim() > 2 and tokens.shape[-1] != self.config.hidden_size
        if self._launcher is None or is_wide or isinstance(inputs, TextAttentionInputs):
            return self.model(tokens, inputs)  # type: ignore[no-any-return]
        if isinstance(inputs, DecodeAttentionInputs):
            hidden = self._launcher.decode(tokens, inputs)
        else:
            hidden = self._launcher.prefill(tokens, inputs)
        # Earlier chunks of the prompt may have run on `model`, which zeroes non-finite tokens.
        guard = self.non_finite_guard
        return hidden if guard is None else guard(hidden, inputs)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)

    @property
    def image_multiplier(self) -> float:
        return self.model.image_multiplier

    def keep_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Run `model` layer by layer: the library does not return hidden states of layers."""
        self._layers = []
        self.model.keep_hidden_states(layers)

    @property
    def kept_hidden_states(self) -> Tensor | None:
        return self.model.kept_hidden_states

    @property
    def received_width(self) -> int:
        return self.model.received_width

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, in float32 if the head has a PackedLinear: in bfloat16 the largest logits are
        often equal."""
        kernel = self._head_kernel
        if kernel is None:
            return self.model.logits(hidden)
        assert self.model.lm_head is not None
        logits = self.model.lm_head.gather(kernel.multiply_float32(hidden))
        return self.model.scale_logits(logits)

    def argmax(self, hidden: Tensor) -> Tensor | None:
        kernel, head, spec = self._head_kernel, self.model.lm_head, self.model.spec
        if kernel is None or head is None:
            return self.model.argmax(hidden)
        if self.model.group.size > 1:
            return head.argmax_of(self.model.scale_logits(kernel.multiply_float32(hidden)))
        # Scaling and soft cap after the head can round different logits to equal values.
        if spec.logits_divisor != 1 or spec.logits_soft_cap is not None:
            return None
        return kernel.argmax(hidden)

    @property
    def _head_kernel(self) -> PackedLinear | None:
        head = self.model.lm_head
        kernel = None if head is None else head.kernel
        return kernel if isinstance(kernel, PackedLinear) else None

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        return self.model.cache_shapes(num_blocks, block_size, num_rings)

    def cache_windows(self) -> list[int | None]:
        windows = self.model.cache_windows()
        # The library reads new tokens from the cache, and a ring may not hold all of them.
        return [None] * len(windows) if self.is_compiled else windows

    def bind_caches(
        self, caches: list[tuple[Tensor, ...]], block_size: int, num_rings: int = 0
    ) -> None:
        self.model.bind_caches(caches, block_size, num_rings)
        if self._layers:
            self._launcher = _Launcher(
                self._library, self.model, self._layers, caches, self._sums, self._adapters
            )
            vision = self.config.vision
            if vision is not None and vision.num_deepstack_layers:
                logger.info(
                    "Prompts with images run layer by layer: %d layers add embeddings of images",
                    vision.num_deepstack_layers,
                )

    def state_specs(self) -> list[StateCacheSpec]:
        return self.model.state_specs()

    def bind_states(self, states: list[tuple[Tensor, ...]]) -> None:
        self.model.bind_states(states)

    @property
    def non_finite_guard(self) -> NonFiniteGuard | None:
        return self.model.non_finite_guard

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        return self.model.cross_attentions

    def zero_non_finite(self) -> None:
        self.model.zero_non_finite()

    def read_contiguously(self) -> None:
        self.model.read_contiguously()


def is_known(config: ModelConfig) -> bool:
    """Whether the library supports models of `config`; sizes and weights are checked later."""
    return config.architecture in ARCHITECTURES and _is_known(config, decoder_spec(config))


def _is_known(config: ModelConfig, spec: DecoderSpec) -> bool:
    has_known_norms = (spec.norm, spec.norm_offset, spec.arrangement) == ("rms", False, "before")
    return (
        has_known_norms
        and config.hidden_act in ("silu", "swish")
        and not spec.mlp_swiglu
        and not (spec.mla or spec.states or spec.num_cross_layers or spec.learned_positions)
        and spec.qk_norm in ("none", "heads")
        and _attention_is_known(config, spec)
    )


def _is_supported(model: Decoder) -> bool:
    return _is_known(model.config, model.spec) and _sizes(model).are_supported


def _sizes(model: Decoder) -> _Sizes:
    config, spec, shape = model.config, model.spec, model.shape
    assert model.model.rotary_emb is not None
    return _Sizes(
        hidden=config.hidden_size,
        inner=max(config.intermediate_size, 0 if config.moe is None else config.moe.shared_size),
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rotated=config.rope.rotated_size(config.head_dim),
        block_size=model.model.metadata.block_size,
        eps=config.rms_norm_eps,
        scale=shape.scale,
        multiplier=spec.residual_multiplier,
        embedding_multiplier=spec.embedding_multiplier,
    )


def _layer_weights(model: Decoder) -> list[_LayerWeights]:
    """Weights of all layers for the library; empty if it does not support a layer."""
    layers = [_weights_of(layer) for layer in model.layers]
    found = [weights for weights in layers if weights is not None]
    return found if len(found) == len(layers) else []


def _attention_is_known(config: ModelConfig, spec: DecoderSpec) -> bool:
    return not (
        config.clip_qkv is not None
        or spec.has_score_options
        or spec.alibi_max_bias is not None
        or spec.temperature is not None
        or spec.attention_gate
        or spec.indexer
        or spec.qk_norm_after_rope
        or spec.qk_norm == "unweighted"
        or any(
            layer.chunk is not None or layer.rope != "default" or not layer.qk_norm
            for layer in spec.layers
        )
    )


def _weights_of(layer: DecoderLayer) -> _LayerWeights | None:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(attention, SelfAttention) or isinstance(mlp, MLP):
        return None
    qkv, out = attention.qkv_proj.kernel, attention.o_proj.kernel
    inner = _mixture(mlp) if isinstance(mlp, MoE) else _pair(mlp)
    if not (isinstance(qkv, PackedLinear) and isinstance(out, PackedLinear) and inner):
        return None
    qk_norm = attention.qk_norm
    return _LayerWeights(
        *(qkv, out, inner),
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        qk_norm.weight if isinstance(qk_norm, QKNorm) else None,
        attention.kind.visibility.window or 0,
        attention,
    )


def _adapter_names(model: Decoder) -> dict[LinearBase, str]:
    """Linear layers that support LoRA adapters in the library, with the names of their matmuls."""
    names: dict[LinearBase, str] = {}
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, SelfAttention)
        named = {"qkv": attention.qkv_proj, "out": attention.o_proj}
        if isinstance(mlp, GatedMLP):
            named |= {"gate_up": mlp.gate_up_proj, "down": mlp.down_proj}
        for name, linear in named.items():
            if can_pack(linear.output_sizes):
                names[linear] = f"{index}.{name}"
    return names


def _pair(mlp: GatedMLP) -> tuple[PackedLinear, PackedLinear] | None:
    gate_up, down = mlp.gate_up_proj.kernel, mlp.down_proj.kernel
    if isinstance(gate_up, PackedLinear) and isinstance(down, PackedLinear):
        return gate_up, down
    return None


def _mixture(moe: MoE) -> _Mixture | None:
    """Addresses of the weights, which `moe` keeps alive; None if the library does not support
    it."""
    experts, gate, router = moe.experts.moe_op, moe.gate.weight, moe.router
    if not isinstance(experts, PackedExperts) or gate is None:
        return None
    # Unsupported: other routers, a router bias, router weights that scale the experts' inputs.
    if not isinstance(router, TopKRouter) or moe.gate.bias is not None or moe.scales_input:
        return None
    if router.num_groups > 1 and router.group_scoring != "top2":
        return None
    shared = (Product(), Product())
    if moe.shared_experts is not None:
        pair = _pair(moe.shared_experts)
        if pair is None:
            return None
        shared = (pair[0].product, pair[1].product)
    shared_gate = None if moe.shared_expert_gate is None else moe.shared_expert_gate.weight
    correction = moe.e_score_correction_bias
    return _Mixture(
        experts.structure,
        gate.data_ptr(),
        None if correction is None else correction.data_ptr(),
        *shared,
        None if shared_gate is None else shared_gate.data_ptr(),
        *(gate.dtype == torch.float32, router.top_k, router.scoring == "sigmoid"),
        *(router.renormalize, router.num_groups, router.top_groups, router.scaling_factor),
    )


class _Launcher:
    """Calls the library with the addresses of the weights and caches."""

    def __init__(
        self,
        library: Library,
        model: Decoder,
        layers: Sequence[_LayerWeights],
        caches: Sequence[tuple[Tensor, ...]],
        sums: SharedSums | None,
        adapters: NativeAdapters,
    ) -> None:
        self._adapters = adapters
        self._library = library
        self._sums = sums
        self._hidden_size = model.config.hidden_size
        # (positions, 2 * rotated): cos, then sin with its first half negated.
        rotary_emb = model.model.rotary_emb
        assert rotary_emb is not None
        table = rotary_emb.table
        self._rotary_emb = rotary_emb
        assert model.model.norm is not None and model.model.embed_tokens is not None
        outer = (model.model.norm.weight, model.model.embed_tokens.weight, table)
        # Keep the tensors alive: the structures hold only their addresses.
        self._tensors = (outer, tuple(layers), tuple(caches))
        self._layers = (_Layer * len(layers))(
            *(
                _layer(*pair, _low_ranks(adapters, index))
                for index, pair in enumerate(zip(layers, caches, strict=True))
            )
        )
        self._model = _Model(
            ctypes.addressof(self._layers),
            *(tensor.data_ptr() for tensor in outer),
            len(layers),
            *_sizes(model),
            None if sums is None else ctypes.addressof(sums.structure),
            model.model.embed_tokens.first_token,
            len(model.model.embed_tokens.weight),
            _cache_format(model),
        )

    def decode(self, tokens: Tensor, inputs: DecodeAttentionInputs) -> Tensor:
        """Run token ids (B, 1); returns normed hidden states (B, 1, hidden)."""
        hidden = self._output(tokens)
        # Without the features: the library reads only rotated positions and adapters, set below.
        columns = map(_address, (tokens, *inputs[:6]))
        step = _Step(len(tokens), len(inputs.block_list), *columns, hidden.data_ptr())
        step.rotated_at = _address(rotated_positions(inputs))
        kept = self._add_adapters(step, inputs.features.lora_slots, 1)
        self._begin(hidden)
        self._library.decode(self._model, step)
        self._end()
        del kept
        return hidden

    def prefill(self, tokens: Tensor, inputs: PrefillAttentionInputs) -> Tensor:
        """Run token ids (B, Q) or embeddings (B, Q, hidden) on top of their cached context; returns
        normed hidden states (B, Q, hidden)."""
        batch, length = inputs.positions.shape
        hidden = self._output(inputs.positions)
        columns = map(_address, (inputs.positions, inputs.slot_mapping, inputs.block_list))
        step = _Step(batch * length, 0, None, *columns, hidden=hidden.data_ptr())
        model = self._model
        if tokens.dim() == 2:
            step.tokens = _address(tokens)
        else:
            assert tokens.dtype == torch.bfloat16 and tokens.is_contiguous()
            step.embeddings = tokens.data_ptr()
        rope_positions = inputs.features.rope_positions
        if rope_positions is None:
            step.rotated_at = _address(inputs.positions)
        else:
            # M-RoPE has three positions per token: pass a precomputed rotation for each token.
            rotation = torch.cat(self._rotary_emb(rope_positions), dim=-1).contiguous()
            rows = torch.arange(batch * length)
            step.rotated_at = rows.data_ptr()
            model = _Model.from_buffer_copy(self._model)
            model.rotation = rotation.data_ptr()
        kept = self._add_adapters(step, inputs.features.lora_slots, length)
        lengths = map(_address, (inputs.query_lens, inputs.context_lens))
        prompts = _Prompts(batch, length, len(inputs.block_list) // batch, *lengths)
        self._begin(hidden)
        self._library.prompt(model, step, prompts)
        self._end()
        del kept
        return hidden

    def _add_adapters(self, step: _Step, slots: Tensor | None, length: int) -> object:
        """Set the adapters of the sequences of `step`, `length` tokens each. Returns the arrays
        that must stay alive until the call ends."""
        if slots is None:
            return None
        found = self._adapters.rows(slots, length)
        if found is not None:
            step.adapters = ctypes.addressof(found[0])
        return found

    def _begin(self, hidden: Tensor) -> None:
        if self._sums is not None and not self._sums.reserve(hidden.numel()):
            raise RuntimeError(
                f"the tensor-parallel ranks share no memory for sums of {hidden.numel()} numbers"
            )

    def _end(self) -> None:
        if self._sums is not None:
            self._sums.check()

    def _output(self, tokens: Tensor) -> Tensor:
        return torch.empty((*tokens.shape, self._hidden_size), dtype=torch.bfloat16)


def _address(column: Tensor) -> int:
    assert column.dtype == torch.int64 and column.is_contiguous()
    return column.data_ptr()


def _low_ranks(adapters: NativeAdapters, index: int) -> list[int | None]:
    """Addresses of the adapter slots of a layer's matmuls; None: no adapters."""
    found = (adapters.slots.get(f"{index}.{name}") for name in LINEARS)
    return [None if module is None else ctypes.addressof(module.structure) for module in found]


def _layer(
    weights: _LayerWeights, caches: tuple[Tensor, ...], low_ranks: Sequence[int | None]
) -> _Layer:
    qk_norm, (keys, values), mlp = weights.qk_norm, caches, weights.mlp
    mixture, products = None, (Product(), Product())
    if isinstance(mlp, _Mixture):
        mixture = ctypes.addressof(mlp)
    else:
        products = (mlp[0].product, mlp[1].product)
    return _Layer(
        *(weights.qkv.product, weights.out.product, *products),
        *(weights.attention_norm.data_ptr(), weights.mlp_norm.data_ptr()),
        None if qk_norm is None else qk_norm.data_ptr(),
        *(keys.data_ptr(), values.data_ptr(), mixture, weights.window),
        *(1.0 if scale is None else float(scale) for scale in weights.attention.attn.kv_scales),
        *low_ranks,
    )


def _cache_format(model: Decoder) -> int:
    if model.kv_cache_format is None:
        return BFLOAT16_CACHE
    return CACHE_FORMATS[model.kv_cache_format.name]

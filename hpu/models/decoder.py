"""The one dense decoder: what all plain families share, told apart by DecoderSpec. Knows no files.

Embedding; per layer x = x + m * attention(norm(x)) and x = x + m * mlp(norm(x)); norm; head.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config.model.model_config import ModelConfig
from hpu.layers.attention import Attention, HeadNorm, HeadShape
from hpu.layers.embedding import Embedding
from hpu.layers.linear import Linear, can_pack, multiplications
from hpu.layers.metadata import (
    AttentionInputs,
    DecodeAttentionInputs,
    PrefillAttentionInputs,
    Windows,
    build_metadata,
)
from hpu.model_loader.weight_map import Place, parts, whole
from hpu.models.layer import MLP, Layer, Norm
from hpu.native.decoder import EndWeights, NativeDecoder, Sizes
from hpu.native.library import Library, PackedLinear, packer
from hpu.ops.kernels import Kernels
from hpu.ops.rope import Rotary, Rotation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Where families differ. A family file makes one from a ModelConfig."""

    windows: Windows
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    """RMS norm of each query and key head."""
    merged_names: bool = False
    """The checkpoint holds qkv_proj and gate_up_proj, not their parts."""
    attention_scale: float | None = None
    """None: 1/sqrt(head_dim)."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


def layer_windows(config: ModelConfig) -> Windows:
    """Windows as the checkpoint says: all layers or those it names, if it has a window at all."""
    if config.sliding_window is None:
        return Windows(None, (False,) * config.num_layers)
    layers = config.window_layers or (True,) * config.num_layers
    return Windows(config.sliding_window, layers)


class Decoder(nn.Module):
    """A dense decoder. Parameters are allocated, not filled: hpu/model_loader/loader.py does
    that."""

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        length: int,
        has_head: bool = True,
    ) -> None:
        """`length`: tokens of the longest sequence that will be served. Without a head it gives
        hidden states and no logits."""
        super().__init__()
        self.config = config
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.shape = HeadShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            spec.attention_scale or config.head_dim**-0.5,
        )
        self.embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            multiplier=spec.embedding_multiplier,
            dtype=dtype,
            device=device,
        )
        self.layers = nn.ModuleList(self._layer(i) for i in range(config.num_layers))
        self.norm = self._norm()
        self.head: Linear | None = None
        if has_head:
            self.head = self._linear(config.hidden_size, config.vocab_size, bias=False)
        if self.head is not None and config.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        self.rotary = Rotary(config, length=length, dtype=dtype, device=device)
        self._block_size = 0
        self._fused: torch.dtype | None = None
        self._contiguous = False
        self._library: Library | None = None
        self._native: NativeDecoder | None = None

    def _linear(self, in_size: int, out_size: int, *, bias: bool) -> Linear:
        return Linear(in_size, out_size, bias=bias, dtype=self.dtype, device=self.device)

    def _norm(self) -> Norm:
        config = self.config
        return Norm(config.hidden_size, config.rms_norm_eps, dtype=self.dtype, device=self.device)

    def _layer(self, index: int) -> Layer:
        config, spec, shape = self.config, self.spec, self.shape
        hidden, inner = config.hidden_size, config.intermediate_size
        head_norm = None
        if spec.head_norm:
            head_norm = HeadNorm(shape, config.rms_norm_eps, dtype=self.dtype, device=self.device)
        attention = Attention(
            shape,
            qkv=self._linear(hidden, shape.query_size + 2 * shape.kv_size, bias=spec.qkv_bias),
            out=self._linear(shape.query_size, hidden, bias=spec.out_bias),
            head_norm=head_norm,
            is_windowed=spec.windows.layers[index],
        )
        mlp = MLP(
            self._linear(hidden, 2 * inner, bias=spec.mlp_bias),
            self._linear(inner, hidden, bias=spec.mlp_bias),
            config.hidden_act,
        )
        return Layer(
            attention, mlp, self._norm(), self._norm(), multiplier=spec.residual_multiplier
        )

    def forward(self, tokens: Tensor, context: AttentionInputs) -> Tensor:
        """Hidden states (B, Q, hidden) of `tokens` (B, Q), normed and ready for `logits`."""
        native = self._native
        if native is not None and isinstance(context, DecodeAttentionInputs):
            return native(tokens, context)
        if native is not None and isinstance(context, PrefillAttentionInputs):
            return native.prompt(tokens, context)
        rotation: Rotation = self.rotary(context.positions)
        plan = build_metadata(
            context,
            self._block_size,
            self.spec.windows,
            self._fused,
            contiguous=self._contiguous,
            causal=self.config.is_causal,
        )
        total: Tensor = self.embedding(tokens)
        for layer in self.layers:
            total = layer(total, rotation, plan)
        return self.norm(total)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """(M, hidden) to (M, vocab), in the model's dtype; in float32 where its product can leave
        them unrounded: bfloat16 has two of the likeliest tokens equal every so often."""
        assert self.head is not None, "a decoder without a head gives no logits"
        product = self.head.product
        logits: Tensor = (
            product.exact(hidden) if isinstance(product, PackedLinear) else self.head(hidden)
        )
        divisor = self.spec.logits_divisor
        return logits if divisor == 1 else logits / divisor

    def best(self, hidden: Tensor) -> Tensor | None:
        """(M, hidden) to (M,): the tokens of the largest logits, the first of several, -1 where
        that is no finite number. None where it takes all logits to know."""
        product = self.head.product if self.head is not None else None
        if not isinstance(product, PackedLinear) or self.spec.logits_divisor != 1:
            return None
        return product.best(hidden)

    def cache_shapes(
        self, num_blocks: int, block_size: int
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Each layer's shape of the key cache and of the value cache."""
        shape = (num_blocks * block_size, self.shape.num_kv_heads, self.shape.head_dim)
        return [(shape, shape)] * self.config.num_layers

    def bind_caches(self, caches: list[tuple[Tensor, Tensor]], block_size: int) -> None:
        """Take each layer's caches, of `cache_shapes`."""
        assert len(caches) == self.config.num_layers
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            layer.attention.bind_caches(keys, values, block_size)
        self._block_size = block_size
        self._native = None if self._library is None else self._made_native(self._library)

    def read_contiguously(self) -> None:
        """From now on entry i of a decode describes block i of the caches, which are then read as
        they lie. Once only, before the first launch."""
        self._contiguous = True
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.attention.isolate()

    def fuse(self, kernels: Kernels, *, split_qkv: bool = False) -> None:
        """Run on a device's fused kernels from now on. Once only, before the first launch."""
        self._fused = self.dtype
        self.rotary.use_plain_sin()
        for module in self.modules():
            if isinstance(module, Norm):
                module.fuse(kernels)
            elif isinstance(module, Attention):
                module.fuse(kernels, split_qkv=split_qkv)
                # Their products sum over all blocks of a launch, with zeros for other rows'.
                module.isolate()

    def linears(self) -> Iterator[tuple[Linear, list[str]]]:
        """Every product, and the checkpoint's names of the matrices in it, from the top."""
        names: dict[int, list[str]] = {}
        for name, place in self.places():
            names.setdefault(place.target.untyped_storage().data_ptr(), []).append(name)
        for module in self.modules():
            if isinstance(module, Linear) and module.weight is not None:
                found = names[module.weight.untyped_storage().data_ptr()]
                yield module, [name for name in found if name.endswith(".weight")]

    def shares_weight(self, linear: Linear) -> bool:
        """Whether the layer is the head and the embedding reads its weight too."""
        return linear is self.head and self.config.tie_word_embeddings

    def pack_weights(self, library: Library | None = None) -> bool:
        """Reorder the weights of all products for a CPU that gains by it; whether it was done. With
        `library` decodes run on it where it has all that they need.

        Afterwards nothing can be loaded. A tied embedding keeps its own copy beside the head's.
        """
        if not can_pack(self.dtype, self.device):
            logger.info("weights stay as they are: no packed product for %s here", self.dtype)
            return False
        for module in self.modules():
            if isinstance(module, Norm):
                module.pack()
            elif isinstance(module, Linear):
                module.pack(keep_weight=self.shares_weight(module), pack=packer(library, module))
        self._library = library
        return True

    @property
    def multiplications(self) -> tuple[int, int]:
        """Of a token, and of a row that is sampled."""
        head = [] if self.head is None else [self.head]
        return multiplications(self.layers.modules()), multiplications(head)

    @property
    def has_native(self) -> bool:
        """Whether decodes run on a compiled library."""
        return self._native is not None

    def _made_native(self, library: Library) -> NativeDecoder | None:
        """The decoder's steps on `library`; None where it lacks something."""
        config, spec, shape = self.config, self.spec, self.shape
        sizes = Sizes(
            config.hidden_size,
            config.intermediate_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self.rotary.table.shape[1] // 2,
            config.rms_norm_eps,
            shape.scale,
            spec.residual_multiplier,
            spec.embedding_multiplier,
        )
        if not sizes.fit or config.hidden_act not in ("silu", "swish"):
            return None
        layers = [layer.native(spec.windows) for layer in self.layers if isinstance(layer, Layer)]
        found = [weights for weights in layers if weights is not None]
        if len(found) < len(layers):
            return None
        ends = EndWeights(self.norm.weight, self.embedding.weight, self.rotary.table)
        return NativeDecoder(library, sizes, found, ends, self._block_size)

    def places(self) -> Iterator[tuple[str, Place]]:
        """Every tensor a checkpoint must hold: its name and where it goes."""
        yield "model.embed_tokens.weight", whole(self.embedding.weight)
        yield "model.norm.weight", whole(self.norm.weight)
        if self.head is not None and not self.config.tie_word_embeddings:
            assert self.head.weight is not None
            yield "lm_head.weight", whole(self.head.weight)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            for name, place in self._layer_places(layer):
                yield f"model.layers.{index}.{name}", place

    def _layer_places(self, layer: Layer) -> Iterator[tuple[str, Place]]:
        shape, inner = self.shape, self.config.intermediate_size
        attention, mlp = layer.attention, layer.mlp
        yield "input_layernorm.weight", whole(layer.attention_norm.weight)
        yield "post_attention_layernorm.weight", whole(layer.mlp_norm.weight)
        thirds = {"q_proj": shape.query_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
        halves = {"gate_proj": inner, "up_proj": inner}
        if self.spec.merged_names:
            thirds, halves = {"qkv_proj": sum(thirds.values())}, {"gate_up_proj": 2 * inner}
        yield from parts("self_attn", attention.qkv, thirds)
        yield from parts("self_attn", attention.out, {"o_proj": self.config.hidden_size})
        yield from parts("mlp", mlp.gate_up, halves)
        yield from parts("mlp", mlp.down, {"down_proj": self.config.hidden_size})
        if isinstance(attention.head_norm, HeadNorm):
            queries, keys = attention.head_norm.weight.split_with_sizes(
                [shape.num_heads, shape.num_kv_heads]
            )
            yield "self_attn.q_norm.weight", Place(queries, (shape.head_dim,))
            yield "self_attn.k_norm.weight", Place(keys, (shape.head_dim,))

    def own_name(self, name: str) -> str:
        """What `places` calls a checkpoint's tensor: those of a model without a head have no
        prefix."""
        return name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}"

    def may_skip(self, name: str) -> bool:
        """Whether a checkpoint may hold `name` though we have no place for it."""
        is_headless = self.head is None or self.config.tie_word_embeddings
        is_unused = name.startswith("score.") and self.head is None
        if (name == "lm_head.weight" and is_headless) or is_unused:
            return True
        return name.endswith(".rotary_emb.inv_freq")

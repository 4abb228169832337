"""The BERT family: bidirectional encoders, told apart by EncoderConfig.family. Knows no files.

Embeddings of words, positions and types, summed and normed; per layer x = norm(x + attention(x))
and x = norm(x + mlp(x)).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.model.encoder import DISTIL_BERT
from config.model.model_config import ModelConfig
from hpu.layers.attention import Attention, HeadShape
from hpu.layers.embedding import Embedding
from hpu.layers.linear import Linear, can_pack, multiplications
from hpu.layers.metadata import (
    AttentionInputs,
    AttentionMetadata,
    TextAttentionInputs,
    Windows,
    build_text_metadata,
)
from hpu.model_loader.weight_map import Place, parts, whole
from hpu.models.layer import activation_named
from hpu.native.library import Library, packer
from hpu.ops.kernels import Kernels

PREFIXES = ("bert.", "roberta.", "distilbert.")
"""Of the encoder's own tensors, in a checkpoint with a head."""

UNUSED = ("cls.", "lm_head.", "vocab_", "pooler.", "classifier.", "pre_classifier.")
"""What may lie beside them: heads that were trained with the encoder."""


class Words(NamedTuple):
    """What a family calls its tensors."""

    layers: str
    attention: tuple[str, str, str]
    """Of queries, keys and values."""
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


BERT_WORDS = Words(
    "encoder.layer",
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
DISTIL_WORDS = Words(
    "transformer.layer",
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)


class LayerNorm(nn.Module):
    """Mean 0 and deviation 1 over the hidden states, times `weight`, plus `bias`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        empty = torch.empty(2, size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty[0], requires_grad=False)
        self.bias = nn.Parameter(empty[1], requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) to the same."""
        return functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


class EncoderLayer(nn.Module):
    """Attention and MLP, each with the norm behind it."""

    def __init__(
        self,
        attention: Attention,
        up: Linear,
        down: Linear,
        attention_norm: LayerNorm,
        mlp_norm: LayerNorm,
        activation: str,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.up = up
        self.down = down
        self.attention_norm = attention_norm
        self.mlp_norm = mlp_norm
        self._activation = activation_named(activation)

    def forward(self, hidden: Tensor, plan: AttentionMetadata) -> Tensor:
        """(B, Q, hidden) to the same."""
        hidden = self.attention_norm(hidden + self.attention(hidden, None, plan))
        inner = self._activation(self.up(hidden))
        return self.mlp_norm(hidden + self.down(inner))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """An encoder. Parameters are allocated, not filled: hpu/model_loader/loader.py does that."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert config.encoder is not None
        self.config = config
        self.facts = config.encoder
        self.words = DISTIL_WORDS if self.facts.family == DISTIL_BERT else BERT_WORDS
        self.dtype = dtype
        self.device = device
        self.shape = HeadShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5
        )
        self.embedding = self._table(config.vocab_size)
        self.positions = self._table(config.max_position + self.facts.first_position)
        self.types = self._table(self.facts.num_types) if self.facts.num_types else None
        self.norm = self._norm()
        self.layers = nn.ModuleList(self._layer() for _ in range(config.num_layers))
        self._fused: torch.dtype | None = None

    def _table(self, rows: int) -> Embedding:
        return Embedding(
            rows, self.config.hidden_size, multiplier=1.0, dtype=self.dtype, device=self.device
        )

    def _norm(self) -> LayerNorm:
        eps = self.facts.norm_eps
        return LayerNorm(self.config.hidden_size, eps, dtype=self.dtype, device=self.device)

    def _linear(self, in_size: int, out_size: int) -> Linear:
        return Linear(in_size, out_size, bias=True, dtype=self.dtype, device=self.device)

    def _layer(self) -> EncoderLayer:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        attention = Attention(
            self.shape,
            qkv=self._linear(hidden, 3 * hidden),
            out=self._linear(hidden, hidden),
            head_norm=None,
            is_windowed=False,
        )
        return EncoderLayer(
            attention,
            self._linear(hidden, inner),
            self._linear(inner, hidden),
            self._norm(),
            self._norm(),
            self.config.hidden_act,
        )

    def forward(self, tokens: Tensor, context: AttentionInputs) -> Tensor:
        """Hidden states (B, Q, hidden) of `tokens` (B, Q) in a TextAttentionInputs."""
        assert isinstance(context, TextAttentionInputs)
        places = context.positions + self.facts.first_position
        hidden: Tensor = self.embedding(tokens) + self.positions(places)
        if self.types is not None:
            # A table of one row knows no pairs: both of their texts are of its kind.
            knows_pairs = self.facts.num_types > 1
            hidden = hidden + (self.types(context.types) if knows_pairs else self.types.weight[0])
        hidden = self.norm(hidden)
        plan = build_text_metadata(
            context, Windows(None, (False,)), self._fused, causal=self.config.is_causal
        )
        for layer in self.layers:
            hidden = layer(hidden, plan)
        return hidden

    def fuse(self, kernels: Kernels, *, split_qkv: bool = False) -> None:
        """Run on a device's fused kernels from now on. Once only, before the first launch."""
        self._fused = self.dtype
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            layer.attention.fuse(kernels, split_qkv=split_qkv)

    def pack_weights(self, library: Library | None = None) -> bool:
        """As hpu.models.decoder.Decoder.pack_weights."""
        if not can_pack(self.dtype, self.device):
            return False
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(pack=packer(library, module))
        return True

    @property
    def multiplications(self) -> tuple[int, int]:
        """As hpu.models.decoder.Decoder.multiplications."""
        return multiplications(self.modules()), 0

    def places(self) -> Iterator[tuple[str, Place]]:
        """Every tensor a checkpoint must hold: its name and where it goes."""
        yield "embeddings.word_embeddings.weight", whole(self.embedding.weight)
        yield "embeddings.position_embeddings.weight", whole(self.positions.weight)
        if self.types is not None:
            yield "embeddings.token_type_embeddings.weight", whole(self.types.weight)
        yield from _norm_places("embeddings.LayerNorm", self.norm)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            yield from self._layer_places(f"{self.words.layers}.{index}", layer)

    def _layer_places(self, prefix: str, layer: EncoderLayer) -> Iterator[tuple[str, Place]]:
        words, hidden = self.words, self.config.hidden_size
        yield from parts(prefix, layer.attention.qkv, dict.fromkeys(words.attention, hidden))
        yield from parts(prefix, layer.attention.out, {words.out: hidden})
        yield from _norm_places(f"{prefix}.{words.attention_norm}", layer.attention_norm)
        yield from parts(prefix, layer.up, {words.up: self.config.intermediate_size})
        yield from parts(prefix, layer.down, {words.down: hidden})
        yield from _norm_places(f"{prefix}.{words.mlp_norm}", layer.mlp_norm)

    def own_name(self, name: str) -> str:
        """What `places` calls a checkpoint's tensor: those below a head have the family's prefix,
        and some that came from the first releases have other words for a norm's parameters."""
        name = next((name[len(p) :] for p in PREFIXES if name.startswith(p)), name)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        )

    def may_skip(self, name: str) -> bool:
        """Whether a checkpoint may hold `name` though we have no place for it."""
        return name.startswith(UNUSED) or name.endswith(("position_ids", "token_type_ids"))


def _norm_places(prefix: str, norm: LayerNorm) -> Iterator[tuple[str, Place]]:
    yield f"{prefix}.weight", whole(norm.weight)
    yield f"{prefix}.bias", whole(norm.bias)

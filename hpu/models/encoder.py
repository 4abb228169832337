"""Bidirectional encoders of the BERT family; EncoderConfig describes the variant.

The sum of word, position (unless heads are rotated) and type (if any) embeddings is normed; each
layer computes x = norm(x + attention(x)) and x = norm(x + mlp(x)).
"""

from typing import Any

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.encoder import encoder_weight_map
from config.model.model_config import ModelConfig
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.attention import HeadShape, SelfAttention
from hpu.layers.embedding import VocabParallelEmbedding
from hpu.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from hpu.layers.metadata import FULL, AttentionInputs, AttentionMetadata, TextAttentionInputs
from hpu.layers.metadata_builder import MetadataBuilder
from hpu.layers.mlp import MLP, GatedMLP
from hpu.layers.norm import LayerNorm
from hpu.ops.kernels import Kernels
from hpu.ops.rope import RotaryEmbedding, Rotation


class EncoderLayer(nn.Module):
    """Attention and MLP, each followed by a norm (post-norm)."""

    def __init__(
        self,
        self_attn: SelfAttention,
        mlp: MLP | GatedMLP,
        attention_norm: LayerNorm,
        mlp_norm: LayerNorm,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.mlp_norm = mlp_norm

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden). `rotation` None: heads are not rotated."""
        hidden = self.attention_norm(hidden + self.self_attn(hidden, rotation, metadata))
        return self.mlp_norm(hidden + self.mlp(hidden))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Encoder model. Parameters are allocated, not filled."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup = SINGLE,
    ) -> None:
        """`group`: tensor-parallel ranks. Layers are sharded; embeddings are replicated."""
        super().__init__()
        assert config.encoder is not None
        self.config = config
        self.group = group
        self.encoder_config = config.encoder
        self.dtype = dtype
        self.device = device
        self.weight_map = encoder_weight_map(config)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        hidden, encoder = config.hidden_size, config.encoder
        num_positions = config.max_position + encoder.first_position
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, hidden, **self._options)
        self.position_embeddings: VocabParallelEmbedding | None = None
        self.rotary_emb: RotaryEmbedding | None = None
        if encoder.has_rope:
            self.rotary_emb = RotaryEmbedding(
                config, config.rope, length=num_positions, **self._options
            )
        else:
            self.position_embeddings = VocabParallelEmbedding(
                num_positions, hidden, **self._options
            )
        self.token_type_embeddings: VocabParallelEmbedding | None = None
        if encoder.num_types:
            self.token_type_embeddings = VocabParallelEmbedding(
                encoder.num_types, hidden, **self._options
            )
        self.embedding_norm = self._norm()
        self.layers = nn.ModuleList(self._layer() for _ in range(config.num_layers))
        self.metadata = MetadataBuilder((FULL,), causal=config.is_causal)

    def _norm(self) -> LayerNorm:
        return LayerNorm(self.config.hidden_size, self.encoder_config.norm_eps, **self._options)

    def _layer(self) -> EncoderLayer:
        config, size = self.config, self.group.size
        options = {
            **self._options,
            "bias": self.encoder_config.has_biases,
            "group": self.group,
        }
        hidden = config.hidden_size
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        attention = SelfAttention(
            HeadShape(heads // size, kv_heads // size, head_dim, head_dim**-0.5),
            qkv_proj=QKVParallelLinear(
                hidden, QKVParallelLinear.sizes(heads, kv_heads, head_dim, size), **options
            ),
            o_proj=RowParallelLinear(hidden, hidden, **options),
        )
        return EncoderLayer(attention, self._mlp(options), self._norm(), self._norm())

    def _mlp(self, options: dict[str, Any]) -> MLP | GatedMLP:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        down = RowParallelLinear(inner, hidden, **options)
        if self.encoder_config.is_gated:
            gate_up = MergedColumnParallelLinear(hidden, [inner, inner], **options)
            return GatedMLP(gate_up, down, config.hidden_act)
        return MLP(ColumnParallelLinear(hidden, inner, **options), down, config.hidden_act)

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """Hidden states (B, Q, hidden) of `tokens` (B, Q). `inputs` must be TextAttentionInputs."""
        assert isinstance(inputs, TextAttentionInputs)
        hidden = self.embedding_norm(self._embed(tokens, inputs))
        metadata: AttentionMetadata = self.metadata(inputs)
        rotation = None if self.rotary_emb is None else self.rotary_emb(inputs.positions)
        for layer in self.layers:
            hidden = layer(hidden, rotation, metadata)
        return hidden  # type: ignore[no-any-return]

    def _embed(self, tokens: Tensor, inputs: TextAttentionInputs) -> Tensor:
        hidden: Tensor = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            positions = inputs.positions + self.encoder_config.first_position
            hidden = hidden + self.position_embeddings(positions)
        if self.token_type_embeddings is None:
            return hidden
        if self.encoder_config.num_types == 1:
            # A model without text pairs has a single type.
            return hidden + self.token_type_embeddings.weight[0]
        return hidden + self.token_type_embeddings(inputs.types)  # type: ignore[no-any-return]

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool = False) -> None:
        """Switch to the device's fused kernels. Called once, before the first launch."""
        self.metadata.attention_form = kernels.attention_form(self.dtype)
        if self.rotary_emb is not None:
            self.rotary_emb.restore_sin_sign()
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            layer.self_attn.use_kernels(kernels, split_qkv=split_qkv)

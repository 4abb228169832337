"""Decoder layers: attention, MLP, and the arrangement of their norms."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from config.model.decoder_spec import Arrangement
from hpu.layers.attention import SelfAttention
from hpu.layers.cross_attention import CrossAttention
from hpu.layers.gated_delta import GatedDeltaNet
from hpu.layers.mamba2 import Mamba2Mixer
from hpu.layers.metadata import AttentionMetadata
from hpu.layers.mla import MLAAttention
from hpu.layers.mlp import MLP, GatedMLP
from hpu.layers.moe import MoE
from hpu.layers.norm import LayerNorm, RMSNorm
from hpu.layers.short_conv import ShortConv
from hpu.ops.rope import Rotation

StateLayer = Mamba2Mixer | GatedDeltaNet | ShortConv
"""Layers with a state, in place of attention."""


class DecoderLayer(nn.Module):
    """Attention and MLP with residual connections, each scaled by `multiplier`. Subclasses
    define where the norms (decoder_spec.NORMS) are applied."""

    input_layernorm: RMSNorm | LayerNorm
    post_attention_layernorm: RMSNorm | LayerNorm
    pre_feedforward_layernorm: RMSNorm | LayerNorm
    post_feedforward_layernorm: RMSNorm | LayerNorm

    def __init__(
        self,
        self_attn: SelfAttention | MLAAttention | StateLayer | CrossAttention,
        mlp: GatedMLP | MLP | MoE,
        norms: Mapping[str, RMSNorm | LayerNorm],
        *,
        multiplier: float,
        mlp_name: str,
    ) -> None:
        """`mlp_name`: module name of the MLP."""
        super().__init__()
        self.self_attn = self_attn
        self._mlp_name = mlp_name
        # `add_module` rejects the name of a property (`mlp`).
        self._modules[mlp_name] = mlp
        for name, norm in norms.items():
            self.add_module(name, norm)
        self._multiplier = multiplier

    @property
    def mlp(self) -> GatedMLP | MLP | MoE:
        return cast("GatedMLP | MLP | MoE", self._modules[self._mlp_name])

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden)."""
        raise NotImplementedError

    def _add(self, hidden: Tensor, delta: Tensor) -> Tensor:
        return torch.add(hidden, delta, alpha=self._multiplier)


class PreNormLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        delta = self.self_attn(self.input_layernorm(hidden), rotation, metadata)
        hidden = self._add(hidden, delta)
        return self._add(hidden, self.mlp(self.post_attention_layernorm(hidden)))


class PostNormLayer(DecoderLayer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        delta = self.post_attention_layernorm(self.self_attn(hidden, rotation, metadata))
        hidden = self._add(hidden, delta)
        return self._add(hidden, self.post_feedforward_layernorm(self.mlp(hidden)))


class SandwichNormLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        delta = self.self_attn(self.input_layernorm(hidden), rotation, metadata)
        hidden = self._add(hidden, self.post_attention_layernorm(delta))
        delta = self.mlp(self.pre_feedforward_layernorm(hidden))
        return self._add(hidden, self.post_feedforward_layernorm(delta))


class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), with a shared norm."""

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        normed = self.input_layernorm(hidden)
        delta = self.self_attn(normed, rotation, metadata)
        return self._add(self._add(hidden, delta), self.mlp(normed))


class ParallelTwoNormLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), with two norms."""

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        delta = self.self_attn(self.input_layernorm(hidden), rotation, metadata)
        inner = self.mlp(self.post_attention_layernorm(hidden))
        return self._add(self._add(hidden, delta), inner)


class CrossAttentionLayer(DecoderLayer):
    """x + tanh(gate) * attention(norm(x)), then x + tanh(gate) * mlp(norm(x)). Identity for tokens
    of requests without images; tokens before the first image of a request skip only the MLP."""

    def __init__(
        self,
        self_attn: CrossAttention,
        mlp: GatedMLP | MLP | MoE,
        norms: Mapping[str, RMSNorm | LayerNorm],
        *,
        multiplier: float,
        mlp_name: str,
    ) -> None:
        super().__init__(self_attn, mlp, norms, multiplier=multiplier, mlp_name=mlp_name)
        self.cross_attn_attn_gate = self_attn.q_proj.new_parameter(1)
        self.cross_attn_mlp_gate = self_attn.q_proj.new_parameter(1)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        cross = metadata.cross
        if cross is None:
            return hidden
        delta = self.self_attn(self.input_layernorm(hidden), rotation, metadata)
        changed = self._add(hidden, self.cross_attn_attn_gate.tanh() * delta)
        # torch.where, not a multiplication: unseen values may be NaN.
        hidden = torch.where(cross.has_images, changed, hidden)
        inner = self.mlp(self.post_attention_layernorm(hidden))
        changed = self._add(hidden, self.cross_attn_mlp_gate.tanh() * inner)
        return torch.where(cross.sees_images, changed, hidden)


LAYERS: Mapping[Arrangement, type[DecoderLayer]] = {
    "before": PreNormLayer,
    "after": PostNormLayer,
    "around": SandwichNormLayer,
    "parallel": ParallelLayer,
    "parallel_two_norms": ParallelTwoNormLayer,
}

"""MXFP4 experts of a checkpoint, for kernels that multiply by MXFP4 directly: Mxfp4MoEMethod for a
CPU, NativeMxfp4MoEMethod for Gaudi."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.shard import Shard
from config.model.decoder_spec import MXFP4_BLOCK, ClampedSwiGLU
from hpu.model_loader.quantized_weights import POWER_BIAS
from hpu.quantization.base import ExpertsLayer
from hpu.quantization.quantized_weight import Mxfp4Weight, StackedWeights
from hpu.quantization.stored.weights import W2, W13
from hpu.quantization.unquantized import UNQUANTIZED_MOE

HALVES = ("blocks", "scales")
"""Suffixes of the parameter names of a weight."""


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """The weights of a layer's stacked experts on this rank, in MXFP4."""

    num_experts: int
    hidden_size: int
    inner_size: int
    """Inner size of this rank."""
    has_whole_blocks: bool
    """Whether every block of inputs is on a single rank."""

    @classmethod
    def of(cls, w2: list[Shard], hidden_size: int, inner_size: int) -> "Mxfp4Experts":
        """Create from the shards of w2."""
        blocks = next(shard for shard in w2 if shard.spec.mxfp4 == "blocks")
        count = blocks.spec.num_experts
        assert count is not None, "a tensor has all experts"
        columns = blocks.spec.mxfp4_columns
        is_whole = columns is None or (columns[0] == 0 and inner_size % MXFP4_BLOCK == 0)
        return cls(count, hidden_size, inner_size, is_whole)


class Mxfp4MoEMethod:
    """MoEMethod whose weights become StackedWeights."""

    def __init__(self, experts: Mxfp4Experts) -> None:
        self._experts = experts

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        layer.w13_weight = layer.w2_weight = None
        shapes = {W13: (2 * inner_size, hidden_size), W2: (hidden_size, inner_size)}
        for prefix, (out, size) in shapes.items():
            groups = (num_experts, out, size // MXFP4_BLOCK)
            for half, shape in zip(HALVES, ((*groups, MXFP4_BLOCK // 2), groups), strict=True):
                empty = torch.empty(shape, dtype=torch.uint8, device=layer.device)
                layer.register_parameter(prefix + half, nn.Parameter(empty, requires_grad=False))

    def process_weights(self, layer: ExpertsLayer) -> None:
        layer.quantized_weights = StackedWeights(*self._take_weights(layer, Mxfp4Weight))

    def _take_weights(
        self, layer: ExpertsLayer, kind: type[Mxfp4Weight]
    ) -> list[tuple[Mxfp4Weight, ...]]:
        """Remove the parameters of both weights from `layer`. Returns w13 and w2 of each expert."""
        stacks = []
        for prefix in (W13, W2):
            halves = (layer.get_parameter(prefix + half).detach() for half in HALVES)
            stacks.append(tuple(kind(*pair) for pair in zip(*halves, strict=True)))
            for half in HALVES:
                layer.register_parameter(prefix + half, None)
        return stacks

    def apply(self, layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return UNQUANTIZED_MOE.apply(layer, hidden, ids, weights)


class NativeMxfp4MoEMethod(Mxfp4MoEMethod):
    """Mxfp4MoEMethod with torch.ops.hpu.mixture_of_experts.bias_mxfp4_fused_weights, for experts
    with biases and a clamped SwiGLU. Without the kernel, each launch dequantizes the experts one at
    a time."""

    def process_weights(self, layer: ExpertsLayer) -> None:
        w13, w2 = self._take_weights(layer, LaunchedMxfp4Weight)
        layer.quantized_weights = StackedWeights(w13, w2)
        has_biases = isinstance(layer.w13_bias, Tensor)
        if has_biases and isinstance(layer.activation_form, ClampedSwiGLU):
            layer.moe_op = VllmMixtureOfExpertsOpMxfp4(layer, w13, w2)


class LaunchedMxfp4Weight(Mxfp4Weight):
    """Mxfp4Weight that a launch dequantizes on the card, without a table: a table would be copied
    from the host in each launch."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        pairs = self.blocks.int()
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
        power, half = (codes >> 1) & 3, (codes & 1).float() * 0.5
        # E2M1: numbers of exponent 0 are subnormal, without an implicit leading 1.
        sizes = torch.where(power > 0, (half + 1) * torch.exp2(power.float() - 1), half)
        values = torch.where(codes > 7, -sizes, sizes)
        scales = torch.exp2((self.scales.int() - POWER_BIAS).float())
        return (values * scales.unsqueeze(-1)).flatten(-2).to(dtype)


class VllmMixtureOfExpertsOpMxfp4(nn.Module):
    """MoEImpl: the vendor's kernel for a layer's routed experts in MXFP4. Arguments follow the
    kernel's test (test_mixture_of_experts_bias_mxfp4_fused_weights in
    HabanaAI/gaudi-pytorch-bridge, as of 2026)."""

    def __init__(
        self,
        layer: ExpertsLayer,
        w13: tuple[Mxfp4Weight, ...],
        w2: tuple[Mxfp4Weight, ...],
    ) -> None:
        """Holds the weights of `layer` and views of its biases, so they must not be moved later."""
        super().__init__()
        assert isinstance(layer.w13_bias, Tensor)
        assert isinstance(layer.activation_form, ClampedSwiGLU)
        self._w13, self._w2 = w13, w2
        self._w13_biases = list(layer.w13_bias.detach().unbind(0))
        w2_bias = layer.applied_w2_bias
        if w2_bias is None:
            # Another rank adds the bias.
            w2_bias = torch.zeros(
                layer.num_experts,
                w2[0].shape[0],
                dtype=layer.w13_bias.dtype,
                device=layer.device,
            )
        self._w2_biases = list(w2_bias.detach().unbind(0))
        self._activation = layer.activation_form
        self.experts_min = layer.first_expert
        self.experts_max = layer.first_expert + layer.num_experts - 1

    def forward(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        permuted_weights: bool = True,
        activation: str = "swigluoai",
    ) -> Tensor:
        out: Tensor = torch.ops.hpu.mixture_of_experts.bias_mxfp4_fused_weights(
            hidden_states=hidden_states,
            expert_routing_table=expert_routing_table,
            router_weights=router_weights,
            w12=[weight.blocks.flatten(1) for weight in self._w13],
            w3=[weight.blocks.flatten(1) for weight in self._w2],
            w12_bias=self._w13_biases,
            w3_bias=self._w2_biases,
            d_scale_w12=[weight.scales for weight in self._w13],
            d_scale_w3=[weight.scales for weight in self._w2],
            block_size=MXFP4_BLOCK,
            permuted_weights=permuted_weights,
            experts_min=self.experts_min,
            experts_max=self.experts_max,
            is_fp4=True,
            alpha=self._activation.alpha,
            limit=self._activation.limit,
        )
        return out

"""LinearMethod and MoEMethod: how a linear layer, or the experts of a layer, store and multiply
their weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.shard import Shard
from config.model.decoder_spec import ClampedSwiGLU
from hpu.ops.kernels import MoEImpl
from hpu.quantization.quantized_weight import QuantizedWeight, StackedWeights


class LinearLayer(Protocol):
    """The part of a linear layer that its method uses."""

    dtype: torch.dtype
    device: torch.device
    weight: nn.Parameter | None
    """(out, in) of this rank's shard; None if the weight is quantized or a kernel holds it."""
    quantized_weight: QuantizedWeight | None
    """QuantizedWeight in place of `weight`, if the method uses one."""
    method: "LinearMethod"

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """nn.Module.register_parameter; `param` None removes the parameter."""
        ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


class LinearMethod(Protocol):
    """Method of linear layers. An instance may serve many layers: state of a layer is stored on the
    layer."""

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        """Create on `layer` the parameters of this rank's shard, which loading fills."""
        ...

    def process_weights(self, layer: LinearLayer) -> None:
        """Convert the loaded weights: repack, scale, quantize. Called once, before the first
        `apply`."""
        ...

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply `x` (..., in) by the weight and add `bias`: (..., out)."""
        ...


class ExpertsLayer(Protocol):
    """The part of a layer's stacked experts that their method uses. Each expert is a gated MLP."""

    dtype: torch.dtype
    device: torch.device
    activation: Callable[[Tensor], Tensor]
    """Maps the features (..., 2 * inner) of the first matmul to (..., inner)."""
    activation_form: str | ClampedSwiGLU
    """The checkpoint's name of `activation`, or its clamped SwiGLU."""
    w13_weight: nn.Parameter | None
    """(experts, 2 * inner, hidden) of this rank's shard; None if the weights are quantized or a
    `moe_op` holds them. Gate rows precede up rows, or both are interleaved, in the layout that
    `activation` expects."""
    w2_weight: nn.Parameter | None
    """(experts, hidden, inner) of this rank's shard; None like `w13_weight`."""
    w13_bias: nn.Parameter | None
    """(experts, 2 * inner) of this rank's shard; None if the experts have no bias."""
    num_experts: int
    """Experts on this rank."""
    first_expert: int
    """Id of the first expert on this rank."""
    quantized_weights: StackedWeights | None
    """Quantized replacement of both weights; None if the experts have unquantized weights or a
    `moe_op` that holds its weights."""
    method: "MoEMethod"
    moe_op: MoEImpl | None
    """Kernel that runs in place of `apply`; None: `apply` runs."""

    @property
    def applied_w2_bias(self) -> Tensor | None:
        """(experts, hidden) bias that this rank adds; None if there is no bias to add."""
        ...

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """nn.Module.register_parameter; `param` None removes the parameter."""
        ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


class MoEMethod(Protocol):
    """Method of stacked experts, like LinearMethod. `process_weights` may set the layer's
    moe_op."""

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        """Create on `layer` the parameters of this rank's shard, which loading fills."""
        ...

    def process_weights(self, layer: ExpertsLayer) -> None:
        """Convert the loaded weights. Called once, before the first `apply`."""
        ...

    def apply(self, layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum of the outputs of the experts `ids` (T, k) int64 of each token of `hidden` (T,
        hidden), scaled by `weights` (T, k): (T, hidden). A shard returns its partial sum. The id
        `num_experts` of this rank marks experts of other ranks, which add nothing. Uses plain torch
        operations with static shapes except on a CPU. Not called while the layer has a `moe_op`."""
        ...


@dataclass(frozen=True, slots=True)
class LinearShards:
    """A linear layer of this rank, before it is built."""

    shards: list[Shard]
    """Parts of checkpoint tensors, concatenated along the outputs."""
    in_features: int
    """Inputs on this rank."""
    is_head: bool
    """Whether the layer computes the logits."""


@dataclass(frozen=True, slots=True)
class ExpertsShards:
    """Stacked experts of this rank, before they are built."""

    w13: list[Shard]
    w2: list[Shard]
    hidden_size: int
    """Inputs of `w13` on this rank."""
    inner_size: int
    """Inputs of `w2` on this rank."""
    activation: str
    """See Experts.activation_name."""


class QuantizationScheme(Protocol):
    """Chooses the methods of the linear layers and of the experts of a model."""

    def linear_method(self, weight: LinearShards) -> LinearMethod: ...

    def moe_method(self, experts: ExpertsShards) -> MoEMethod | None:
        """None: this scheme does not support models with experts."""
        ...

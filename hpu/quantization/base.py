"""LinearMethod and MoEMethod: how a linear layer, and the experts of a layer, store and multiply
their weights. One file a kind beside this one; registry.py chooses."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.shard import Shard
from hpu.ops.kernels import MoEImpl
from hpu.quantization.quantized_weight import QuantizedWeight, StackedWeights


class LinearLayer(Protocol):
    """What a linear layer offers to its method."""

    dtype: torch.dtype
    device: torch.device
    weight: nn.Parameter | None
    """(out, in) of this rank's shard; None once it was replaced."""
    quantized_weight: QuantizedWeight | None
    """What replaced it, if anything did."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As that of nn.Module; None: the layer has it no longer."""
        ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


class LinearMethod(Protocol):
    """One instance may serve many layers: what a layer needs is stored on the layer."""

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        """Give `layer` the parameters, of this rank's shard, that loading fills."""
        ...

    def process_weights(self, layer: LinearLayer) -> None:
        """Convert what was loaded: repack, scale, quantize. Once, before the first `apply`."""
        ...

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` (..., in) times the weight, plus `bias`: (..., out). Plain operations of torch, for
        any device; a back end may give the layer a faster kernel."""
        ...


class ExpertsLayer(Protocol):
    """What the stacked experts of a layer offer to their method. Each is a gated MLP."""

    dtype: torch.dtype
    device: torch.device
    activation: Callable[[Tensor], Tensor]
    """(..., 2 * inner) features, as the first product gives them, to (..., inner)."""
    w13_weight: nn.Parameter | None
    """(experts, 2 * inner, hidden) of this rank's shard; None once replaced. Gate is before up, or
    their rows are interleaved: as `activation` takes them."""
    w2_weight: nn.Parameter | None
    """(experts, hidden, inner), likewise."""
    w13_bias: nn.Parameter | None
    """(experts, 2 * inner) of this rank's shard, if there is one."""
    num_experts: int
    """Of this rank."""
    first_expert: int
    """Id of the first one of this rank."""
    quantized_weights: StackedWeights | None
    """What replaced both weights, if the back end multiplies by it."""
    moe_op: MoEImpl | None
    """What runs in place of `apply`, if it is set."""

    @property
    def applied_w2_bias(self) -> Tensor | None:
        """(experts, hidden) that this rank adds, if there is one."""
        ...

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As LinearLayer."""
        ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


class MoEMethod(Protocol):
    """As LinearMethod, for stacked experts. `process_weights` may set the layer's moe_op."""

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        """Give `layer` the parameters, of this rank's shard, that loading fills."""
        ...

    def process_weights(self, layer: ExpertsLayer) -> None:
        """Convert what was loaded. Once, before the first `apply`."""
        ...

    def apply(self, layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum of the experts `ids` (T, k) int64 of each token of `hidden` (T, hidden), weighted
        by `weights` (T, k): (T, hidden). Of a shard the partial sum: the number of this rank's
        experts, as an id, stands for all experts of other ranks, which add nothing. Plain
        operations of torch, for any device, in static shapes but on CPU."""
        ...


class ModelPatcher(Protocol):
    """Replaces modules of a model by others that measure or quantize: the vendor's compressor."""

    @property
    def weight_width(self) -> int:
        """Bytes of a weight that was patched."""
        ...

    def patch(self, model: nn.Module) -> None:
        """Once, when the model is loaded and runs on the device's kernels, and before anything is
        compiled or captured. What it does not replace stays where it is."""
        ...

    def finish(self, model: nn.Module) -> None:
        """Write down what was measured, if anything was. After the last launch."""
        ...

    def quantizes_cache(self, model: nn.Module) -> bool:
        """Whether the KV cache of a patched model holds FP8."""
        ...


class QuantizationScheme(Protocol):
    """Chooses the method of each linear layer of a model."""

    def linear_method(
        self, shards: list[Shard], in_features: int, *, is_head: bool
    ) -> LinearMethod:
        """The method of a layer with `in_features` inputs on this rank whose weight is `shards` of
        the checkpoint's tensors, along the outputs. `is_head`: whether it computes the logits."""
        ...

    def moe_method(
        self,
        w13: list[Shard],
        w2: list[Shard],
        hidden_size: int,
        inner_size: int,
        activation: str,
    ) -> MoEMethod | None:
        """The method of stacked experts whose weights, with `hidden_size` inputs and `inner_size`
        on this rank, are the shards `w13` and `w2`; None: it cannot quantize experts. `activation`:
        as Experts.activation_name."""
        ...

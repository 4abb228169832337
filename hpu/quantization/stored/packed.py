"""PackedLinearMethod and PackedMoEMethod: the integers of a GPTQ, AWQ or compressed-tensors
checkpoint, for kernels that multiply by them as they are."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from config.model.quantization.base import Role
from hpu.model_loader.quantized_weights import from_pairs, to_pairs
from hpu.quantization.base import ExpertsLayer, LinearLayer
from hpu.quantization.quantized_weight import GROUP_SIZE, QuantizedWeight, StackedWeights
from hpu.quantization.stored.weights import (
    W2,
    W13,
    StoredMethod,
    StoredMoEMethod,
    StoredWeight,
    each_expert,
)
from hpu.quantization.unquantized import UNQUANTIZED

OUTPUTS = 16
"""Kernels, ours and torch's, take a multiple of so many."""


class PackedLinearMethod(StoredMethod):
    """A LinearMethod whose weight becomes a QuantizedWeight. Of groups that are not of neighbouring
    inputs, the inputs are reordered; where that gives groups of several sizes, the weight is
    dequantized."""

    def __init__(self, weight: StoredWeight) -> None:
        """Of a weight that `can_pack` accepts."""
        super().__init__(weight)

    def process_weights(self, layer: LinearLayer) -> None:
        parts = self._weight.take_parameters(layer)
        layer.quantized_weight = _quantized(self._weight, parts)
        if layer.quantized_weight is None:
            self._use_dequantized(layer, parts)

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.quantized_weight is None:
            return UNQUANTIZED.apply(layer, x, bias)
        return functional.linear(x, layer.quantized_weight.dequantize(x.dtype), bias)


class PackedMoEMethod(StoredMoEMethod):
    """A MoEMethod whose weights become StackedWeights, each as with PackedLinearMethod; where one
    of them is dequantized, all of the layer are."""

    def process_weights(self, layer: ExpertsLayer) -> None:
        parts, stacks = {}, {}
        for prefix, weight in self._experts.products:
            parts[prefix] = weight.take_parameters(layer, prefix)
            found = [_quantized(weight, own) for own in each_expert(parts[prefix])]
            stacks[prefix] = tuple(one for one in found if one is not None)
        if all(len(stack) == self._experts.num_experts for stack in stacks.values()):
            layer.quantized_weights = StackedWeights(stacks[W13], stacks[W2])
        else:
            self._use_dequantized(layer, parts)


def _quantized(weight: StoredWeight, parts: Mapping[Role, Tensor]) -> QuantizedWeight | None:
    """None: there is no order of the inputs with all groups of one size."""
    scheme = weight.scheme
    values, scales, order = parts["values"], parts["scales"], None
    if "groups" in parts:
        order = order_of_groups(parts["groups"], weight.num_groups)
        if order is None:
            return None
        values = from_pairs(values) if scheme.bits == 4 else values
        values = values.index_select(1, order)
        values = to_pairs(values) if scheme.bits == 4 else values
        order = order.int()
        if (order == torch.arange(len(order))).all():
            order = None
    zeros = parts["zeros"].float() if "zeros" in parts else float(scheme.middle)
    if scheme.bits == 4:
        mins = -zeros * scales
        return QuantizedWeight(4, values, scales, mins, order, in_pairs=True)
    values = (values.short() - scheme.middle).to(torch.int8)
    mins = (scheme.middle - zeros) * scales
    is_per_output = scales.shape[1] == 1 and not mins.any()
    return QuantizedWeight(8, values, scales, None if is_per_output else mins, order)


def can_pack(weight: StoredWeight) -> bool:
    """Whether a QuantizedWeight can have it, in groups of whole blocks of inputs."""
    size, groups = weight.in_features, weight.num_groups
    if weight.scheme.is_float or size % groups or weight.out_features % OUTPUTS:
        return False
    # Of groups in any order a rank has parts of all.
    if weight.scheme.desc_act and size != weight.total_inputs:
        return False
    return size // groups % GROUP_SIZE == 0


def order_of_groups(groups: Tensor, num_groups: int) -> Tensor | None:
    """The inputs (in) int64 sorted by their groups, of which `groups` (outputs, in) has a row for
    each output; None if outputs differ, or groups in size."""
    first = groups[0].long()
    counts = first.bincount(minlength=num_groups)
    if not (groups == groups[0]).all() or not (counts == counts[0]).all():
        return None
    return first.argsort(stable=True)

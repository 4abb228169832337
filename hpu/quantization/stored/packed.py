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
DEQUANTIZED_BITS = 16
"""Of a weight in bfloat16."""


class PackedLinearMethod(StoredMethod):
    """A LinearMethod whose weight becomes a QuantizedWeight. Of groups that are not of neighbouring
    inputs, the inputs are reordered; where ranks divide them, each group is filled up with zeros to
    the size of the largest. Where outputs differ in their groups, or zeros would take more memory
    than the dequantized weight, that is used."""

    def __init__(self, weight: StoredWeight) -> None:
        """Of a weight that `can_pack` accepts."""
        super().__init__(weight)

    def process_weights(self, layer: LinearLayer) -> None:
        parts = self._weight.take_parameters(layer)
        layer.quantized_weight = _quantized(self._weight, parts, group_width(self._weight, parts))
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
            sizes = [group_width(weight, own) for own in each_expert(parts[prefix])]
            # Of the same shape for all.
            width = None if None in sizes else max(filter(None, sizes))
            found = [_quantized(weight, own, width) for own in each_expert(parts[prefix])]
            stacks[prefix] = tuple(one for one in found if one is not None)
        if all(len(stack) == self._experts.num_experts for stack in stacks.values()):
            layer.quantized_weights = StackedWeights(stacks[W13], stacks[W2])
        else:
            self._use_dequantized(layer, parts)


def _quantized(
    weight: StoredWeight, parts: Mapping[Role, Tensor], width: int | None
) -> QuantizedWeight | None:
    """With groups of `width` inputs; None: it is dequantized."""
    if width is None:
        return None
    scheme = weight.scheme
    values, scales = parts["values"], parts["scales"]
    order: Tensor | None = None
    if "groups" in parts:
        inputs = order_of_groups(parts["groups"][0], weight.num_groups, width)
        values = from_pairs(values) if scheme.bits == 4 else values
        # Those that stand for no input are multiplied by zeros.
        values = values.index_select(1, inputs.clamp_min(0))
        values = to_pairs(values) if scheme.bits == 4 else values
        if not inputs.equal(torch.arange(weight.in_features)):
            order = inputs.int()
    zeros = parts["zeros"].float() if "zeros" in parts else float(scheme.middle)
    if scheme.bits == 4:
        mins = -zeros * scales
        return QuantizedWeight(4, values, scales, mins, order, True, weight.in_features)
    values = (values.short() - scheme.middle).to(torch.int8)
    mins = (scheme.middle - zeros) * scales
    is_per_output = scales.shape[1] == 1 and not mins.any()
    return QuantizedWeight(
        8,
        values,
        scales,
        None if is_per_output else mins,
        order,
        layer_inputs=weight.in_features,
    )


def can_pack(weight: StoredWeight) -> bool:
    """Whether a QuantizedWeight can have it, in groups of whole blocks of inputs."""
    size, groups = weight.in_features, weight.num_groups
    if weight.scheme.is_float or weight.out_features % OUTPUTS:
        return False
    # Of groups in any order a rank has parts of all, which are filled up.
    is_part = weight.scheme.desc_act and size != weight.total_inputs
    return is_part or (size % groups == 0 and size // groups % GROUP_SIZE == 0)


def group_width(weight: StoredWeight, parts: Mapping[Role, Tensor]) -> int | None:
    """Inputs of each group of a QuantizedWeight of `parts`; None: there is none, or it would take
    more memory than the dequantized weight."""
    if "groups" not in parts:
        return weight.in_features // weight.num_groups
    groups = parts["groups"]
    if not (groups == groups[0]).all():
        return None
    most = int(groups[0].bincount(minlength=weight.num_groups).max())
    width = -(-most // GROUP_SIZE) * GROUP_SIZE
    num_bits = width * weight.num_groups * weight.scheme.bits
    return width if num_bits <= weight.in_features * DEQUANTIZED_BITS else None


def order_of_groups(groups: Tensor, num_groups: int, width: int) -> Tensor:
    """(num_groups * width) int64: the inputs of one group after the other, in their own order, and
    -1 behind those of each that are fewer than `width`. `groups` (in) has that of each input."""
    inputs = groups.long().argsort(stable=True)
    counts = groups.bincount(minlength=num_groups)
    order = torch.full((num_groups, width), -1)
    order[torch.arange(width) < counts.unsqueeze(1)] = inputs
    return order.flatten()

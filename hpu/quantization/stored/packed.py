"""PackedLinearMethod and PackedMoEMethod: the packed integers of a checkpoint, for kernels that
multiply by the integers directly."""

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
"""Packed kernels (the native kernels and torch's) need a multiple of this number of outputs."""
DEQUANTIZED_BITS = 16
"""Bits per weight in bfloat16."""


class PackedLinearMethod(StoredMethod):
    """LinearMethod whose weight becomes a QuantizedWeight. Inputs are reordered so that the inputs
    of a group are adjacent. If ranks divide groups, each group is padded with inputs of value 0 to
    the size of the largest group, rounded up to GROUP_SIZE. The weight is dequantized instead if
    the outputs differ in their groups, or if the padded weight would take more memory than the
    dequantized weight. The weight must satisfy `can_pack`."""

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
    """MoEMethod whose weights become StackedWeights, each packed as in PackedLinearMethod. If any
    weight has to be dequantized, all weights of the layer are."""

    def process_weights(self, layer: ExpertsLayer) -> None:
        parts, stacks = {}, {}
        for prefix, weight in self._experts.named_weights:
            parts[prefix] = weight.take_parameters(layer, prefix)
            sizes = [group_width(weight, own) for own in each_expert(parts[prefix])]
            # All experts need the same shape.
            width = None if None in sizes else max(filter(None, sizes))
            found = [_quantized(weight, own, width) for own in each_expert(parts[prefix])]
            stacks[prefix] = tuple(weight for weight in found if weight is not None)
        if all(len(stack) == self._experts.num_experts for stack in stacks.values()):
            layer.quantized_weights = StackedWeights(stacks[W13], stacks[W2])
        else:
            self._use_dequantized(layer, parts)


def _quantized(
    weight: StoredWeight, parts: Mapping[Role, Tensor], width: int | None
) -> QuantizedWeight | None:
    """QuantizedWeight with groups of `width` inputs; None: the weight is dequantized."""
    if width is None:
        return None
    scheme = weight.scheme
    values, scales = parts["values"], parts["scales"]
    order: Tensor | None = None
    if "groups" in parts:
        inputs = order_of_groups(parts["groups"][0], weight.num_groups, width)
        values = from_pairs(values) if scheme.bits == 4 else values
        # Padding inputs are multiplied by zeros.
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
    """Whether the number of outputs is a multiple of OUTPUTS, and `weight` fits into a
    QuantizedWeight with groups of whole GROUP_SIZE blocks of inputs."""
    size, groups = weight.in_features, weight.num_groups
    if weight.scheme.is_float or weight.out_features % OUTPUTS:
        return False
    # With groups in arbitrary order a rank has parts of all groups, which are padded.
    is_part = weight.scheme.desc_act and size != weight.total_inputs
    return is_part or (size % groups == 0 and size // groups % GROUP_SIZE == 0)


def group_width(weight: StoredWeight, parts: Mapping[Role, Tensor]) -> int | None:
    """Inputs per group of a QuantizedWeight of `parts`; None if the outputs differ in their groups,
    or if the QuantizedWeight would take more memory than the dequantized weight."""
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
    """(num_groups * width) int64: the inputs of each group in ascending order, group after group,
    each padded with -1 to `width`. `groups` (in) is the group of each input."""
    inputs = groups.long().argsort(stable=True)
    counts = groups.bincount(minlength=num_groups)
    order = torch.full((num_groups, width), -1)
    order[torch.arange(width) < counts.unsqueeze(1)] = inputs
    return order.flatten()

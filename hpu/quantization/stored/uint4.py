"""Uint4LinearMethod and Uint4MoEMethod: 4-bit integers of a checkpoint on Gaudi, dequantized by the
vendor's operator in each launch."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from config.model.quantization.base import Role
from hpu.model_loader.quantized_weights import from_pairs
from hpu.ops.gaudi_modules import MOE_ACTIVATIONS
from hpu.quantization.base import ExpertsLayer, LinearLayer
from hpu.quantization.stored.weights import (
    StoredExperts,
    StoredMethod,
    StoredMoEMethod,
    StoredWeight,
)

PER_INT32 = 8


class Uint4LinearMethod(StoredMethod):
    """LinearMethod with torch.ops.hpu.convert_from_uint4 (HabanaAI/gaudi-pytorch-bridge). Weights
    are int32 (in, out / 8), with the first output in the lowest bits; scales (groups, out); zero
    points int32 (groups, out / 8) in the same packing. All tensors are parameters: constants would
    require a separate recipe for each layer. The weight must satisfy `can_convert`."""

    def process_weights(self, layer: LinearLayer) -> None:
        self._convert(layer, partial(_converted, dtype=layer.dtype))

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.weight is not None:
            weight: Tensor = layer.weight.t()
        else:
            tensors = [layer.get_parameter(name) for name in ("qweight", "scales", "qzeros")]
            # Releases before 1.22 do not have the g_idx argument.
            groups = [layer.get_parameter("g_idx")] if self._weight.scheme.desc_act else []
            weight = torch.ops.hpu.convert_from_uint4(*tensors, x.dtype, *groups)
        out = torch.matmul(x, weight)
        return out if bias is None else out + bias


def _converted(
    weight: StoredWeight, parts: Mapping[Role, Tensor], dtype: torch.dtype
) -> dict[str, Tensor] | None:
    """Operands of the operator from the `parts` of a weight, in order; None if the outputs differ
    in their groups."""
    groups = parts.get("groups")
    if groups is not None and not (groups == groups[0]).all():
        return None
    scales = parts["scales"]
    zeros = parts.get("zeros")
    if zeros is None:
        zeros = torch.full(scales.shape, weight.scheme.middle, dtype=torch.uint8)
    tensors = {
        "qweight": pack_outputs(from_pairs(parts["values"])),
        "scales": scales.t().contiguous().to(dtype),
        "qzeros": pack_outputs(zeros),
    }
    if groups is not None:
        tensors["g_idx"] = groups[0].clone()
    return tensors


class Uint4MoEMethod(StoredMoEMethod):
    """MoEMethod with torch.ops.hpu.convert_from_uint4 for all experts in each launch, and
    mixture_of_experts."""

    def __init__(
        self, experts: StoredExperts, end_slice: Callable[[], None] = lambda: None
    ) -> None:
        """`experts` must satisfy `can_convert_experts`. `end_slice`: see ExpandedExperts."""
        super().__init__(experts)
        self._end_slice = end_slice

    def process_weights(self, layer: ExpertsLayer) -> None:
        if not self._convert(layer, partial(_converted, dtype=layer.dtype)):
            return
        names = ["qweight", "scales", "qzeros"]
        if self._experts.w13.scheme.desc_act:
            names.append("g_idx")
        layer.moe_op = self._experts.expanding_op(
            layer, names, _expand, permuted_weights=False, end_slice=self._end_slice
        )


def _expand(operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Dequantized weight (in, out)."""
    out: Tensor = torch.ops.hpu.convert_from_uint4(*operands[:3], dtype, *operands[3:])
    return out


def can_convert_experts(experts: StoredExperts, *, takes_groups: bool) -> bool:
    """Whether the operator supports all of `experts`; see `can_convert`."""
    both = (experts.w13, experts.w2)
    is_known = experts.activation in MOE_ACTIVATIONS
    return is_known and all(can_convert(experts, takes_groups=takes_groups) for experts in both)


def can_convert(weight: StoredWeight, *, takes_groups: bool) -> bool:
    """Whether the operator supports `weight`. `takes_groups`: the operator accepts a group index
    per input."""
    scheme = weight.scheme
    if scheme.is_float or scheme.bits != 4 or weight.out_features % PER_INT32:
        return False
    if scheme.desc_act and not takes_groups:
        return False
    # The operator needs groups of equal size, even with a group index.
    return weight.in_features % weight.num_groups == 0


def pack_outputs(values: Tensor) -> Tensor:
    """Pack (out, n) uint8 values below 16 to (n, out / 8) int32, with the first output in the
    lowest bits."""
    nibbles = values.t().int().reshape(values.shape[1], -1, PER_INT32)
    # Bitwise or instead of a sum: the highest four bits include the sign.
    packed = torch.zeros_like(nibbles[..., 0])
    for index in range(PER_INT32):
        packed |= nibbles[..., index] << 4 * index
    return packed

"""Int8LinearMethod and Int8MoEMethod: 8-bit integers of a checkpoint on Gaudi, dequantized by
ordinary operators in each launch. The weights take about half of the memory of bfloat16; launches
are not faster."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from config.model.quantization.base import Role
from hpu.ops.expanded_experts import Operands
from hpu.ops.gaudi_modules import MOE_ACTIVATIONS
from hpu.quantization.base import ExpertsLayer, LinearLayer
from hpu.quantization.stored.weights import (
    StoredExperts,
    StoredMethod,
    StoredMoEMethod,
    StoredWeight,
)
from hpu.quantization.unquantized import UNQUANTIZED


class Int8LinearMethod(StoredMethod):
    """LinearMethod with `expand_int8`. All tensors are parameters: constants would require a
    separate recipe for each layer."""

    def __init__(self, weight: StoredWeight) -> None:
        """`weight` must satisfy `can_expand`."""
        super().__init__(weight)
        self._names = _names(weight)

    def process_weights(self, layer: LinearLayer) -> None:
        self._convert(layer, _converted)

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.weight is not None:
            return UNQUANTIZED.apply(layer, x, bias)
        operands = tuple(layer.get_parameter(name) for name in self._names)
        return functional.linear(x, expand_int8(operands, x.dtype, self._names), bias)


class Int8MoEMethod(StoredMoEMethod):
    """MoEMethod with mixture_of_experts that dequantizes the experts in each launch, like
    Int8LinearMethod."""

    def __init__(
        self, experts: StoredExperts, end_slice: Callable[[], None] = lambda: None
    ) -> None:
        """`experts` must satisfy `can_expand_experts`. `end_slice`: see ExpandedExperts."""
        super().__init__(experts)
        self._end_slice = end_slice

    def process_weights(self, layer: ExpertsLayer) -> None:
        if not self._convert(layer, _converted):
            return
        names = _names(self._experts.w13)
        layer.moe_op = self._experts.expanding_op(
            layer,
            list(names),
            partial(expand_int8, names=names),
            permuted_weights=True,
            end_slice=self._end_slice,
        )


def _names(weight: StoredWeight) -> tuple[str, ...]:
    """Names of a layer's parameters, in the order of `expand_int8`."""
    names: tuple[str, ...] = ("qweight", "scales")
    names += ("qzeros",) if weight.has_zeros else ()
    return (*names, "g_idx") if weight.scheme.desc_act else names


def _converted(weight: StoredWeight, parts: Mapping[Role, Tensor]) -> dict[str, Tensor] | None:
    """Parameters from the `parts` of a weight; None if the outputs differ in their groups."""
    groups, middle = parts.get("groups"), weight.scheme.middle
    if groups is not None and not (groups == groups[0]).all():
        return None

    def signed(integers: Tensor) -> Tensor:
        return (integers.short() - middle).to(torch.int8)

    tensors = {"qweight": signed(parts["values"]), "scales": parts["scales"]}
    if "zeros" in parts:
        tensors["qzeros"] = signed(parts["zeros"])
    if groups is not None:
        tensors["g_idx"] = groups[0].clone()
    return tensors


def expand_int8(operands: Operands, dtype: torch.dtype, names: tuple[str, ...]) -> Tensor:
    """Dequantize to (out, in) in `dtype`, rounded once: (int8 values (out, in) - int8 zero points
    (out, groups)) * float32 scales (out, groups). Groups consist of adjacent inputs, unless
    g_idx int32 (in) gives the group of each input. `names`: names of the `operands`."""
    tables = dict(zip(names, operands, strict=True))
    values = tables["qweight"].float()
    shape, groups = values.shape, tables.get("g_idx")

    def spread(table: Tensor) -> Tensor:
        return table.unsqueeze(-1) if groups is None else table.index_select(1, groups)

    if groups is None:
        values = values.view(*tables["scales"].shape, -1)
    if "qzeros" in tables:
        values = values - spread(tables["qzeros"].float())
    return (values * spread(tables["scales"])).view(shape).to(dtype)


def can_expand(weight: StoredWeight) -> bool:
    """Whether `weight` has 8-bit integers, in groups of equal size or with the group of each
    input."""
    scheme = weight.scheme
    if scheme.is_float or scheme.bits != 8:
        return False
    return scheme.desc_act or weight.in_features % weight.num_groups == 0


def can_expand_experts(experts: StoredExperts) -> bool:
    """Whether `can_expand` holds for both weights of `experts`, and the card's kernel supports
    their activation."""
    is_known = experts.activation in MOE_ACTIVATIONS
    return is_known and can_expand(experts.w13) and can_expand(experts.w2)

"""Int8LinearMethod and Int8MoEMethod: 8-bit integers of a checkpoint on Gaudi, expanded by ordinary
operators in each launch. They take half of the memory of bfloat16, and no less time."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
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
    each_expert,
)
from hpu.quantization.unquantized import UNQUANTIZED


class Int8LinearMethod(StoredMethod):
    """A LinearMethod of `expand_int8`. All tensors are parameters: constants would make each layer
    a recipe of its own."""

    def __init__(self, weight: StoredWeight) -> None:
        """Of a weight that `can_expand` accepts."""
        super().__init__(weight)
        self._names = _names(weight)

    def process_weights(self, layer: LinearLayer) -> None:
        parts = self._weight.take_parameters(layer)
        tensors = _converted(self._weight, parts)
        if tensors is None:
            self._use_dequantized(layer, parts)
            return
        for name, tensor in tensors.items():
            on_device = tensor.to(layer.device)
            layer.register_parameter(name, nn.Parameter(on_device, requires_grad=False))

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.weight is not None:
            return UNQUANTIZED.apply(layer, x, bias)
        operands = tuple(layer.get_parameter(name) for name in self._names)
        return functional.linear(x, expand_int8(operands, x.dtype, self._names), bias)


class Int8MoEMethod(StoredMoEMethod):
    """As Int8LinearMethod, of experts: a MoEMethod of mixture_of_experts."""

    def __init__(
        self, experts: StoredExperts, end_slice: Callable[[], None] = lambda: None
    ) -> None:
        """Of experts that `can_expand_experts` accepts. `end_slice`: as that of ExpandedExperts."""
        super().__init__(experts)
        self._end_slice = end_slice

    def process_weights(self, layer: ExpertsLayer) -> None:
        products = self._experts.products
        parts = {prefix: weight.take_parameters(layer, prefix) for prefix, weight in products}
        tensors: dict[str, list[Tensor]] = {}
        for prefix, weight in products:
            for own in each_expert(parts[prefix]):
                converted = _converted(weight, own)
                if converted is None:
                    self._use_dequantized(layer, parts)
                    return
                for name, tensor in converted.items():
                    tensors.setdefault(prefix + name, []).append(tensor)
        del parts
        for name in list(tensors):
            on_device = torch.stack(tensors.pop(name)).to(layer.device)
            layer.register_parameter(name, nn.Parameter(on_device, requires_grad=False))
        names = _names(self._experts.w13)
        layer.moe_op = self._experts.expanding_op(
            layer,
            list(names),
            partial(expand_int8, names=names),
            permuted_weights=True,
            end_slice=self._end_slice,
        )


def _names(weight: StoredWeight) -> tuple[str, ...]:
    """Of the parameters of a layer, as `expand_int8` takes them."""
    names: tuple[str, ...] = ("qweight", "scales")
    names += ("qzeros",) if weight.has_zeros else ()
    return (*names, "g_idx") if weight.scheme.desc_act else names


def _converted(weight: StoredWeight, parts: Mapping[Role, Tensor]) -> dict[str, Tensor] | None:
    """The parameters, from `parts` of a weight; None if the outputs differ in their groups."""
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
    """(out, in) in `dtype`, rounded once: int8 (out, in), less int8 zero points (out, groups),
    times float32 scales (out, groups), in groups of neighbouring inputs, or of those that int32
    (in) says. `names`: which of them `operands` are."""
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
    """Whether it is of 8-bit integers, of which this rank has whole groups of inputs, or knows the
    group of each input."""
    scheme = weight.scheme
    if scheme.is_float or scheme.bits != 8:
        return False
    return scheme.desc_act or weight.in_features % weight.num_groups == 0


def can_expand_experts(experts: StoredExperts) -> bool:
    """As `can_expand`, of all experts."""
    is_known = experts.activation in MOE_ACTIVATIONS
    return is_known and can_expand(experts.w13) and can_expand(experts.w2)

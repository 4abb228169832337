"""StoredWeight: the quantized weight of a linear layer as a checkpoint has it, and its parameters
while it is loaded; StoredExperts, likewise, of stacked experts."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from config.model.quantization.base import PARAMETERS, Role, WeightScheme
from hpu.model_loader.quantized_weights import dequantize, from_pairs
from hpu.model_loader.size_estimate import expanded_experts
from hpu.ops.expanded_experts import Expand, ExpandedExperts, Operands
from hpu.quantization.base import ExpertsLayer, LinearLayer
from hpu.quantization.unquantized import UNQUANTIZED_MOE

W13, W2 = "w13_", "w2_"
"""Of stacked experts, before the names of the parameters of their two products."""


class StoringLayer(Protocol):
    """What a layer offers to a StoredWeight."""

    device: torch.device

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The weight of a linear layer on this rank, as a checkpoint has it quantized."""

    scheme: WeightScheme
    in_features: int
    out_features: int
    total_inputs: int
    """Over all ranks."""
    output_sizes: tuple[int, ...]
    """Of the outputs that were quantized one by one, such as queries, keys and values."""

    @property
    def num_groups(self) -> int:
        """Of the scales that this rank loads: of the size of the scheme, or smaller ones where the
        rank's inputs begin or end within one."""
        if self.scheme.group_size is None:
            return 1
        if self.scheme.desc_act:
            return self.scheme.num_groups(self.total_inputs)
        return self.in_features // math.gcd(self.scheme.group_size, self.in_features)

    @property
    def has_zeros(self) -> bool:
        """Whether zero points are stored."""
        return any(part.role == "zeros" for part in self.scheme.parts)

    def create_parameters(
        self, layer: StoringLayer, prefix: str = "", num_experts: int | None = None
    ) -> None:
        """Give `layer` the parameters that loading fills, in host memory: what `unpack_part` gives,
        4-bit values in pairs; of `num_experts` that are stacked. `prefix`: of their names."""
        device = torch.device("meta" if layer.device.type == "meta" else "cpu")
        out, size, groups = self.out_features, self.in_features, self.num_groups
        is_paired = self.scheme.bits == 4
        values = torch.float8_e4m3fn if self.scheme.is_float else torch.uint8
        shapes: dict[Role, tuple[tuple[int, int], torch.dtype]] = {
            "values": ((out, size // 2 if is_paired else size), values),
            "scales": ((out, groups), torch.float32),
            "zeros": ((out, groups), torch.uint8),
            "groups": ((len(self.output_sizes), size), torch.int32),
            "input_scale": ((out, 1), torch.float32),
        }
        for part in self.scheme.parts:
            if part.role in shapes:
                shape, dtype = shapes[part.role]
                stacked = shape if num_experts is None else (num_experts, *shape)
                empty = torch.empty(stacked, dtype=dtype, device=device)
                parameter = nn.Parameter(empty, requires_grad=False)
                layer.register_parameter(prefix + PARAMETERS[part.role], parameter)

    def take_parameters(self, layer: StoringLayer, prefix: str = "") -> dict[Role, Tensor]:
        """Those of `create_parameters`, which `layer` has no longer."""
        taken: dict[Role, Tensor] = {}
        for part in self.scheme.parts:
            if part.role in PARAMETERS:
                name = prefix + PARAMETERS[part.role]
                taken[part.role] = layer.get_parameter(name).detach()
                layer.register_parameter(name, None)
        return taken

    def dequantize(self, parts: Mapping[Role, Tensor]) -> Tensor:
        """(out, in) float32 of `take_parameters`."""
        plain = dict(parts)
        if self.scheme.bits == 4:
            plain["values"] = from_pairs(parts["values"])
        if "groups" not in plain:
            return dequantize(plain, self.scheme)
        groups = plain.pop("groups").long()
        outputs = [
            dict(zip(plain, tensors, strict=True))
            for tensors in zip(
                *(tensor.split_with_sizes(self.output_sizes) for tensor in plain.values()),
                strict=True,
            )
        ]
        return torch.cat(
            [
                dequantize({**one, "groups": own}, self.scheme)
                for one, own in zip(outputs, groups, strict=True)
            ]
        )


class StoredMethod:
    """What the methods for StoredWeight share: how a layer gets the parameters that loading fills,
    and a weight that is not multiplied as it is."""

    def __init__(self, weight: StoredWeight) -> None:
        self._weight = weight

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        layer.weight = None
        self._weight.create_parameters(layer)

    def _use_dequantized(self, layer: LinearLayer, parts: Mapping[Role, Tensor]) -> None:
        """Let `layer` have the weight of `parts` in its own dtype."""
        plain = self._weight.dequantize(parts).to(layer.dtype)
        layer.weight = nn.Parameter(plain.to(layer.device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The weights of a layer's stacked experts on this rank, as a checkpoint has them quantized.
    Each is a StoredWeight of its own; all have the same shapes and scheme."""

    w13: StoredWeight
    """Gate and up."""
    w2: StoredWeight
    """Down."""
    num_experts: int
    activation: str
    """As Experts.activation_name."""

    @property
    def products(self) -> tuple[tuple[str, StoredWeight], ...]:
        """With the prefixes of their parameters."""
        return ((W13, self.w13), (W2, self.w2))

    def expanding_op(
        self,
        layer: ExpertsLayer,
        names: list[str],
        expand: Expand,
        *,
        permuted_weights: bool,
        end_slice: Callable[[], None],
    ) -> ExpandedExperts:
        """Of the parameters `names` of both products, stacked, which `layer` has."""

        def operands(prefix: str) -> list[Operands]:
            stacked = (layer.get_parameter(prefix + name).detach().unbind(0) for name in names)
            return list(zip(*stacked, strict=True))

        numbers = sum(weight.in_features * weight.out_features for _, weight in self.products)
        return ExpandedExperts(
            operands(W13),
            operands(W2),
            expand,
            permuted_weights=permuted_weights,
            step=expanded_experts(numbers * layer.dtype.itemsize),
            first_expert=layer.first_expert,
            end_slice=end_slice,
        )


class StoredMoEMethod:
    """What the methods for StoredExperts share. Experts that are not multiplied as they are have
    weights in the layer's dtype, as UNQUANTIZED_MOE takes them."""

    def __init__(self, experts: StoredExperts) -> None:
        self._experts = experts

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        layer.w13_weight = layer.w2_weight = None
        for prefix, weight in self._experts.products:
            weight.create_parameters(layer, prefix, num_experts)

    def apply(self, layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return UNQUANTIZED_MOE.apply(layer, hidden, ids, weights)

    def _use_dequantized(
        self, layer: ExpertsLayer, parts: Mapping[str, Mapping[Role, Tensor]]
    ) -> None:
        """Let `layer` have the weights of `parts` (prefix: those of take_parameters)."""
        plain = {}
        for prefix, weight in self._experts.products:
            count = self._experts.num_experts
            shape = (count, weight.out_features, weight.in_features)
            stacked = torch.empty(shape, dtype=layer.dtype)
            for target, own in zip(stacked, each_expert(parts[prefix]), strict=True):
                target.copy_(weight.dequantize(own))
            plain[prefix] = nn.Parameter(stacked.to(layer.device), requires_grad=False)
        layer.w13_weight, layer.w2_weight = plain[W13], plain[W2]


def each_expert(parts: Mapping[Role, Tensor]) -> Iterator[dict[Role, Tensor]]:
    """The tensors of one expert after the other, of stacked ones."""
    for tensors in zip(*parts.values(), strict=True):
        yield dict(zip(parts, tensors, strict=True))

"""StoredWeight: the quantized weight of a linear layer or an expert in its checkpoint form, and its
parameters during loading. StoredExperts: the quantized weights of stacked experts."""

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
"""Parameter name prefixes of the two weights of stacked experts."""


class ParameterLayer(Protocol):
    """The part of a layer that a StoredWeight uses."""

    device: torch.device

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The weight of a linear layer, or a weight of each stacked expert, on this rank, in the
    quantized form of the checkpoint."""

    scheme: WeightScheme
    in_features: int
    out_features: int
    total_inputs: int
    """Inputs over all ranks."""
    output_sizes: tuple[int, ...]
    """Sizes of the separately quantized outputs, such as queries, keys and values."""

    @property
    def num_groups(self) -> int:
        """Groups of the scales that this rank loads. Groups have the scheme's size, or a smaller
        size if the rank's inputs begin or end within a group."""
        if self.scheme.group_size is None:
            return 1
        if self.scheme.desc_act:
            return self.scheme.num_groups(self.total_inputs)
        return self.in_features // math.gcd(self.scheme.group_size, self.in_features)

    @property
    def has_zeros(self) -> bool:
        return any(part.role == "zeros" for part in self.scheme.parts)

    def create_parameters(
        self, layer: ParameterLayer, prefix: str = "", num_experts: int | None = None
    ) -> None:
        """Register on `layer` the parameters that loading fills, in host memory (without memory
        for a layer on the meta device), in the layout of `unpack_part`, but with 4-bit values in
        pairs, and with `groups` (len(output_sizes), in) int32. `num_experts`: stack the parameters
        of this many experts. `prefix`: prefix of the parameter names."""
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

    def take_parameters(self, layer: ParameterLayer, prefix: str = "") -> dict[Role, Tensor]:
        """Remove the parameters of `create_parameters` from `layer` and return them."""
        taken: dict[Role, Tensor] = {}
        for part in self.scheme.parts:
            if part.role in PARAMETERS:
                name = prefix + PARAMETERS[part.role]
                taken[part.role] = layer.get_parameter(name).detach()
                layer.register_parameter(name, None)
        return taken

    def dequantize(self, parts: Mapping[Role, Tensor]) -> Tensor:
        """(out, in) float32 from the result of `take_parameters`."""
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
                dequantize({**output, "groups": own}, self.scheme)
                for output, own in zip(outputs, groups, strict=True)
            ]
        )


Convert = Callable[[StoredWeight, Mapping[Role, Tensor]], dict[str, Tensor] | None]
"""(weight, its parts) -> parameters of a layer by name; None if the weight must be dequantized."""


def register(layer: ParameterLayer, tensors: Mapping[str, Tensor]) -> None:
    """Register `tensors` as parameters of `layer`, on its device."""
    for name, tensor in tensors.items():
        parameter = nn.Parameter(tensor.to(layer.device), requires_grad=False)
        layer.register_parameter(name, parameter)


class StoredMethod:
    """Base class of the methods for StoredWeight: creates the parameters that loading fills, and
    handles weights that have to be dequantized."""

    def __init__(self, weight: StoredWeight) -> None:
        self._weight = weight

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        layer.weight = None
        self._weight.create_parameters(layer)

    def _convert(self, layer: LinearLayer, convert: Convert) -> None:
        """Replace the parameters by the result of `convert` for the weight's parts. Dequantize the
        weight if the result is None."""
        parts = self._weight.take_parameters(layer)
        tensors = convert(self._weight, parts)
        if tensors is None:
            self._use_dequantized(layer, parts)
        else:
            register(layer, tensors)

    def _use_dequantized(self, layer: LinearLayer, parts: Mapping[Role, Tensor]) -> None:
        """Set the weight of `layer` to the dequantized `parts`, in the layer's dtype."""
        plain = self._weight.dequantize(parts).to(layer.dtype)
        layer.weight = nn.Parameter(plain.to(layer.device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Weights of a layer's stacked experts on this rank, in the quantized form of the checkpoint.
    All experts have the same shapes and scheme."""

    w13: StoredWeight
    """Gate and up projections."""
    w2: StoredWeight
    """Down projection."""
    num_experts: int
    activation: str
    """See Experts.activation_name."""

    @property
    def named_weights(self) -> tuple[tuple[str, StoredWeight], ...]:
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
        """Op over the stacked parameters `names` of both weights of `layer`."""

        def operands(prefix: str) -> list[Operands]:
            stacked = (layer.get_parameter(prefix + name).detach().unbind(0) for name in names)
            return list(zip(*stacked, strict=True))

        numbers = sum(weight.in_features * weight.out_features for _, weight in self.named_weights)
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
    """Base class of the methods for StoredExperts. Experts that have to be dequantized get weights
    in the layer's dtype, in the layout of UNQUANTIZED_MOE."""

    def __init__(self, experts: StoredExperts) -> None:
        self._experts = experts

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        layer.w13_weight = layer.w2_weight = None
        for prefix, weight in self._experts.named_weights:
            weight.create_parameters(layer, prefix, num_experts)

    def apply(self, layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return UNQUANTIZED_MOE.apply(layer, hidden, ids, weights)

    def _convert(self, layer: ExpertsLayer, convert: Convert) -> bool:
        """Replace the parameters by the stacked results of `convert` for the parts of each expert.
        Dequantize all experts, and return False, if a result is None."""
        named_weights = self._experts.named_weights
        parts = {prefix: weight.take_parameters(layer, prefix) for prefix, weight in named_weights}
        tensors: dict[str, list[Tensor]] = {}
        for prefix, weight in named_weights:
            for own in each_expert(parts[prefix]):
                converted = convert(weight, own)
                if converted is None:
                    self._use_dequantized(layer, parts)
                    return False
                for name, tensor in converted.items():
                    tensors.setdefault(prefix + name, []).append(tensor)
        del parts
        for name in list(tensors):
            register(layer, {name: torch.stack(tensors.pop(name))})
        return True

    def _use_dequantized(
        self, layer: ExpertsLayer, parts: Mapping[str, Mapping[Role, Tensor]]
    ) -> None:
        """Set the weights of `layer` to the dequantized `parts` (by prefix, from
        take_parameters)."""
        plain = {}
        for prefix, weight in self._experts.named_weights:
            count = self._experts.num_experts
            shape = (count, weight.out_features, weight.in_features)
            stacked = torch.empty(shape, dtype=layer.dtype)
            for target, own in zip(stacked, each_expert(parts[prefix]), strict=True):
                target.copy_(weight.dequantize(own))
            plain[prefix] = nn.Parameter(stacked.to(layer.device), requires_grad=False)
        layer.w13_weight, layer.w2_weight = plain[W13], plain[W2]


def each_expert(parts: Mapping[Role, Tensor]) -> Iterator[dict[Role, Tensor]]:
    """Split stacked tensors into the tensors of each expert, in order."""
    for tensors in zip(*parts.values(), strict=True):
        yield dict(zip(parts, tensors, strict=True))

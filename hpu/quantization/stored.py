"""StoredWeight: the quantized weight of a linear layer as a checkpoint has it, and its parameters
while it is loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config.model.quantization.base import PARAMETERS, Role, WeightScheme
from hpu.model_loader.quantized_weights import dequantize, from_pairs
from hpu.quantization.base import LinearLayer


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

    def create_parameters(self, layer: LinearLayer) -> None:
        """Give `layer` the parameters that loading fills, in host memory: what `unpack_part` gives,
        4-bit values in pairs."""
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
                empty = torch.empty(shape, dtype=dtype, device=device)
                parameter = nn.Parameter(empty, requires_grad=False)
                layer.register_parameter(PARAMETERS[part.role], parameter)

    def take_parameters(self, layer: LinearLayer) -> dict[Role, Tensor]:
        """Those of `create_parameters`, which `layer` has no longer."""
        taken: dict[Role, Tensor] = {}
        for part in self.scheme.parts:
            if part.role in PARAMETERS:
                name = PARAMETERS[part.role]
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

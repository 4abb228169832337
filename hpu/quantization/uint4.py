"""Uint4LinearMethod: 4-bit integers of a checkpoint on Gaudi, expanded by the vendor's operator in
each launch."""

import torch
from torch import Tensor, nn

from hpu.model_loader.quantized_weights import from_pairs
from hpu.quantization.base import LinearLayer
from hpu.quantization.stored import StoredMethod, StoredWeight

PER_INT32 = 8


class Uint4LinearMethod(StoredMethod):
    """A LinearMethod of torch.ops.hpu.convert_from_uint4 (HabanaAI/gaudi-pytorch-bridge): weights
    are int32 (in, out / 8), the first output in the lowest bits; scales (groups, out); zero points
    int32 (groups, out / 8) alike. All are parameters: constants would make each layer a recipe of
    its own."""

    def __init__(self, weight: StoredWeight) -> None:
        """Of a weight that `can_convert` accepts."""
        super().__init__(weight)

    def process_weights(self, layer: LinearLayer) -> None:
        parts = self._weight.take_parameters(layer)
        groups = parts.get("groups")
        if groups is not None and not (groups == groups[0]).all():
            self._use_dequantized(layer, parts)
            return
        scales = parts["scales"]
        zeros = parts.get("zeros")
        if zeros is None:
            zeros = torch.full(scales.shape, self._weight.scheme.middle, dtype=torch.uint8)
        tensors = {
            "qweight": pack_outputs(from_pairs(parts["values"])),
            "scales": scales.t().contiguous().to(layer.dtype),
            "qzeros": pack_outputs(zeros),
        }
        if groups is not None:
            tensors["g_idx"] = groups[0].clone()
        for name, tensor in tensors.items():
            on_device = tensor.to(layer.device)
            layer.register_parameter(name, nn.Parameter(on_device, requires_grad=False))

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.weight is not None:
            weight: Tensor = layer.weight.t()
        else:
            tensors = [layer.get_parameter(name) for name in ("qweight", "scales", "qzeros")]
            # Releases before 1.22 have no such argument.
            groups = [layer.get_parameter("g_idx")] if self._weight.scheme.desc_act else []
            weight = torch.ops.hpu.convert_from_uint4(*tensors, x.dtype, *groups)
        out = torch.matmul(x, weight)
        return out if bias is None else out + bias


def can_convert(weight: StoredWeight, *, takes_groups: bool) -> bool:
    """Whether the operator takes it. `takes_groups`: it can be told the group of each input."""
    scheme = weight.scheme
    if scheme.is_float or scheme.bits != 4 or weight.out_features % PER_INT32:
        return False
    if scheme.desc_act:
        return takes_groups
    return weight.in_features % weight.num_groups == 0


def pack_outputs(values: Tensor) -> Tensor:
    """(out, n) uint8 below 16 to (n, out / 8) int32, the first output in the lowest bits."""
    nibbles = values.t().int().reshape(values.shape[1], -1, PER_INT32)
    # Not a sum: the highest four bits have the sign.
    packed = torch.zeros_like(nibbles[..., 0])
    for index in range(PER_INT32):
        packed |= nibbles[..., index] << 4 * index
    return packed

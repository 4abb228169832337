"""WeightOnlyLinearMethod: a weight that is quantized after loading and multiplied by activations in
the model's dtype. quantize_int8 and quantize_int4: the quantizations to 8 and to 4 bits."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hpu.model_loader.quantized_weights import nonzero
from hpu.quantization.base import LinearLayer
from hpu.quantization.quantized_weight import GROUP_SIZE, QuantizedWeight
from hpu.quantization.unquantized import UNQUANTIZED

Quantize = Callable[[Tensor], QuantizedWeight | None]


class WeightOnlyLinearMethod:
    """LinearMethod whose `quantize` converts the loaded weight (out, in), or returns None to keep
    the weight in the model's dtype."""

    def __init__(self, quantize: Quantize) -> None:
        self._quantize = quantize

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        UNQUANTIZED.create_weights(layer, in_features, out_features)

    def process_weights(self, layer: LinearLayer) -> None:
        assert layer.weight is not None
        layer.quantized_weight = self._quantize(layer.weight.detach())
        if layer.quantized_weight is not None:
            layer.weight = None

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.quantized_weight is None:
            return UNQUANTIZED.apply(layer, x, bias)
        return functional.linear(x, layer.quantized_weight.dequantize(x.dtype), bias)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Quantize `weight` (out, in) to integers -127 .. 127 times the float32 scale of the output."""
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / nonzero(scales)).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(8, values, scales)


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """Quantize `weight` (out, in) to the nearest of 16 steps between the minimum and the maximum of
    each group, with a float16 scale and minimum per group. Raises ValueError if `in` is not a
    multiple of GROUP_SIZE."""
    out, size = weight.shape
    if size % GROUP_SIZE:
        raise ValueError(f"in_features is {size}, it must be a multiple of {GROUP_SIZE}")
    groups = weight.float().view(out, size // GROUP_SIZE, GROUP_SIZE)
    low, high = groups.aminmax(dim=-1)
    scales, mins = ((high - low) / 15).half(), low.half()
    values = (groups - mins.float().unsqueeze(-1)) / nonzero(scales.float()).unsqueeze(-1)
    values = values.round_().clamp_(0, 15).to(torch.uint8).view(out, size)
    return QuantizedWeight(4, values, scales, mins)

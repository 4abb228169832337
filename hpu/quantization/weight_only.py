"""WeightOnlyLinearMethod: a weight that is quantized after loading and multiplied by activations in
the model's dtype."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from hpu.quantization.base import LinearLayer
from hpu.quantization.quantized_weight import QuantizedWeight
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

"""UnquantizedLinearMethod: the weight in the model's dtype, as it was loaded."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.quantization.base import LinearLayer


class UnquantizedLinearMethod:
    """A LinearMethod without conversion."""

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        empty = torch.empty(out_features, in_features, dtype=layer.dtype, device=layer.device)
        layer.weight = nn.Parameter(empty, requires_grad=False)

    def process_weights(self, layer: LinearLayer) -> None:
        return

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        assert layer.weight is not None
        return functional.linear(x, layer.weight, bias)


UNQUANTIZED = UnquantizedLinearMethod()

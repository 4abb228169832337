"""8-bit quantization: symmetric, with a float32 scale per output."""

import torch
from torch import Tensor

from hpu.quantization.quantized_weight import QuantizedWeight, nonzero


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Quantize `weight` (out, in) to integers -127 .. 127 times the scale of the output."""
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / nonzero(scales)).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(8, values, scales)

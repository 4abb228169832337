"""4-bit quantization: asymmetric, with a float16 scale and minimum per group of inputs."""

import torch
from torch import Tensor

from hpu.quantization.quantized_weight import GROUP_SIZE, QuantizedWeight, nonzero


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """Quantize `weight` (out, in) to the nearest of 16 steps between the minimum and the maximum of
    each group; `in` must be a multiple of GROUP_SIZE."""
    out, size = weight.shape
    if size % GROUP_SIZE:
        raise ValueError(f"in is {size}, it must be a multiple of {GROUP_SIZE}")
    groups = weight.float().view(out, size // GROUP_SIZE, GROUP_SIZE)
    low, high = groups.aminmax(dim=-1)
    scales, mins = ((high - low) / 15).half(), low.half()
    values = (groups - mins.float().unsqueeze(-1)) / nonzero(scales.float()).unsqueeze(-1)
    values = values.round_().clamp_(0, 15).to(torch.uint8).view(out, size)
    return QuantizedWeight(4, values, scales, mins)

"""MXFP4 weights: 4-bit floats (e2m1) in blocks of 32 with a power-of-two scale per block (e8m0),
after OCP Microscaling Formats, version 1.0, in the layout of the gpt-oss checkpoints."""

import torch
from torch import Tensor

from hpu.model_loader.quantized_weights import POWER_BIAS

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each e2m1 code."""


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize to (rows, columns) bfloat16, which represents the values exactly. `blocks` (rows,
    columns / 32, 16) uint8: two codes per byte, the first code in the low half; `scales` (rows,
    columns / 32) uint8."""
    # Both values of a byte come from a single table lookup.
    pairs = torch.tensor([(low, high) for high in E2M1 for low in E2M1], dtype=torch.bfloat16)
    values = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - POWER_BIAS).flatten(-2)

"""MXFP4 weights: 4-bit floats (e2m1) in blocks of 32 with one power of two each (e8m0). OCP
Microscaling Formats, version 1.0; the layout is that of the gpt-oss checkpoints."""

import torch
from torch import Tensor

from config.errors import CheckpointError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code."""

BIAS = 127
"""Of the exponents."""


NAN_POWER = 255
"""Of e8m0: not a number."""


def check_powers(scales: Tensor, where: str) -> None:
    """Raise CheckpointError for `scales` that no tool writes. `where` names them and their file."""
    if count := int((scales == NAN_POWER).sum()):
        raise CheckpointError(f"{where} has {count} of {scales.numel()} scales that are NaN")


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """(rows, columns) bfloat16, which holds the values exactly. `blocks` (rows, columns / 32, 16)
    uint8: two codes in a byte, the first one in its low half; `scales` (rows, columns / 32)
    uint8."""
    # Both values of each byte are looked up at once.
    pairs = torch.tensor([(low, high) for high in E2M1 for low in E2M1], dtype=torch.bfloat16)
    values = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - BIAS).flatten(-2)

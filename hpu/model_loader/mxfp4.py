"""MXFP4 weights: 4-bit floats (e2m1) in blocks of 32 with a power-of-two scale per block (e8m0),
after OCP Microscaling Formats, version 1.0, in the layout of the gpt-oss checkpoints; and e8m0
scales of other formats."""

import torch
from torch import Tensor

from config.errors import CheckpointError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each e2m1 code."""

BIAS = 127
"""Bias of the e8m0 exponents."""


NAN_POWER = 255
"""e8m0 code for NaN."""


def check_powers(scales: Tensor, where: str) -> None:
    """Raise CheckpointError for NaN `scales`, which no tool writes. `where` names the tensor and
    its file."""
    if count := int((scales == NAN_POWER).sum()):
        raise CheckpointError(f"{where} has {count} of {scales.numel()} scales that are NaN")


def decode_powers(scales: Tensor) -> Tensor:
    """The float32 powers of two for e8m0 `scales` (uint8)."""
    return torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize to (rows, columns) bfloat16, which represents the values exactly. `blocks` (rows,
    columns / 32, 16) uint8: two codes per byte, the first code in the low half; `scales` (rows,
    columns / 32) uint8."""
    # Both values of a byte come from a single table lookup.
    pairs = torch.tensor([(low, high) for high in E2M1 for low in E2M1], dtype=torch.bfloat16)
    values = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - BIAS).flatten(-2)

"""RMS normalisation, alone and joined with the residual sum before it. Knows no layers."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`hidden` (..., size) scaled to a root mean square of 1, times `weight` (size) if given."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float
) -> tuple[Tensor, Tensor]:
    """(normed, sum) of `residual + multiplier * delta`, all (..., size)."""
    total = torch.add(residual, delta, alpha=multiplier)
    return rms_norm(total, weight, eps), total

"""RMS norm: the plain form, and a form for few rows on a CPU."""

from torch import Tensor
from torch.nn import functional


def rms_norm(hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm of `hidden` (..., size), times `weight` (size) if given."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def mirrored_rms_norm(hidden: Tensor, signs: Tensor, weights: Tensor, eps: float) -> Tensor:
    """`rms_norm` of `hidden` (..., size), computed as the layer norm of (x, -x), whose mean is 0.

    `signs` is ((1,), (-1,)), and `weights` (2, size) holds the weight twice. On a CPU a layer norm
    is a single kernel and an RMS norm is nine small kernels: this form takes half the time for a
    single row, and longer for many rows.
    """
    mirrored = hidden.unsqueeze(-2) * signs
    normed = functional.layer_norm(mirrored, tuple(weights.shape), weights, None, eps)
    return normed.select(-2, 0)

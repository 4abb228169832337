"""RMS normalisation, plain and for a few rows on a CPU. Knows no layers."""

from torch import Tensor
from torch.nn import functional


def rms_norm(hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`hidden` (..., size) scaled to a root mean square of 1, times `weight` (size) if given."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def mirrored_rms_norm(hidden: Tensor, signs: Tensor, weights: Tensor, eps: float) -> Tensor:
    """`rms_norm` of `hidden` as the layer norm of (x, -x), whose mean is 0.

    `signs` is ((1,), (-1,)) and `weights` (2, size) holds the weight twice. CPUs have one kernel
    for a layer norm and nine small ones for an RMS norm: half the time for one row, more for many.
    """
    mirrored = hidden.unsqueeze(-2) * signs
    normed = functional.layer_norm(mirrored, tuple(weights.shape), weights, None, eps)
    return normed.select(-2, 0)

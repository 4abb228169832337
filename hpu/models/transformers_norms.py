"""Replaces transformers' RMS norms with our RMS norm, which devices have kernels for."""

import copy
from typing import Any

import torch
from torch import nn

from hpu.layers.norm import RMSNorm
from hpu.ops.norm import rms_norm

TOLERANCE = 1e-5


def replace_norms(causal: Any) -> None:
    """Replace the RMS norms of `causal`, a PreTrainedModel on the meta device. Each model family
    has its own class, so candidates are found by class name and compared with our norm on random
    numbers. Norms that differ are not replaced."""
    compared: dict[tuple[type, int, float], bool] = {}
    for path, module in list(causal.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        tensors = [*module.named_parameters(), *module.named_buffers()]
        if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float):
            continue
        if [(name, tensor.dim()) for name, tensor in tensors] != [("weight", 1)]:
            continue
        weight: Any = module.weight
        key = type(module), weight.shape[0], eps
        if key not in compared:
            compared[key] = _is_ours(module, eps)
        if compared[key]:
            norm = RMSNorm(weight.shape[0], eps, dtype=weight.dtype, device=weight.device)
            norm.weight = weight
            parent, _, name = path.rpartition(".")
            setattr(causal.get_submodule(parent), name, norm)


def _is_ours(module: nn.Module, eps: float) -> bool:
    random = torch.Generator().manual_seed(0)
    theirs: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    weight = torch.randn(theirs.weight.shape, generator=random)
    theirs.weight = nn.Parameter(weight, requires_grad=False)
    # Small numbers, so that a different use of epsilon shows.
    hidden = torch.randn(2, 3, weight.shape[0], generator=random) * 10 * eps**0.5
    try:
        found = theirs(hidden)
    except TypeError:
        # The module takes more arguments than hidden states.
        return False
    return torch.allclose(found, rms_norm(hidden, weight, eps), TOLERANCE, TOLERANCE)

"""Replaces parts of transformers' models with our versions: RMS norms, and the sparse activation of
Gemma 3n."""

import copy
import functools
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.layers.norm import RMSNorm
from hpu.models.transformers_attention import UnsupportedModelCode
from hpu.ops.norm import rms_norm

METHOD = "_gaussian_topk"
TOLERANCE = 1e-5


def replace_norms(causal: Any) -> None:
    """Replace the RMS norms of `causal`, a PreTrainedModel on the meta device, with our RMS norm,
    which devices have kernels for. Each model family has its own class, so candidates are found by
    class name and compared with our norm on random numbers. Norms that differ are not replaced."""
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


def gaussian_topk(x: Tensor, *, deviations: float) -> Tensor:
    """Sparse activation, (..., features) -> (..., features): subtract mean + `deviations`
    standard deviations, and clamp at 0."""
    mean = x.mean(dim=-1, keepdim=True)
    deviation = x.std(dim=-1, keepdim=True, unbiased=False)
    return functional.relu(x - (mean + deviation * deviations))


def replace_sparsity(causal: Any, dtype: torch.dtype) -> None:
    """Replace METHOD of the modules of `causal`, a PreTrainedModel that runs in `dtype`, because
    transformers' version copies a number from the host in every launch. Raises
    UnsupportedModelCode if METHOD computes a different function."""
    random = torch.Generator().manual_seed(0)
    for module in causal.modules():
        sparsity = getattr(module, "activation_sparsity", 0.0)
        if not hasattr(module, METHOD) or not sparsity > 0:
            continue
        # The share `sparsity` of normally distributed features becomes 0.
        deviations = statistics.NormalDist().inv_cdf(sparsity)
        x = torch.randn(3, 64, generator=random)
        ours = gaussian_topk(x, deviations=deviations)
        if not torch.allclose(getattr(module, METHOD)(x), ours, TOLERANCE, TOLERANCE):
            raise UnsupportedModelCode("has a sparse activation that differs from Gemma 3n's")
        # In transformers the cutoff is a tensor of the model's dtype.
        rounded = float(torch.tensor(deviations).to(dtype))
        vars(module)[METHOD] = functools.partial(gaussian_topk, deviations=rounded)

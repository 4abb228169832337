"""Our version of the sparse activation of Gemma 3n. transformers' version copies a number from
the host in every launch."""

import functools
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpu.models.transformers_attention import UnsupportedModelCode

METHOD = "_gaussian_topk"
TOLERANCE = 1e-5


def gaussian_topk(x: Tensor, *, deviations: float) -> Tensor:
    """Sparse activation, (..., features) -> (..., features): subtract mean + `deviations`
    standard deviations, and clamp at 0."""
    mean = x.mean(dim=-1, keepdim=True)
    deviation = x.std(dim=-1, keepdim=True, unbiased=False)
    return functional.relu(x - (mean + deviation * deviations))


def replace_sparsity(causal: Any, dtype: torch.dtype) -> None:
    """Replace METHOD of the modules of `causal`, a PreTrainedModel that runs in `dtype`. Raises
    UnsupportedModelCode if METHOD computes a different function."""
    random = torch.Generator().manual_seed(0)
    for module in causal.modules():
        sparsity = getattr(module, "activation_sparsity", 0.0)
        if not hasattr(module, METHOD) or not sparsity > 0:
            continue
        # This share of normally distributed features becomes 0.
        deviations = statistics.NormalDist().inv_cdf(sparsity)
        x = torch.randn(3, 64, generator=random)
        ours = gaussian_topk(x, deviations=deviations)
        if not torch.allclose(getattr(module, METHOD)(x), ours, TOLERANCE, TOLERANCE):
            raise UnsupportedModelCode("has a sparse activation that differs from Gemma 3n's")
        # In transformers the cutoff is a tensor of the model's dtype.
        rounded = float(torch.tensor(deviations).to(dtype))
        vars(module)[METHOD] = functools.partial(gaussian_topk, deviations=rounded)

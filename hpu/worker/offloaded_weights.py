"""Weights that wait in host memory while a worker sleeps. Knows no devices and no files."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

Kept = list[dict[str, Tensor]]
"""Of each module, its parameters by name, on the host. Those that two names share are held once."""


def keep(modules: Iterable[nn.Module]) -> Kept:
    """A copy of all parameters; the modules may then be dropped."""
    return [
        {name: parameter.detach().to("cpu") for name, parameter in module.named_parameters()}
        for module in modules
    ]


def put_back(kept: Kept, modules: Iterable[nn.Module]) -> None:
    """Fill modules that were made as those of `keep` were."""
    with torch.no_grad():
        for held, module in zip(kept, modules, strict=True):
            for name, parameter in module.named_parameters():
                parameter.copy_(held[name])

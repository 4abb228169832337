"""Model weights in host memory during sleep mode."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

OffloadedWeights = list[dict[str, Tensor]]
"""Parameters of each module by name, on the host. Parameters tied in a module are stored once."""


def offload_weights(modules: Iterable[nn.Module]) -> OffloadedWeights:
    """Copy all parameters to the host, unless they are there already. The modules may be dropped
    afterwards."""
    return [
        {name: parameter.detach().to("cpu") for name, parameter in module.named_parameters()}
        for module in modules
    ]


def restore(offloaded: OffloadedWeights, modules: Iterable[nn.Module]) -> None:
    """Fill `modules` from `offloaded`. The modules must have the structure of the offloaded
    modules."""
    with torch.no_grad():
        for parameters, module in zip(offloaded, modules, strict=True):
            for name, parameter in module.named_parameters():
                parameter.copy_(parameters[name])

"""Model weights in host memory, while a worker sleeps."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

OffloadedWeights = list[dict[str, Tensor]]
"""Of each module, its parameters by name, on the host. Tied parameters are stored once."""


def offload_weights(modules: Iterable[nn.Module]) -> OffloadedWeights:
    """Copy all parameters to the host; the modules may then be dropped."""
    return [
        {name: parameter.detach().to("cpu") for name, parameter in module.named_parameters()}
        for module in modules
    ]


def restore(offloaded: OffloadedWeights, modules: Iterable[nn.Module]) -> None:
    """Fill modules of the same structure as those of `offload_weights`."""
    with torch.no_grad():
        for parameters, module in zip(offloaded, modules, strict=True):
            for name, parameter in module.named_parameters():
                parameter.copy_(parameters[name])

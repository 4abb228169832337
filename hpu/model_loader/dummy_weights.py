"""Random weights, for sizing and benchmarks without the files of a checkpoint."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from config.model.quantization.fields import KV_SCALES
from hpu.model_loader.loader import Progress

LIMIT = 1e-3
"""Weights are uniform between -LIMIT and LIMIT, like vLLM's dummy weights: small enough that no
activation overflows float16."""
NUM_VALUES = 1_048_573
"""Number of random values, which each parameter repeats. A prime, so that the rows of a matrix
differ."""


def fill_dummy(modules: Iterable[nn.Module], *, on_progress: Progress) -> None:
    """Fill all parameters of `modules`: floats with values that depend only on the parameter's
    name, KV-cache scales with 1, other dtypes with zeros. `on_progress`: see load_weights."""
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(NUM_VALUES).uniform_(-LIMIT, LIMIT, generator=generator)
    parameters = [named for module in modules for named in module.named_parameters()]
    total = sum(parameter.nbytes for _, parameter in parameters)
    done = 0
    for name, parameter in parameters:
        with torch.no_grad():
            if name.endswith(KV_SCALES):
                # 1, because keys and values are divided by their scales.
                parameter.fill_(1)
            else:
                _fill(parameter, values, zlib.crc32(name.encode()) % NUM_VALUES)
        done += parameter.nbytes
        on_progress(done, total)


def _fill(parameter: Tensor, values: Tensor, first: int) -> None:
    if not parameter.is_floating_point():
        parameter.zero_()
        return
    # On a lazy device each write to a part of a parameter copies the whole parameter.
    on_host = parameter.device.type == "cpu" and parameter.is_contiguous()
    target = parameter if on_host else torch.empty(parameter.shape, dtype=parameter.dtype)
    flat, converted = target.view(-1), values.roll(-first).to(parameter.dtype)
    for begin in range(0, flat.numel(), NUM_VALUES):
        part = flat[begin : begin + NUM_VALUES]
        part.copy_(converted[: part.numel()])
    if not on_host:
        parameter.copy_(target)

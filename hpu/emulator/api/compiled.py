"""torch.compile with the back end `hpu_backend`: a region whose ops form one recipe. Python runs
each time: the cost of compiling is emulated, not the limits of tracing."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from hpu.emulator.card.device import Device


class CompiledModule(nn.Module):
    """A module that runs as one region; other attributes are those of the module."""

    def __init__(self, module: nn.Module, device: Device, fullgraph: bool) -> None:
        super().__init__()
        self._orig_mod = module
        self._device = device
        self._fullgraph = fullgraph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._device.region(self._fullgraph):
            return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_mod":
            return super().__getattr__(name)
        return getattr(self._orig_mod, name)


def compile_for(device: Device, function: Any, fullgraph: bool) -> Any:
    """`function` or module as one region. RuntimeError in lazy mode."""
    if device.is_lazy():
        raise RuntimeError("hpu_backend needs PT_HPU_LAZY_MODE=0; lazy mode has HPU graphs")
    if isinstance(function, nn.Module):
        return CompiledModule(function, device, fullgraph)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with device.region(fullgraph):
            return function(*args, **kwargs)

    return run


def patched_compile(device: Device, original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile that handles `hpu_backend` here and passes every other call on."""

    def compile(model: Any = None, **options: Any) -> Any:
        if options.get("backend") != "hpu_backend":
            return original(model, **options)
        if options.get("dynamic"):
            device.counters.misuse("dynamic_compile", "dynamic=True is not in use on the card")
        fullgraph = bool(options.get("fullgraph", False))
        if model is None:
            return functools.partial(compile_for, device, fullgraph=fullgraph)
        return compile_for(device, model, fullgraph)

    return compile

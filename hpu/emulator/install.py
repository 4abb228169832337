"""Installs and uninstalls the emulated package; importing this file has no effect.

`install(config, environment)` makes `import habana_frameworks.torch` and the device `hpu` work in
this process, for every thread; `Emulator.uninstall` restores what was patched. card/tensor.py
explains how tensors get their device.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed as dist
from torch.library import Library

from config.errors import ConfigError
from hpu.emulator.api import collectives, compiled
from hpu.emulator.api.modules import HCCL, ROOT, PackageFinder, bind_to_torch, make_modules
from hpu.emulator.card.counters import Counters
from hpu.emulator.card.device import Device
from hpu.emulator.card.device_guard import set_guard
from hpu.emulator.card.memory import Memory
from hpu.emulator.card.rules import UNDECOMPOSED
from hpu.emulator.card.tensor import (
    DEVICE,
    HpuTensor,
    is_hpu,
    map_leaves,
    tensors_in,
    with_index,
)
from hpu.emulator.ops.fakes import register_fakes
from hpu.emulator.ops.kernels import define_ops
from hpu.emulator.settings import EmulatorConfig, RuntimeVariables

RESIZING_FACTORIES = {"arange": ("default", "start", "start_step"), "eye": ("default", "m")}
"""Overloads of factories."""


class Emulator:
    """An installed emulator: its counters, and the phases that a test or a server sets."""

    def __init__(self, config: EmulatorConfig, environment: MutableMapping[str, str]) -> None:
        if hasattr(torch, "hpu") or "habana_frameworks" in sys.modules:
            raise ConfigError("habana_frameworks is imported already, or an emulator is installed")
        self.device = Device(config, RuntimeVariables(environment, config.default_lazy))
        self._modules = make_modules(self.device)
        self._finder = PackageFinder(self._modules, {ROOT: self._loaded, HCCL: self._hccl_loaded})
        self._libraries: list[Library] = []
        self._overwrites = False
        self._disables_tracing = torch._dynamo.config.disable
        self._patches: list[tuple[Any, str, Any]] = []
        self._unregister: Callable[[], None] = lambda: None

    @property
    def counters(self) -> Counters:
        return self.device.counters

    @property
    def memory(self) -> Memory:
        return self.device.memory

    def end_warmup(self) -> None:
        """End of warm-up: from now on compilations and captures are misuses."""
        self.device.close_segment()
        self.device.is_serving = True

    def begin_warmup(self) -> None:
        """Another warm-up begins."""
        self.device.close_segment()
        self.device.is_serving = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the engine, in which host syncs are misuses."""
        self.device.in_step = True
        try:
            yield
        finally:
            self.device.in_step = False

    def apply(self) -> None:
        sys.meta_path.insert(0, self._finder)
        config = self.device.config
        ops = define_ops(
            config.generation,
            config.release,
            self.device.runs_eagerly,
            lambda name: name in self.device.config.faults,
        )
        self._libraries = [ops, register_fakes(), *self._device_libraries()]
        collectives.register("hpu")
        for name in collectives.REDUCTIONS:
            reduce = collectives.with_known_kinds(getattr(dist.ProcessGroup, name))
            self._patch(dist.ProcessGroup, name, reduce)
        for name in collectives.REFUSED:
            own = getattr(dist.ProcessGroup, name)
            lazy_collectives = self.device.variables.lazy_collectives
            self._patch(dist.ProcessGroup, name, collectives.refused(name, own, lazy_collectives))
        # Without it, Module.to would put a device tensor's insides into a CPU parameter.
        self._overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # torch caches its list of factories at the first use: fill the cache before the patches.
        torch.utils._device._device_constructors()
        self._patch(torch.Tensor, "to", _indexed(torch.Tensor.to))
        self._patch(torch.Tensor, "pin_memory", self._pinned)
        self._patch(torch.Tensor, "is_pinned", self._is_pinned)
        self._patch(torch, "save", self._saving(torch.save))
        self._patch(torch, "manual_seed", self._seeding(torch.manual_seed))
        self._patch(torch, "seed", self._seeding(torch.seed))
        self._patch(torch, "tensor", _through_host(torch.tensor))
        self._patch(torch, "as_tensor", _through_host(torch.as_tensor))
        set_guard(True)
        self._unregister = compiled.register(compiled.make_backend(self.device))

    def uninstall(self) -> None:
        """Release the card and restore torch; tensors of the device become unusable."""
        self.device.acquisition.release()
        self.device.released.set()
        self._unregister()
        set_guard(False)
        torch.__future__.set_overwrite_module_params_on_conversion(self._overwrites)
        # A back end in lazy mode that nobody closed leaves torch's tracer disabled.
        torch._dynamo.config.disable = self._disables_tracing
        for owner, name, original in reversed(self._patches):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._patches.clear()
        for library in self._libraries:
            # At the end of the process, torch has destroyed them before.
            with suppress(ValueError):
                library._destroy()  # type: ignore[no-untyped-call]  # torch's own
        self._libraries.clear()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if sys.modules.get("torch.hpu") is self._modules[f"{ROOT}.hpu"]:
            del sys.modules["torch.hpu"]
            del vars(torch)["hpu"]

    def __enter__(self) -> "Emulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _loaded(self) -> None:
        """Side effects of importing the vendor's package."""
        environment = self.device.variables.environment
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        environment.setdefault("HABANA_PROFILE", "profile_api_light")
        self.device.is_lazy()
        sys.modules["torch.hpu"] = self._modules[f"{ROOT}.hpu"]
        bind_to_torch(self._modules)

    def _hccl_loaded(self) -> None:
        """Side effects of importing the collectives: their library and the module of the rank."""
        self.device.variables.lazy_collectives()
        if not self.device.acquisition.is_acquired:
            vars(self._modules[HCCL])["initialize_distributed_hpu"]()

    def _device_libraries(self) -> tuple[Library, Library]:
        """Kernels for ops that do not arrive in `__torch_dispatch__`: factories, which have no
        device tensor as an argument, and composite ops that the card runs undecomposed."""

        def factory(op: Any, *args: Any, **kwargs: Any) -> Any:
            return self.device.run(op, args, kwargs, tensors_in((args, kwargs)))

        fallback = Library("_", "IMPL")  # type: ignore[no-untyped-call]  # torch's own
        fallback.fallback(factory, "HPU")  # type: ignore[no-untyped-call]  # torch's own
        undecomposed = Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's own
        for name in UNDECOMPOSED:
            undecomposed.impl(name.removeprefix("aten::"), self._undecomposed(name), "HPU")  # type: ignore[no-untyped-call]  # torch's own
        # torch composes these of an empty tensor and a resize, which a wrapper does not follow.
        for base, overloads in RESIZING_FACTORIES.items():
            for overload in overloads:
                name = f"{base}.{overload}".removesuffix(".default")
                undecomposed.impl(name, self._undecomposed(f"aten::{base}", overload), "HPU")  # type: ignore[no-untyped-call]  # torch's own
        return fallback, undecomposed

    def _undecomposed(self, name: str, overload: str = "default") -> Callable[..., Any]:
        op = getattr(getattr(torch.ops.aten, name.removeprefix("aten::")), overload)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.device.run(op, args, kwargs, tensors_in((args, kwargs)))

        return call

    @property
    def _pinned(self) -> Callable[..., torch.Tensor]:
        """Tensor.pin_memory: a copy in pinned memory."""

        def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
            if not self.device.config.pins_memory:
                raise RuntimeError("the runtime gives no pinned host memory")
            pinned = tensor.clone()
            address = pinned.data_ptr()
            self.device.pinned.add(address)
            weakref.finalize(pinned, self.device.pinned.discard, address)
            return pinned

        return pin_memory

    @property
    def _is_pinned(self) -> Callable[..., bool]:
        """Tensor.is_pinned."""

        def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
            return tensor.data_ptr() in self.device.pinned

        return is_pinned

    def _saving(self, original: Callable[..., None]) -> Callable[..., None]:
        """torch.save, which in lazy mode saves tensors of the host: they are not on the card when
        they are loaded (the bridge's torch_overwrites.py)."""

        def save(obj: object, *args: object, **kwargs: object) -> None:
            variables = self.device.variables
            if variables.mode_is_read() and variables.lazy():
                obj = map_leaves(_on_host, obj)
            original(obj, *args, **kwargs)

        return save

    def _seeding(self, original: Callable[..., object]) -> Callable[..., object]:
        """A function that seeds the host, and afterwards the card with the same seed (the bridge's
        torch_overwrites.py)."""

        def seed(*args: object) -> object:
            found = original(*args)
            self.device.generator.manual_seed(torch.initial_seed())
            return found

        return seed

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        original = vars(owner).get(name)
        self._patches.append((owner, name, original))
        setattr(owner, name, replacement)


def _indexed(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an index added to the device `hpu`, which torch cannot determine."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {key: with_index(value) for key, value in kwargs.items()}
        return original(*(with_index(value) for value in args), **named)

    return call


def _on_host(value: object) -> object:
    return value.detach().cpu() if isinstance(value, HpuTensor) else value


def _through_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that creates a tensor from data, on the host first: torch's own copy to the device
    skips what a tensor subclass needs."""

    def call(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if not is_hpu(device):
            return original(data, *args, device=device, **kwargs)
        return original(data, *args, **kwargs).to(DEVICE)

    return call


def install(config: EmulatorConfig, environment: MutableMapping[str, str]) -> Emulator:
    """Install an emulated card in this process. The runtime's variables are in `environment` (the
    process's own, or a dictionary of a test).

    ConfigError if the real package or another emulator is loaded already.
    """
    emulator = Emulator(config, environment)
    emulator.apply()
    return emulator

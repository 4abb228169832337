"""Installs and uninstalls the emulated package; importing this file has no effect.

`install(config, environment)` makes `import habana_frameworks.torch` and the device `hpu` work in
this process, for every thread; `Emulator.uninstall` restores what was patched.
"""

import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed as dist
from torch.library import Library

from config.errors import ConfigError
from hpu.emulator.api import collectives, compiled, overwrites
from hpu.emulator.api.modules import HCCL, ROOT, PackageFinder, bind_to_torch, make_modules
from hpu.emulator.api.overwrites import Overwrites
from hpu.emulator.api.torch_hpu import LAZY_ONLY
from hpu.emulator.card.counters import EmulatorCounters
from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.card.device_guard import set_guard
from hpu.emulator.card.memory import Memory
from hpu.emulator.card.rules import UNDECOMPOSED
from hpu.emulator.card.tensor import (
    is_hpu,
    tensors_in,
    to_card,
    with_index,
)
from hpu.emulator.ops.attention import register_flex_attention
from hpu.emulator.ops.fakes import register_fakes
from hpu.emulator.ops.kernels import define_ops
from hpu.emulator.settings import EmulatorConfig, RuntimeVariables

RESIZING_FACTORIES = {"arange": ("default", "start", "start_step"), "eye": ("default", "m")}
"""Overloads of factories that torch implements by resizing an empty tensor."""


class Emulator:
    """An installed emulator."""

    def __init__(self, config: EmulatorConfig, environment: MutableMapping[str, str]) -> None:
        if hasattr(torch, "hpu") or "habana_frameworks" in sys.modules:
            raise ConfigError("habana_frameworks is imported already, or an emulator is installed")
        variables = RuntimeVariables(environment, config.default_lazy, config.release)
        self.device = EmulatedDevice(config, variables)
        self._modules = make_modules(self.device)
        self._finder = PackageFinder(self._modules, {ROOT: self._loaded, HCCL: self._hccl_loaded})
        self._libraries: list[Library] = []
        self._overwrites = False
        self._disables_tracing = torch._dynamo.config.disable
        self._patches: list[tuple[Any, str, Any]] = []
        self._unregister: Callable[[], None] = lambda: None
        self._has_collectives = False
        self._loadable = torch.serialization.safe_globals([to_card])
        """Lets torch.load with `weights_only` load tensors of the card."""

    @property
    def counters(self) -> EmulatorCounters:
        return self.device.counters

    @property
    def memory(self) -> Memory:
        return self.device.memory

    def end_warmup(self) -> None:
        """End the warm-up: later compilations and captures are misuses."""
        self.device.close_segment()
        self.device.is_serving = True

    def begin_warmup(self) -> None:
        """Begin another warm-up: compilations and captures are allowed again."""
        self.device.close_segment()
        self.device.is_serving = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of an engine step, in which host syncs are misuses."""
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
            self.device.check_on_card,
        )
        self._libraries = [ops, register_fakes(), *self._device_libraries()]
        register_flex_attention()
        collectives.register("hpu")
        is_lazy = self.device.variables.lazy_collectives
        for name, method in _methods(collectives.REDUCTIONS):
            self._patch(dist.ProcessGroup, name, collectives.with_known_kinds(method))
        for name, method in _methods(collectives.REFUSED):
            self._patch(dist.ProcessGroup, name, collectives.refused(name, method, is_lazy))
        for name, method in _methods(collectives.TYPED):
            self._patch(
                dist.ProcessGroup, name, collectives.with_known_types(name, method, is_lazy)
            )
        for name, method in _methods(collectives.MOVERS):
            self._patch(dist.ProcessGroup, name, collectives.without_short(method))
        for name, method in _methods(collectives.CARRIERS):
            self._patch(dist.ProcessGroup, name, collectives.without_host_tensors(method))
        # Otherwise Module.to would assign the data of a device tensor to a CPU parameter.
        self._overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # torch caches its list of factories at the first use: fill the cache before the patches.
        torch.utils._device._device_constructors()
        self._patch(torch.Tensor, "to", _indexed(torch.Tensor.to))
        self._patch(torch.Tensor, "pin_memory", self._pinned)
        self._patch(torch.Tensor, "is_pinned", self._is_pinned)
        own = Overwrites(self.device)
        self._patch(torch, "save", own.save(torch.save))
        self._patch(torch, "load", own.load(torch.load))
        self._patch(torch, "manual_seed", own.seed(torch.manual_seed))
        self._patch(torch, "seed", own.seed(torch.seed))
        self._patch(torch.random, "fork_rng", own.fork_rng(torch.random.fork_rng))
        recorded = overwrites.record_stream(torch.Tensor.record_stream)
        self._patch(torch.Tensor, "record_stream", recorded)
        autocast = overwrites.set_autocast_enabled(torch.set_autocast_enabled)
        self._patch(torch, "set_autocast_enabled", autocast)
        self._patch(torch, "Stream", overwrites.without_card(torch.Stream))
        self._patch(torch, "Event", overwrites.without_card(torch.Event))
        self._patch(dist, "new_group", overwrites.new_group(dist.new_group))
        initialize = overwrites.init_process_group(dist.init_process_group)
        self._patch(dist, "init_process_group", initialize)
        c10d = dist.distributed_c10d
        find = overwrites.object_device(c10d._get_object_coll_device)
        self._patch(c10d, "_get_object_coll_device", find)
        self._loadable.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._patch(torch, "tensor", _through_host(torch.tensor))
        self._patch(torch, "as_tensor", _through_host(torch.as_tensor))
        set_guard(True)
        self._unregister = compiled.register(compiled.make_backend(self.device))
        autoload = vars(self._modules["habana_frameworks.autoload"])
        if autoload["is_autoload_enabled"]():
            # On a machine with cards, `import torch` imports the package, which fixes the mode.
            importlib.import_module(ROOT)

    def uninstall(self) -> None:
        """Release the card and restore torch, except registrations that cannot be undone; tensors
        of the device become unusable."""
        self.device.acquisition.release()
        self.device.released.set()
        self._unregister()
        set_guard(False)
        torch.__future__.set_overwrite_module_params_on_conversion(self._overwrites)
        # A back end in lazy mode that was not closed leaves torch's tracer disabled.
        torch._dynamo.config.disable = self._disables_tracing
        if self._patches:
            self._loadable.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
        for owner, name, original in reversed(self._patches):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._patches.clear()
        for library in self._libraries:
            # At interpreter exit, torch may have destroyed them already.
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
        # torch caches the module of each device.
        torch.get_device_module.cache_clear()

    def __enter__(self) -> "Emulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _loaded(self) -> None:
        """Emulate the side effects of importing the vendor's package, which imports hccl. Outside
        of lazy mode the package has no graph functions."""
        environment = self.device.variables.environment
        compiled.read_switches(environment)
        self.device.variables.check()
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        environment.setdefault("HABANA_PROFILE", "profile_api_light")
        hpu = vars(self._modules[f"{ROOT}.hpu"])
        if not self.device.is_lazy():
            for name in LAZY_ONLY:
                hpu.pop(name, None)
        self._hccl_loaded()
        sys.modules["torch.hpu"] = self._modules[f"{ROOT}.hpu"]
        bind_to_torch(self._modules)

    def _hccl_loaded(self) -> None:
        """Emulate the side effects of importing hccl, once: it selects the native library and, if
        there are several ranks, sets the module id of this rank."""
        if self._has_collectives:
            return
        self._has_collectives = True
        self.device.variables.lazy_collectives()
        if not self.device.acquisition.is_acquired:
            vars(self._modules[HCCL])["initialize_distributed_hpu"]()

    def _device_libraries(self) -> tuple[Library, Library]:
        """Kernels for factories, which have no device tensor as an argument and so do not arrive in
        `__torch_dispatch__`, and for composite ops, which torch would otherwise decompose first."""

        def factory(op: Any, *args: Any, **kwargs: Any) -> Any:
            return self.device.run(op, args, kwargs, tensors_in((args, kwargs)))

        fallback = Library("_", "IMPL")  # type: ignore[no-untyped-call]  # torch's own
        fallback.fallback(factory, "HPU")  # type: ignore[no-untyped-call]  # torch's own
        undecomposed = Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's own
        for name in UNDECOMPOSED:
            undecomposed.impl(name.removeprefix("aten::"), self._undecomposed(name), "HPU")  # type: ignore[no-untyped-call]  # torch's own
        # An HpuTensor cannot follow a resize, so the card runs these factories undecomposed.
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
        """Tensor.pin_memory: a copy in pinned memory; the device argument is required (_pin_memory
        in the bridge's pin_memory.cpp)."""

        def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
            if not device:
                raise RuntimeError("Unable to pin memory to an null device")
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
        """Tensor.is_pinned, which is False without the device argument."""

        def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
            return bool(device) and tensor.data_ptr() in self.device.pinned

        return is_pinned

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        original = vars(owner).get(name)
        self._patches.append((owner, name, original))
        setattr(owner, name, replacement)


def _methods(names: Iterable[str]) -> Iterator[tuple[str, Callable[..., object]]]:
    for name in names:
        if hasattr(dist.ProcessGroup, name):
            yield name, getattr(dist.ProcessGroup, name)


def _indexed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `original` to add the index to a device `hpu`, which torch cannot determine."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {key: with_index(value) for key, value in kwargs.items()}
        return original(*(with_index(value) for value in args), **named)

    return call


def _through_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that creates a tensor from data: it creates the tensor on the host and then
    moves it, because torch's own copy to the device does not support tensor subclasses."""

    def call(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if not is_hpu(device):
            return original(data, *args, device=device, **kwargs)
        return original(data, *args, **kwargs).to(with_index(device))

    return call


def install(config: EmulatorConfig, environment: MutableMapping[str, str]) -> Emulator:
    """Install an emulated card in this process. `environment`: the runtime's variables.

    Raises ConfigError if the real package or another emulator is loaded already.
    """
    emulator = Emulator(config, environment)
    try:
        emulator.apply()
    except BaseException:
        emulator.uninstall()
        raise
    return emulator

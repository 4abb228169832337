"""The emulated package `habana_frameworks`: its modules by name, and their import hook."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from hpu.emulator.api import collectives, hlml, metrics, torch_hpu
from hpu.emulator.api import hpex as fused
from hpu.emulator.card.device import EmulatedDevice

logger = logging.getLogger(__name__)

ROOT = "habana_frameworks.torch"
HCCL = f"{ROOT}.distributed.hccl"


class synDeviceType(IntEnum):
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


class PackageFinder(MetaPathFinder, Loader):
    """Imports the emulated modules; calls `loaded[name]` when module `name` is imported."""

    def __init__(
        self, modules: dict[str, ModuleType], loaded: dict[str, Callable[[], object]]
    ) -> None:
        self._modules = modules
        self._loaded = loaded

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        is_package = any(other.startswith(f"{name}.") for other in self._modules)
        return ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        loaded = self._loaded.get(module.__name__)
        if loaded is not None:
            loaded()


def make_modules(device: EmulatedDevice) -> dict[str, ModuleType]:
    """Every emulated module by its full name, set as an attribute of its parent."""
    hpu = torch_hpu.make_module(device)
    vars(hpu)["emulated"] = device
    modules = {
        "habana_frameworks": ModuleType("habana_frameworks"),
        "habana_frameworks.autoload": _autoload(device),
        ROOT: ModuleType(ROOT),
        f"{ROOT}.core": _core(device),
        f"{ROOT}.hpu": hpu,
        f"{ROOT}.hpu.metrics": metrics.make_module(device),
        f"{ROOT}.hpex": ModuleType(f"{ROOT}.hpex"),
        f"{ROOT}.hpex.kernels": fused.kernels_module(),
        f"{ROOT}.hpex.normalization": fused.normalization_module(),
        f"{ROOT}.distributed": ModuleType(f"{ROOT}.distributed"),
        HCCL: collectives.make_module(device),
        f"{ROOT}.utils": ModuleType(f"{ROOT}.utils"),
        f"{ROOT}.utils.internal": _internal(device),
        f"{ROOT}.utils.experimental": _experimental(device),
        f"{ROOT}.internal": ModuleType(f"{ROOT}.internal"),
        f"{ROOT}.internal.bridge_config": _bridge_config(device),
        "pyhlml": hlml.make_module(device),
    }
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    return modules


def _core(device: EmulatedDevice) -> ModuleType:
    closures: list[Callable[[], object]] = []

    def run_closures() -> None:
        due, closures[:] = closures[:], []
        for closure in due:
            closure()

    def mark_step(device_str: str = "", sync: bool = False) -> None:
        """Close the lazy segment; without effect in eager and compile mode. `sync`: wait for the
        thread that submits launches, but not for the card (StepMarkerBind in the bridge's
        hpu_lazy_tensors.cpp)."""
        if not device.is_lazy():
            return
        device.acquisition.touch()
        if device.has_fault("graph-marks") and device.recording:
            raise RuntimeError("mark_step is not supported during hpu graph capturing")
        device.close_segment()
        if sync:
            device.launches.join()
        run_closures()

    def iter_mark_step(device_str: str = "") -> None:
        """Launches nothing: it begins to number graphs anew (IterStepMarker in the bridge's
        hpu_lazy_tensors.cpp)."""
        if device.is_lazy():
            run_closures()

    def add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
        """Call `closure` after the next mark; never in eager and compile mode (the bridge's
        step_closure.py)."""
        if device.is_lazy():
            closures.append(partial(closure, *args))

    def set_env(model: object = None) -> object:
        """Switch the inference mode on. The vendor's function also fuses convolutions of `model`
        with their norms."""
        device.runtime_switches.update(inference_mode=True, matmul3d_2d_reshape=True)
        return model

    def reset_env() -> None:
        device.runtime_switches.update(inference_mode=False, matmul3d_2d_reshape=False)

    def initialize(
        model: object = None,
        mark_only_scales_as_const: bool = False,
        mark_scales: bool = True,
        mark_non_scales: bool = True,
        optimizer: object = None,
        args: object = None,
    ) -> None:
        """Switch the inference mode on. The vendor's function also marks constants. Signature of
        2025 (core/quantization.py)."""
        set_env()

    module = ModuleType(f"{ROOT}.core")
    vars(module).update(
        mark_step=mark_step,
        iter_mark_step=iter_mark_step,
        add_step_closure=add_step_closure,
        hpu_set_env=set_env,
        hpu_initialize=initialize,
        hpu_set_inference_env=set_env,
        hpu_inference_set_env=set_env,
        hpu_inference_initialize=initialize,
        hpu_inference_reset_env=reset_env,
        hpu_reset_env=reset_env,
        hpu_teardown_inference_env=reset_env,
    )
    return module


def _autoload(device: EmulatedDevice) -> ModuleType:
    """`habana_frameworks.autoload`, by which `import torch` imports the package."""

    def is_autoload_enabled() -> bool:
        environment = device.variables.environment
        if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
            # torch itself loads no back end then.
            return False
        wanted = environment.get("PT_HPU_AUTOLOAD")
        if wanted in ("0", "1"):
            return wanted == "1"
        default = "1" if device.config.default_lazy else "0"
        return environment.get("PT_HPU_LAZY_MODE", default) != "1"

    module = ModuleType("habana_frameworks.autoload")
    vars(module).update(is_loaded=False, is_autoload_enabled=is_autoload_enabled)
    return module


class Timer:
    """Host time of a block, in seconds."""

    def __enter__(self) -> "Timer":
        self.start_t = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_t = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return self.end_t - self.start_t


def _internal(device: EmulatedDevice) -> ModuleType:
    def lazy_only(function: Callable[..., object]) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            if is_lazy:
                function(*args, **kwargs)

        is_lazy = device.is_lazy()
        return call

    module = ModuleType(f"{ROOT}.utils.internal")
    vars(module).update(lazy_only=lazy_only, Timer=Timer)
    if not device.has_fault("runtime-names"):
        vars(module).update(is_lazy=device.is_lazy)
    return module


def _experimental(device: EmulatedDevice) -> ModuleType:
    kinds = {
        "gaudi2": synDeviceType.synDeviceGaudi2,
        "gaudi3": synDeviceType.synDeviceGaudi3,
    }
    module = ModuleType(f"{ROOT}.utils.experimental")
    vars(module).update(
        synDeviceType=synDeviceType,
        _get_device_type=lambda: kinds[device.config.generation],
        _data_ptr=lambda tensor: tensor.data_ptr(),
        _is_fp16_supported=lambda: True,
        # No effect: the real function makes the bridge fuse the computation of scales, and no
        # result depends on it.
        _set_is_dynamic_quantization=lambda is_dynamic: None,
    )
    return module


def _bridge_config(device: EmulatedDevice) -> ModuleType:
    @contextlib.contextmanager
    def env_setting(name: str, value: Any) -> Iterator[None]:
        """Set a runtime variable inside the block. A name that the runtime does not know raises
        KeyError."""
        if name in device.config.unknown_variables:
            raise KeyError(name)
        environment = device.variables.environment
        before = environment.get(name)
        environment[name] = str(value)
        only_compiles = name == "PT_COMPILE_ONLY_MODE" and device.variables.flag(name)
        try:
            with device.compile_only() if only_compiles else contextlib.nullcontext():
                yield
        finally:
            if before is None:
                environment.pop(name, None)
            else:
                environment[name] = before

    module = ModuleType(f"{ROOT}.internal.bridge_config")
    vars(module).update(env_setting=env_setting)
    return module


def bind_to_torch(modules: dict[str, ModuleType]) -> None:
    """Add the device module to torch, as importing the vendor's package does."""
    vars(torch)["hpu"] = modules[f"{ROOT}.hpu"]

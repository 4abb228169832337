"""The module `torch.hpu`."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hpu.emulator.api.wrap import GraphedFunction, make_graphed, wrap_module
from hpu.emulator.card import graphs
from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.card.streams import CardEvent, CardStream, CurrentStream
from hpu.emulator.card.tensor import is_hpu

ALL_MODULES = range(8)
"""Modules of a whole machine."""

SYNC_DEBUG = "PT_ENABLE_HABANA_STREAMASYNC"


class Api:
    """The public functions of `torch.hpu`."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._default = CardStream(device, device.stream_state, 0)
        self._current = CurrentStream(device, self._default, is_lazy=device.is_lazy)
        device.current_state = lambda: self._current.get().stream_state
        device.on_default_stream = lambda: self._current.use(self._default)
        self._capture_stream: CardStream | None = None
        self._recomputes = True

    def _lazy_init(self) -> None:
        """Called by torch before the first tensor is created on the device."""
        self._device.acquisition.touch()

    def init(self) -> None:
        self._device.acquisition.touch()

    def is_initialized(self) -> bool:
        return self._device.acquisition.is_acquired

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return self._device.config.num_devices

    def get_device_name(self, device: object = None) -> str:
        self._check_index(device)
        return self._device.generation.name

    def get_device_capability(self, device: object = None) -> str:
        self._check_index(device)
        return self._device.config.release

    def get_device_properties(self, device: object = None) -> str:
        """The properties as text, with fewer fields than in the bridge's device.cpp."""
        self._check_index(device)
        return f"(dramSize={self._device.memory.limit}, device_id={self._device.acquisition.index})"

    def current_device(self) -> int:
        self._device.acquisition.touch()
        return 0

    def set_device(self, device: Any) -> None:
        """Choose a visible module. Must be called before the card is acquired."""
        index = torch.device(device).index or 0 if not isinstance(device, int) else device
        acquisition = self._device.acquisition
        environment = self._device.variables.environment
        is_named = "HLS_MODULE_ID" in environment or "HABANA_VISIBLE_MODULES" in environment
        if self.device_count() < len(ALL_MODULES) and not is_named:
            # A container with only some of the cards does not say which modules they are.
            if index != 0:
                raise AssertionError(
                    "As HABANA_VISIBLE_MODULES is not provided, the only supported device idx is "
                    f"0, got {index}"
                )
            return
        if environment.get("HABANA_VISIBLE_MODULES") == "":
            raise ValueError("HABANA_VISIBLE_MODULES is empty: invalid literal for int()")
        modules = self._device.variables.modules()
        if index >= len(modules):
            # The bridge compares with the number of modules and then reads from their list.
            kind = IndexError if index == len(modules) else AssertionError
            raise kind(f"device index {index} of {len(modules)} visible modules")
        if acquisition.is_acquired and index not in (0, acquisition.index):
            raise RuntimeError(
                f"one device per process: index {acquisition.index} is acquired, {index} was "
                "requested"
            )
        if not acquisition.is_acquired:
            acquisition.index = index
            environment.setdefault("HLS_MODULE_ID", str(modules[index]))

    def _check_index(self, device: object) -> None:
        """Acquire the card. Raises AssertionError for an index beyond the machine's devices, and
        ValueError for another type of device, as in the bridge's torch/hpu/memory.py."""
        self._device.acquisition.touch()
        if isinstance(device, (str, torch.device)) and torch.device(device).type != "hpu":
            raise ValueError(f"Expected a hpu device, but got: {device}")
        if not 0 <= _index_of(device) < self.device_count():
            raise AssertionError(f"Invalid device id: {device} of {self.device_count()} devices")

    def synchronize(self) -> None:
        """Wait for all streams. It has no argument (the bridge's torch/hpu/__init__.py)."""
        self._device.synchronize()

    def is_bf16_supported(self) -> bool:
        return True

    def memory_usage(self, device: object = None) -> int:
        """Bytes in use, not a percentage (the bridge's torch/hpu/__init__.py)."""
        return self.memory_allocated(device)

    def utilization(self, device: object = None) -> int:
        self._check_index(device)
        return 0

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """(free, limit) bytes."""
        self._check_index(device)
        memory = self._device.memory
        free = memory.limit - memory.in_use
        if self._device.has_fault("memory-stats"):
            free = memory.limit
        if self._device.has_fault("graph-memory"):
            free += sum(graph.held_bytes for graph in self._device.graphs)
        return free, memory.limit

    def memory_allocated(self, device: object = None) -> int:
        self._check_index(device)
        return self._device.memory.in_use

    def max_memory_allocated(self, device: object = None) -> int:
        self._check_index(device)
        return self._device.memory.peak

    def memory_reserved(self, device: object = None) -> int:
        self._check_index(device)
        return self._device.memory.limit

    def max_memory_reserved(self, device: object = None) -> int:
        return self.memory_reserved(device)

    def memory_cached(self, device: object = None) -> int:
        """The old name of memory_reserved."""
        warnings.warn("torch.hpu.memory_cached is now memory_reserved", FutureWarning, stacklevel=2)
        return self.memory_reserved(device)

    def max_memory_cached(self, device: object = None) -> int:
        """The old name of max_memory_reserved."""
        text = "torch.hpu.max_memory_cached is now max_memory_reserved"
        warnings.warn(text, FutureWarning, stacklevel=2)
        return self.max_memory_reserved(device)

    def setDeterministic(self, val: bool) -> None:
        warnings.warn("torch.hpu.setDeterministic is deprecated", stacklevel=2)
        self._device.runtime_switches["deterministic"] = val

    def getDeterministic(self) -> bool:
        warnings.warn("torch.hpu.getDeterministic is deprecated", stacklevel=2)
        return self._device.runtime_switches.get("deterministic", False)

    def set_sync_debug_mode(self, debug_mode: object) -> None:
        """Set a runtime variable, which the native library has read already."""
        self._device.variables.environment[SYNC_DEBUG] = str(debug_mode)

    def get_sync_debug_mode(self) -> int:
        """The runtime variable as a number. Raises ValueError after `set_sync_debug_mode(True)`,
        and KeyError if it is unset."""
        return int(self._device.variables.environment[SYNC_DEBUG])

    def get_arch_list(self) -> list[str]:
        return [self.get_device_name()]

    def get_gencode_flags(self) -> str:
        return ""

    def is_autocast_hpu_enabled(self) -> bool:
        return torch.is_autocast_enabled("hpu")

    def get_autocast_hpu_dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype("hpu")

    def can_device_access_peer(self, device: object, peer_device: object) -> bool:
        """Raises AssertionError for equal devices (the bridge's torch/hpu/__init__.py), and the
        errors of `_check_index`."""
        self._check_index(device)
        self._check_index(peer_device)
        if _index_of(device) == _index_of(peer_device):
            raise AssertionError("Both the ids are same.")
        return True

    def memory_stats(self, device: object = None) -> dict[str, int]:
        self._check_index(device)
        return self._device.memory.stats()

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._check_index(device)
        self._device.memory.reset_peak()

    def reset_accumulated_memory_stats(self, device: object = None) -> None:
        self._check_index(device)
        self._device.memory.reset_counts()

    def memory_summary(self, device: Any = None) -> str:
        self._check_index(device)
        head = f"{'=' * 52}\n  PyTorch HPU memory summary, device ID {_index_of(device)} \n"
        return head + "\n".join(f"{name}: {value}" for name, value in self.memory_stats().items())

    def Event(self, enable_timing: bool = False) -> CardEvent:
        return CardEvent(self._device, enable_timing)

    def Stream(self, device: object = None, priority: int = 0) -> CardStream:
        """Acquires the card (the bridge's torch/hpu/streams.py)."""
        self._device.acquisition.touch()
        return CardStream(self._device, self._device.new_stream(), priority)

    def current_stream(self, device: object = None) -> CardStream:
        return self._current.get()

    def default_stream(self, device: object = None) -> CardStream:
        return self._default

    def set_stream(self, stream: CardStream | None) -> None:
        self._current.set(stream)

    def stream(self, stream: CardStream | None) -> AbstractContextManager[None]:
        return self._current.use(stream)

    def StreamContext(self, stream: CardStream | None) -> AbstractContextManager[None]:
        return self.stream(stream)

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seed the card but not the host (the bridge's test_hpu_rng_state.py)."""
        return self._device.generator.manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def seed(self) -> int:
        return self._device.generator.seed()

    def seed_all(self) -> None:
        self.seed()

    def initial_seed(self) -> int:
        return self._device.generator.initial_seed()

    def get_rng_state(self, device: object = "hpu") -> Tensor:
        if _index_of(device) != 0:
            raise RuntimeError("hpu get_rng_state supports only device 0")
        return self._device.generator.get_state()

    def set_rng_state(self, state: Tensor, device: object = "hpu") -> None:
        if _index_of(device) != 0:
            raise RuntimeError("hpu set_rng_state supports only device 0")
        self._device.generator.set_state(state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [self.get_rng_state(0)]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        if len(states) != 1:
            raise RuntimeError("hpu set_rng_state_all supports only states len of 1")
        self.set_rng_state(states[0], 0)

    def enable_recompute_sdp(self, enabled: bool) -> None:
        """Set the default of FusedSDPA's `recompute_mode`."""
        self._recomputes = enabled

    def recompute_sdp_enabled(self) -> bool:
        return self._recomputes

    @contextmanager
    def sdp_kernel(self, enable_recompute: bool = True) -> Iterator[None]:
        before = self._recomputes
        self._recomputes = enable_recompute
        try:
            yield
        finally:
            self._recomputes = before

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        """Select the only card. Raises AssertionError for an index that is neither 0 nor the module
        of this process."""
        index = _index_of(device)
        module = int(self._device.variables.environment.get("HLS_MODULE_ID") or -1)
        if index not in (0, module):
            raise AssertionError(
                f"Requested device_id={index} is different from env_device_id={module}"
            )
        yield

    def device_of(self, obj: Tensor) -> AbstractContextManager[None]:
        """`device` of a tensor. The index of a host tensor is -1, which is refused once a module is
        chosen."""
        return self.device(0 if is_hpu(obj.device) else -1)

    def HPUGraph(self) -> graphs.HPUGraph:
        return graphs.HPUGraph(self._device)

    def graph(
        self, hpu_graph: graphs.HPUGraph, stream: CardStream | None = None, dry_run: bool = False
    ) -> graphs.GraphContext:
        """Capture on `stream`; default: a stream shared by all such captures, which is not the
        default stream (the bridge's torch/hpu/graphs.py)."""
        if not stream:
            self._capture_stream = stream = self._capture_stream or self.Stream()
        return graphs.GraphContext(hpu_graph, self._device, self._current.use(stream), dry_run)

    def wrap_in_hpu_graph(
        self,
        module: nn.Module,
        asynchronous: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool = False,
        max_graphs: int | None = None,
    ) -> nn.Module:
        graphed = GraphedFunction(
            module.forward,
            self._device,
            disable_tensor_cache=disable_tensor_cache,
            max_graphs=max_graphs,
            asynchronous=asynchronous,
            dry_run=dry_run,
        )
        return wrap_module(module, graphed)

    def wrap_in_hpu_graph_func(
        self,
        func: Any,
        asynchronous: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool = False,
        max_graphs: int | None = None,
    ) -> Callable[..., Any]:
        """Returns a plain function. It lacks `clear_cache`, which only a wrapped module has."""
        graphed = GraphedFunction(
            func,
            self._device,
            disable_tensor_cache=disable_tensor_cache,
            max_graphs=max_graphs,
            asynchronous=asynchronous,
            dry_run=dry_run,
        )
        return lambda *args, **kwargs: graphed(*args, **kwargs)

    def make_graphed_callables(
        self,
        callables: Any,
        sample_args: tuple[Any, ...],
        warmups: int = 0,
        allow_unused_input: bool = False,
        asynchronous: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool = False,
    ) -> Any:
        """Capture a callable with its sample arguments, or each callable of a tuple with its own
        sample arguments."""
        options = {
            "asynchronous": asynchronous,
            "disable_tensor_cache": disable_tensor_cache,
            "dry_run": dry_run,
        }
        if not isinstance(callables, tuple):
            return make_graphed(callables, sample_args, self._device, **options)
        return tuple(
            make_graphed(function, arguments, self._device, **options)
            for function, arguments in zip(callables, sample_args, strict=True)
        )


def _index_of(device: object) -> int:
    """Index of a device, a device string or a number; 0 without an index."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return index if isinstance(index, int) else 0


LAZY_ONLY = (
    "HPUGraph",
    "graph",
    "wrap_in_hpu_graph",
    "wrap_in_hpu_graph_func",
    "make_graphed_callables",
)
"""Names that exist only in lazy mode (the bridge's torch/hpu/__init__.py)."""
NOT_MODELLED = frozenset(
    (
        # Aliases of torch.tensor with a dtype.
        *("BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor"),
        *("FloatTensor", "HalfTensor", "IntTensor", "LongTensor", "ShortTensor"),
        # Graphs of training.
        "ModuleCacher",
        *("set_autocast_hpu_dtype", "set_autocast_hpu_enabled"),
        *("disable_const_section_serialization", "enable_const_section_serialization"),
        *("disable_optim_output_sif", "enable_optim_output_sif"),
        *("set_mark_non_scale_const", "set_mark_scale_const"),
        "get_stream_info",
    )
)
"""Names in torch.hpu of 2025 that the emulator does not model."""
SWITCHES = {
    "inference_mode": "is_inference_mode_enabled",
    "quantization": None,
    "matmul3d_2d_reshape": "is_matmul3d_2d_reshape_enabled",
    "dynamic_shape": "get_dynamic_shape_status",
}
"""Switch of the runtime without an effect in the emulator -> function that returns its state, if
any. `enable_<name>` and `disable_<name>` set it."""


def add_switches(module: ModuleType, device: EmulatedDevice) -> None:
    """Add the functions of SWITCHES."""
    switches = device.runtime_switches

    def setter(name: str, value: bool) -> Callable[[], None]:
        return lambda: switches.update({name: value})

    for name, query in SWITCHES.items():
        setattr(module, f"enable_{name}", setter(name, True))
        setattr(module, f"disable_{name}", setter(name, False))
        if query:
            setattr(module, query, lambda name=name: switches.get(name, False))


def make_module(device: EmulatedDevice) -> ModuleType:
    """`torch.hpu`."""
    module = ModuleType("torch.hpu")
    api = Api(device)
    for name in dir(Api):
        if not name.startswith("__"):
            setattr(module, name, getattr(api, name))
    add_switches(module, device)
    vars(module)["__getattr__"] = _missing
    return module


def _missing(name: str) -> object:
    if name in NOT_MODELLED:
        raise AttributeError(f"torch.hpu.{name} is not modelled by the emulator")
    raise AttributeError(f"module 'torch.hpu' has no attribute {name!r}")

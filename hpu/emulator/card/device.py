"""Device: runs every op of an HpuTensor on its CPU bytes and holds it to the card's rules. Knows
segments, memory and the recording in progress; knows no modules of the vendor's package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from hpu.backends.gaudi_devices import GENERATIONS
from hpu.emulator.card import rules
from hpu.emulator.card.acquire import Acquisition
from hpu.emulator.card.journal import Journal
from hpu.emulator.card.memory import Memory
from hpu.emulator.card.queue import PendingWork, spoil
from hpu.emulator.card.segments import Recipes, Segment
from hpu.emulator.card.streams import Clock, Line
from hpu.emulator.card.tensor import (
    HpuTensor,
    Lease,
    device_tensors,
    is_hpu,
    map_leaves,
    storage_of,
    tensors_in,
)
from hpu.emulator.settings import EmulatorConfig, RuntimeVariables

OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")

LAZY_NEEDS_VENDOR = "lazy mode needs the vendor's build of torch; set PT_HPU_LAZY_MODE=0"


class Recording(Protocol):
    """A capture in progress."""

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An op on CPU tensors, and its result as device tensors."""
        ...


class Device:
    """One card, owned by this process."""

    def __init__(self, config: EmulatorConfig, variables: RuntimeVariables) -> None:
        self.config = config
        self.variables = variables
        self.generation = GENERATIONS[config.generation]
        self.journal = Journal(config)
        self.memory = Memory(config)
        self.acquisition = Acquisition(config, variables)
        self.recipes = Recipes(config, variables, self.journal, self.memory)
        self.segment = Segment(self.recipes)
        self.pending = PendingWork()
        self.clock = Clock()
        self.line = Line(self.clock, is_default=True)
        """The stream to which work is given now."""
        self.recording: Recording | None = None
        self.region_depth = 0
        """How many regions compiled with hpu_backend are being run, one inside the other."""
        self.sealed = False
        """After warm-up: compilations, captures and fallbacks are misuses."""
        self.in_step = False
        """Inside a step: host syncs are misuses."""
        self.world_size = 1
        self.agree: Callable[[str, list[Tensor]], None] | None = None
        """Asked before every collective of more than one rank."""
        self._fullgraph = False
        self.uids = count()

    def is_lazy(self) -> bool:
        first = not self.variables.mode_is_read()
        lazy = self.variables.lazy()
        if first and lazy and not self.config.vendor_torch:
            raise AssertionError(LAZY_NEEDS_VENDOR)
        return lazy

    def adopt(self, inner: Tensor) -> HpuTensor:
        """A CPU tensor's bytes as a new storage on the device."""
        return HpuTensor(inner, self, self.memory.take(inner.untyped_storage().nbytes()))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One op that has a device tensor among its arguments, or the device as a keyword."""
        name: str = func._schema.name
        if _is_composite(func, name):
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.acquisition.touch()
        self._check_leases(name, args, kwargs)
        if self.recording is not None:
            self._check_view_write(func, name, args)
        if not self.line.is_default:
            for given in device_tensors((args, kwargs)):
                self.line.check(given, name, self.journal.misuse)
        if name == "aten::copy_" and not isinstance(args[0], HpuTensor):
            return self._to_host(args[0], args[1], _non_blocking(args, kwargs, 2))
        if name == "aten::_to_copy" and _goes_to_cpu(kwargs):
            return self._host_copy(args[0], kwargs)
        if name in rules.HOST_READS:
            self.host_sync(name)
            return self._host_value(func, args, kwargs)
        if rules.waits_for_data(name, args, kwargs):
            self.host_sync(name)
        lazy = self.is_lazy()
        if not rules.is_supported(name, self.config.extra_supported, self.config.unsupported):
            self._fall_back(name)
        _check_devices(name, args, kwargs)
        return self._launch(func, name, args, kwargs, lazy)

    def close_segment(self) -> None:
        """End the lazy segment, or the part of a compiled region, and launch it."""
        if self.segment.close() and self.sealed:
            ops = self.segment.last_ops
            text = f"a new recipe of {len(ops)} ops was compiled while serving"
            self.journal.misuse("compile_after_warmup", text, " ".join(ops[:8]))

    def host_sync(self, op: str) -> None:
        """The host waits for the device in the middle of its work."""
        if self.recording is not None:
            raise RuntimeError(f"{op}: the host cannot read the device during hpu graph capturing")
        if self._fullgraph:
            raise RuntimeError(f"{op}: graph break in a region compiled with fullgraph=True")
        self.close_segment()
        self.journal.counts["syncs"] += 1
        if self.in_step:
            self.journal.misuse("host_sync", "the host waits for the device inside a step", op)
        self.pending.drain()

    def new_line(self) -> Line:
        """A stream beside the default one."""
        return Line(self.clock, is_default=False)

    def count_event_wait(self) -> None:
        """The host waits for an event, as it may inside a step."""
        self.journal.counts["event_waits"] += 1

    def synchronize(self) -> None:
        """Wait for all work; errors of earlier kernels appear here."""
        self.acquisition.touch()
        self.close_segment()
        self.pending.drain()

    @contextmanager
    def region(self, fullgraph: bool) -> Iterator[None]:
        """Ops inside form one recipe, as a function compiled with hpu_backend; a host sync ends
        the recipe early (a graph break), or with `fullgraph` raises."""
        if self.region_depth == 0:
            self.close_segment()
        self.region_depth += 1
        before, self._fullgraph = self._fullgraph, self._fullgraph or fullgraph
        try:
            yield
        finally:
            self._fullgraph = before
            self.region_depth -= 1
            if self.region_depth == 0:
                self.close_segment()

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op on CPU tensors under the device's index and integer rules; replays use it too."""
        if func._schema.name.startswith("c10d::"):
            return self._collective(func, args, kwargs)
        result = rules.run(func, args, kwargs, self._mishap)
        name = func._schema.name
        if self.variables.int64() or name in rules.VIEWS or name in rules.EMPTY:
            return result
        for out in tensors_in(result):
            if out.dtype == torch.int64 and out.numel():
                rules.wrap_to_int32(out, name, self._mishap)
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.agree is not None:
            self.agree(func._schema.name, list(tensors_in((args, kwargs))))
        return func(*args, **kwargs)

    def _launch(self, func: Any, name: str, args: Any, kwargs: Any, lazy: bool) -> Any:
        # A recorded copy from the host keeps the value of this moment: it is baked in.
        keeps = self.recording is not None
        inner_args, inner_kwargs = _unwrap(args, keeps), _unwrap(kwargs, keeps)
        result = self.kernel(func, inner_args, inner_kwargs)
        for out in tensors_in(result):
            rules.check_dtype(out, name)
        wrapped = self._wrap(result, args, kwargs)
        if name not in rules.VIEWS:
            for out in device_tensors(wrapped):
                self.clock.stamp(out.block)
        if self.recording is not None:
            self.recording.add(func, inner_args, inner_kwargs, wrapped)
        needs_recipe = name not in rules.EMPTY and not _is_upload(name, args)
        if needs_recipe and (lazy or self.region_depth or name not in rules.VIEWS):
            self._sign(name, args, kwargs, wrapped)
        if not lazy and not self.region_depth:
            self.close_segment()
        return wrapped

    def _sign(self, name: str, args: Any, kwargs: Any, wrapped: Any) -> None:
        parts = self._describe(args), self._describe(kwargs)
        # What lies in an argument's memory (a view, an op in place) needs no room of its own.
        given = {storage_of(one.host) for one in device_tensors((args, kwargs))}
        largest = 0
        for out in device_tensors(wrapped):
            self.segment.number(out.uid)
            if storage_of(out.host) not in given:
                largest = max(largest, out.host.numel() * out.host.element_size())
        self.segment.add(name, parts, largest)

    def _describe(self, value: Any) -> object:
        """What of an argument takes part in a recipe's signature."""
        if isinstance(value, HpuTensor):
            inner = value.host
            number = self.segment.number(value.uid)
            return number, tuple(inner.shape), inner.stride(), str(inner.dtype)
        if isinstance(value, Tensor):
            if value.dim() == 0:
                return value.item(), str(value.dtype)
            return "host", tuple(value.shape), str(value.dtype)
        if isinstance(value, (list, tuple)):
            return tuple(self._describe(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._describe(item)) for key, item in value.items())
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return str(value)
        return type(value).__name__

    def _wrap(self, result: Any, args: Any, kwargs: Any) -> Any:
        """CPU results as device tensors: an in-place op's is its argument, a view's shares its
        storage and its lease, any other takes new memory."""
        known = {id(given.host): given for given in device_tensors((args, kwargs))}
        storages = {storage_of(given.host): given for given in known.values()}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            given = known.get(id(value))
            if given is not None:
                return given
            base = storages.get(storage_of(value))
            if base is not None:
                view = HpuTensor(value, self, base.block, base.lease)
                view.is_view = True
                return view
            made = self.adopt(value)
            storages[storage_of(value)] = made
            return made

        return map_leaves(wrap, result)

    def _fall_back(self, name: str) -> None:
        """The op runs on the host: everything before it must be done first."""
        if self.recording is not None:
            raise RuntimeError(f"{name}: cpu fallback is not supported during hpu graph capturing")
        self.close_segment()
        self.journal.counts["fallbacks"] += 1
        self.journal.fallback_ops[name.removeprefix("aten::")] += 1
        self.journal.misuse("cpu_fallback", "the device has no such op", name)

    def _host_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.compile_only():
            self.journal.misuse("compile_only_read", "nothing was launched", func._schema.name)
            return func(*_unwrap(args), **_unwrap(kwargs)).__class__(0)
        return func(*_unwrap(args), **_unwrap(kwargs))

    def _host_copy(self, source: HpuTensor, kwargs: dict[str, Any]) -> Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        target = torch.empty(source.shape, dtype=dtype)
        return self._to_host(target, source, bool(kwargs.get("non_blocking")))

    def _to_host(self, target: Tensor, source: HpuTensor, non_blocking: bool) -> Tensor:
        """Copy to the host; without waiting, the target is rubbish until somebody waits."""
        if self.recording is not None or not non_blocking:
            self.host_sync("aten::copy_")
        if self.compile_only():
            spoil(target)
            self.journal.misuse("compile_only_read", "nothing was launched", "aten::copy_")
            return target
        if not non_blocking:
            return target.copy_(source.host)
        self.close_segment()
        if self.line.is_default:
            self.pending.copy(target, source.host, self.line)
        else:
            is_whole = self.line.late(source, "aten::copy_", self.journal.misuse)
            self.pending.copy_late(target, source.host, self.line, is_whole)
        return target

    def compile_only(self) -> bool:
        return self.variables.flag("PT_COMPILE_ONLY_MODE")

    def _check_leases(self, name: str, args: Any, kwargs: Any) -> None:
        for given in device_tensors((args, kwargs)):
            lease: Lease | None = given.lease
            if lease is None or not lease.is_over():
                continue
            if name in OVERWRITES and given is args[0]:
                lease.renew()
            elif name not in rules.VIEWS:
                self.journal.misuse(lease.kind, lease.text, name)

    def _check_view_write(self, func: Any, name: str, args: Any) -> None:
        """A graph with a change in place through a view is not supported by the runtime."""
        if not func._schema.is_mutable or not args or name in rules.VIEWS:
            return
        target = args[0]
        if isinstance(target, HpuTensor) and target.is_view:
            text = f"a view of shape {tuple(target.shape)} is changed in place inside a capture"
            self.journal.misuse("view_write", text, name)

    def _mishap(self, kind: str, text: str, op: str) -> None:
        self.journal.misuse(kind, text, op)
        if kind == "index_out_of_range":
            self.pending.fail(f"{op}: {text}")


def _is_composite(func: Any, name: str) -> bool:
    """Whether an op is made of others; such arrive whole only in inference mode."""
    if not name.startswith("aten::") or name in rules.WHOLE:
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(func.name(), "CompositeImplicitAutograd"))


def _is_upload(name: str, args: tuple[Any, ...]) -> bool:
    """A plain copy from the host: moved by DMA, not by a recipe."""
    if name != "aten::copy_" or isinstance(args[1], HpuTensor):
        return False
    return bool(args[0].dtype == args[1].dtype)


def _goes_to_cpu(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and not is_hpu(device)


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get("non_blocking", False))


def _check_devices(name: str, args: Any, kwargs: Any) -> None:
    """Host tensors with dimensions may meet device tensors only in copies."""
    if name == "aten::copy_" or name.startswith(("c10d", "_c10d")):
        return
    for given in tensors_in((args, kwargs)):
        if not isinstance(given, HpuTensor) and given.dim() > 0:
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found at least two "
                f"devices, hpu:0 and cpu (a host tensor of shape {tuple(given.shape)})"
            )


def _unwrap(value: Any, clones_host: bool = False) -> Any:
    def change(leaf: Any) -> Any:
        if isinstance(leaf, HpuTensor):
            return leaf.host
        if clones_host and isinstance(leaf, Tensor):
            return leaf.clone()
        return torch.device("cpu") if is_hpu(leaf) else leaf

    return map_leaves(change, value)

"""EmulatedDevice: runs every op of an HpuTensor on its CPU bytes and enforces the card's rules."""

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from hpu.emulator import faults
from hpu.emulator.card import registry, rules
from hpu.emulator.card.acquisition import Acquisition
from hpu.emulator.card.compile_only import CompileOnly
from hpu.emulator.card.counters import EmulatorCounters
from hpu.emulator.card.memory import Allocation, Memory
from hpu.emulator.card.recipes import Recipes, Segment
from hpu.emulator.card.stream_order import LaunchClock, StreamClock, StreamState
from hpu.emulator.card.tensor import (
    HpuTensor,
    Lifetime,
    is_hpu,
    map_leaves,
    storage_of,
    tensors_in,
    with_index,
)
from hpu.emulator.card.work_queue import WorkQueue, copy_bytes, fill_with_garbage
from hpu.emulator.faults import LARGE_BYTES, LARGE_COPIES, WEDGED_COPIES
from hpu.emulator.settings import EmulatorConfig, RuntimeVariables
from hpu.gaudi_devices import GENERATIONS, has_kernel, release_of

OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")

SCALARS = frozenset((int, float, bool, str, type(None)))

LAZY_NEEDS_VENDOR_TORCH = "lazy mode needs the vendor's build of torch; set PT_HPU_LAZY_MODE=0"


class Recording(Protocol):
    """A capture in progress."""

    @property
    def held_bytes(self) -> int: ...

    def add(self, func: Any, args: Any, kwargs: Any, result: Any, used: list[Allocation]) -> None:
        """Record an op on CPU tensors. `result`: its result as device tensors; `used`: storages of
        its arguments."""
        ...

    def uploaded(self, target: HpuTensor) -> None:
        """Record the target of a copy from the host, which is executed immediately."""
        ...

    def check_stream(self) -> None:
        """Raise RuntimeError if the current stream is not the stream of the capture."""
        ...

    def spoil_outputs(self) -> None:
        """Fill the outputs with garbage."""
        ...


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts from an op's schema. Cached, since reading a schema takes longer than a small op."""

    name: str
    is_composite: bool
    writes: bool
    """Whether the schema declares a write to an argument; False for views."""
    overwrites: bool
    is_view: bool
    is_alias: bool
    is_empty: bool
    is_copy: bool
    is_host_read: bool
    may_wait: bool
    """Whether `rules.waits_for_data` depends on the arguments."""
    is_collective: bool
    is_random: bool
    is_activation: bool
    """Whether the card ignores arguments of the op."""
    is_integer_op: bool
    """Whether `rules.check_bytes` depends on the arguments."""
    is_vendors: bool
    """Whether the op is of the vendor's namespace, which has kernels for the card alone."""
    may_mix_devices: bool


@functools.cache
def op_facts(func: Any) -> OpFacts:
    """Facts about an overload of an op."""
    name: str = func._schema.name
    is_view = name in rules.VIEWS
    return OpFacts(
        name=name,
        is_composite=_is_composite(func, name),
        writes=func._schema.is_mutable and not is_view,
        overwrites=name in OVERWRITES,
        is_view=is_view,
        is_alias=name in rules.ALIASES,
        is_empty=name in rules.EMPTY,
        is_copy=name == "aten::copy_",
        is_host_read=name in rules.HOST_READS,
        may_wait=rules.may_wait_for_data(name),
        is_collective=name.startswith("c10d::"),
        is_random=name in rules.RANDOM,
        is_activation=name in rules.ELUS or name in rules.GELUS,
        is_integer_op=name in rules.SHIFTS or name in rules.DIFFERENCES,
        is_vendors=name.startswith("hpu::"),
        may_mix_devices=name == "aten::copy_" or name.startswith(("c10d", "_c10d")),
    )


@functools.cache
def _name_of(value: object) -> str:
    """Cached str() of a dtype, a device, a layout or a memory format."""
    return str(value)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator of the host inside the block, and restore its state."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


SUMS = ("c10d::allreduce_", "c10d::reduce_")
SUMMED = (torch.float32, torch.bfloat16)
"""Dtypes that the card reduces; the bridge casts others to float32 (process_group_lazy_hccl.cpp,
process_group_hccl_base.cpp)."""
POINT_TO_POINT = ("c10d::send", "c10d::recv_")


class EmulatedDevice:
    """The emulated card of this process."""

    def __init__(self, config: EmulatorConfig, variables: RuntimeVariables) -> None:
        self.config = config
        self.variables = variables
        self.generation = GENERATIONS[config.generation]
        self._writes_float32 = has_kernel(
            "matmul.float32_out", config.generation, release_of(config.release)
        )
        self.counters = EmulatorCounters(config)
        self.memory = Memory(config)
        self.acquisition = Acquisition(config, variables)
        self.recipes = Recipes(config, variables, self.counters, self.memory)
        self.segment = Segment(self.recipes)
        self.queue = WorkQueue(
            self.counters.misuse,
            config.late_copy_s,
            config.late_copy_seed,
            stages_uploads=not self.has_fault("uploads"),
        )
        self.clock = StreamClock()
        self.launches = LaunchClock(config.launch_submit_s)
        self._default_stream = StreamState(self.clock)
        self._streams = threading.local()
        """The current stream of each thread, as in the runtime."""
        self.current_state: Callable[[], StreamState] = lambda: self.stream_state
        """State of the current stream as the runtime's Python code finds it."""
        self.on_default_stream: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which the default stream is the current stream."""
        self.pinned: set[int] = set()
        """Addresses of pinned host tensors."""
        self.released = threading.Event()
        """Ends copies that wait forever."""
        self._vendors_kernels = threading.local()
        """`are_running` in a thread: the card runs an op of the vendor's namespace."""
        self._recording: Callable[[], Recording | None] = lambda: None
        self.is_dry_run = False
        """Whether the real card executes no ops: during a capture that is a dry run (any capture
        without tensor cache), and after a dry run has failed, until another capture succeeds or
        begins without a dry run. The emulator executes the ops of the capture, in place of the
        replay that follows the capture."""
        self.only_compiled = CompileOnly()
        self.in_region = False
        """Whether execution is inside a region compiled with hpu_backend."""
        self.runtime_switches: dict[str, bool] = {}
        """Switches of the runtime without an effect here, by name."""
        self.is_serving = False
        """Whether warm-up is over: compilations, captures, traces and writes to views are then
        misuses."""
        self.in_step = False
        """Whether a step is running: host syncs are then misuses."""
        self.world_size = 1
        self.before_collective: Callable[[str, tuple[Any, ...], dict[str, Any]], None] | None = None
        """Called with the operator's name and arguments before every collective; None: no group of
        several ranks exists."""
        self._base_versions: list[Allocation] = []
        """Base versions of the current segment."""
        self.uids = count()
        self.generator = torch.Generator()
        """Seeds the random operators. Separate from torch's host generator, with the same initial
        seed (createHPUGenerator in the bridge's backend/random.cpp)."""
        self.generator.manual_seed(torch.initial_seed())
        self.graphs: weakref.WeakSet[Recording] = weakref.WeakSet()
        """All graphs that exist."""

    @property
    def stream_state(self) -> StreamState:
        """State of the current stream of this thread."""
        return getattr(self._streams, "state", self._default_stream)

    @stream_state.setter
    def stream_state(self, state: StreamState) -> None:
        self._streams.state = state

    @property
    def recording(self) -> Recording | None:
        """The capture in progress, until it ends or a graph is destroyed. An error in the captured
        function does not end the capture (the bridge's HPUGraph.cpp)."""
        return self._recording()

    @recording.setter
    def recording(self, recording: Recording | None) -> None:
        self._recording = (lambda: None) if recording is None else weakref.ref(recording)

    def is_lazy(self) -> bool:
        first = not self.variables.mode_is_read()
        lazy = self.variables.lazy()
        if first and lazy and not self.config.vendor_torch:
            raise AssertionError(LAZY_NEEDS_VENDOR_TORCH)
        return lazy

    def runs_eagerly(self) -> bool:
        """Whether an op that is called now runs alone: neither in lazy mode nor in compiled
        code."""
        return not self.is_lazy() and not self.in_region

    def from_host(self, inner: Tensor) -> HpuTensor:
        """Allocate device memory for a CPU tensor's storage and wrap it."""
        return HpuTensor(inner, self, self.memory.allocate(inner.untyped_storage().nbytes()))

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run one op that has a device tensor as an argument, or the device as a keyword. `given`:
        the tensors among its arguments."""
        op = op_facts(func)
        if op.is_composite:
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = op.name
        with_index(kwargs.get("device"))
        on_device = [tensor for tensor in given if isinstance(tensor, HpuTensor)]
        self.acquisition.touch()
        if name in rules.MAX_INDEX_DIMS and not self.in_region:
            rules.check_dims(name, args, rules.MAX_INDEX_DIMS)
        if name in rules.COPIED_DIMS and self.is_lazy():
            rules.check_dims(name, args, rules.COPIED_DIMS)
        if name in rules.PUTS and self.is_lazy():
            rules.check_on_card(name, args)
        if rules.is_cast(func, args) and self.is_lazy():
            return torch.ops.aten._to_copy.default(args[0], dtype=torch.bool)
        self._check_lifetimes(op, args, on_device)
        if op.writes:
            self._check_view_write(name, args, kwargs)
        if not (op.is_view or op.is_empty or (op.is_copy and self._is_upload(args))):
            used = {tensor.allocation for tensor in on_device}
            targets = _targets(func, args, kwargs) if op.writes else []
            writes = {target.allocation for target in targets}
            self.use(used - writes, writes, name)
        if name == "aten::copy_" and not isinstance(args[0], HpuTensor):
            return self._to_host(args[0], args[1], _non_blocking(args, kwargs, 2))
        if name == "aten::_to_copy" and _goes_to_cpu(kwargs):
            return self._host_copy(args[0], kwargs)
        if op.is_host_read:
            rules.check_number(name, args)
            self.host_sync(name)
            return self._host_value(func, args, kwargs)
        if op.may_wait and rules.waits_for_data(name, args, kwargs):
            self.host_sync(name)
        lazy = self.is_lazy()
        is_on_host = not self._is_supported(func, name, args, kwargs)
        if is_on_host:
            self._fall_back(name)
        mixes = op.may_mix_devices or (is_on_host and name == "aten::index")
        if len(on_device) < len(given) and not mixes:
            _check_devices(name, given)
        return self._launch(func, op, args, kwargs, on_device, lazy)

    def use(self, reads: Iterable[Allocation], writes: Collection[Allocation], op: str) -> None:
        """Record that the current stream reads and writes storages."""
        self.stream_state.use(reads, writes, op, self.counters.misuse)

    def close_segment(self) -> None:
        """End the segment of collected ops, and launch it."""
        self._base_versions.clear()
        if self.segment.has_ops():
            if recording := self.recording:
                recording.check_stream()
            self.launches.launch()
        if self.segment.close() and self.is_serving:
            ops = self.segment.last_ops
            text = f"a new recipe of {len(ops)} ops was compiled while serving"
            self.counters.misuse("compile_after_warmup", text, " ".join(ops[:8]))

    def host_sync(self, op: str) -> None:
        """Wait for the device on behalf of the host. Raises RuntimeError during a capture; inside a
        step it is a misuse."""
        if self.recording is not None:
            raise RuntimeError(f"{op}: the host cannot read the device during hpu graph capturing")
        self.close_segment()
        self.counters.counts["syncs"] += 1
        if self.in_step:
            self.counters.misuse("host_sync", "the host waits for the device inside a step", op)
        self.queue.complete_all()
        self.clock.finish_all()
        self.launches.finish(self.launches.launched)

    def new_stream(self) -> StreamState:
        """The state of a new stream."""
        return StreamState(self.clock)

    def count_event_wait(self) -> None:
        """Count a host wait for an event, which is allowed inside a step."""
        self.counters.counts["event_waits"] += 1

    def synchronize(self) -> None:
        """Wait for all work. Raises errors of earlier kernels."""
        self.acquisition.touch()
        self.close_segment()
        self.queue.complete_all()
        self.clock.finish_all()
        self.launches.finish(self.launches.launched)

    @contextmanager
    def region(self, key: str) -> Iterator[None]:
        """Ops inside form one recipe of the graph `key`, as in a function compiled with
        hpu_backend; a fallback to the host splits it."""
        self.close_segment()
        self.in_region = True
        self.segment.graph = key
        try:
            yield
        finally:
            self.close_segment()
            self.in_region = False
            self.segment.graph = ""

    def check_on_card(self, name: str) -> None:
        """Raise NotImplementedError, as torch does, for an op of the vendor's namespace on tensors
        of the host: the bridge registers its kernels for the card alone."""
        is_running = getattr(self._vendors_kernels, "are_running", False)
        if not (is_running or self.config.runs_on_host):
            raise NotImplementedError(
                f"Could not run 'hpu::{name}' with arguments from the 'CPU' backend."
            )

    @contextmanager
    def _running_vendors(self) -> Iterator[None]:
        self._vendors_kernels.are_running = True
        try:
            yield
        finally:
            self._vendors_kernels.are_running = False

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op on CPU tensors with the device's rules for indices and integers."""
        op = op_facts(func)
        if op.is_collective:
            return self._collective(func, args, kwargs)
        drawing: AbstractContextManager[None] = nullcontext()
        if op.is_random:
            kwargs, drawing = self._draw(kwargs)
        has_int64 = self.variables.int64()
        args, kwargs = rules.with_small_numbers(
            func, args, kwargs, self._report_misuse, has_int64=has_int64
        )
        if op.name in rules.PUTS and self.is_lazy():
            rules.check_put(op.name, args, self._report_misuse)
        selects = op.name == "aten::masked_select" and self.is_lazy()
        if selects and rules.selects_all(args, self._report_misuse):
            return args[0]
        if op.name == "aten::cumsum_" and self.runs_eagerly():
            rules.check_running_sum(args, self._report_misuse)
        if op.is_integer_op:
            rules.check_bytes(op.name, args, self._report_misuse, is_compiled=self.in_region)
        if op.is_activation:
            func, args, kwargs = self._activation(func, args, kwargs)
        if not self.config.multiplies_float32:
            rules.check_product(op.name, args)
        if op.name == "aten::matmul" and "out" in kwargs and not self._writes_float32:
            rules.check_result_dtype(args, kwargs["out"])
        result: object
        with drawing, self._running_vendors() if op.is_vendors else nullcontext():
            if op.name in rules.SUMS_BY_INDEX and self.is_lazy():
                result = rules.add_by_index(func, args, kwargs, self._report_misuse)
            elif self.config.faults:
                result = self._run_faulty(op.name, func, args, kwargs)
            else:
                result = rules.run(func, args, kwargs, self._report_misuse)
        if op.is_empty:
            for out in tensors_in(result):
                fill_with_garbage(out)
            return result
        if not op.is_view:
            self._wrap_to_int32(result, op.name)
        return result

    def _activation(
        self, func: torch._ops.OpOverload, args: rules.Arguments, kwargs: rules.Keywords
    ) -> tuple[torch._ops.OpOverload, rules.Arguments, rules.Keywords]:
        """The operator that the card runs for an activation, and its arguments. By default each
        gelu is approximated (FillGeluParams in the bridge's gelu_gen.cpp). In compiled code torch
        decomposes elu first."""
        if func._schema.name in rules.GELUS:
            if self.variables.forces_tanh():
                kwargs = {**kwargs, "approximate": "tanh"}
        elif not self.in_region:
            outs = {"out": kwargs["out"]} if "out" in kwargs else {}
            func, args = rules.without_factors(func, args, kwargs, self._report_misuse)
            return func, args, outs
        return func, args, kwargs

    def _wrap_to_int32(self, result: object, name: str) -> None:
        """Wrap int64 values that the card holds as int32."""
        if self.variables.int64():
            return
        for out in tensors_in(result):
            if out.dtype == torch.int64 and out.numel():
                rules.wrap_to_int32(out, name, self._report_misuse)

    def _draw(
        self, kwargs: dict[str, object]
    ) -> tuple[dict[str, object], AbstractContextManager[None]]:
        """Seed a random op. Returns its keyword arguments without the generator, and a context in
        which the op draws with a seed from that generator or, by default, from the card's. On the
        real card a kernel draws from the seed, so the host's generator does not advance. A dry run
        draws no seed (get_seed_hpu in the bridge's backend/random.cpp)."""
        given = kwargs.get("generator")
        generator = given if isinstance(given, torch.Generator) else self.generator
        seed = 0 if self.is_dry_run else int(torch.randint(1 << 32, (), generator=generator))
        without = {**kwargs, "generator": None} if given else kwargs
        return without, _seeded(seed)

    def _run_faulty(
        self,
        name: str,
        func: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        overload = getattr(func, "_overloadname", "")
        mode = "compiled" if self.in_region else "lazy" if self.is_lazy() else "eager"
        run = functools.partial(rules.run, func, args, kwargs, self._report_misuse)
        return faults.run(self.config.faults, f"{name}.{overload}", mode, run, args)

    def has_fault(self, name: str) -> bool:
        """Whether this card has the fault `name`."""
        return name in self.config.faults

    def skips_launch(self, op: str) -> bool:
        """Whether the runtime does not execute a launch, because a capture has failed."""
        if not self.is_dry_run or self.recording is not None:
            return False
        text = "a capture failed, and the process is still in its dry run: nothing is executed"
        self.counters.misuse("dry_run", text, op)
        return True

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.before_collective is not None:
            self.before_collective(func._schema.name, args, kwargs)
        if self.world_size > 1 and self.variables.lazy_collectives() and self.segment.has_ops():
            # A documented fault of the bridge with lazy collectives: emulate its worst effect.
            text = "a collective without mark_step before it may read what is not computed yet"
            self.counters.misuse("unmarked_collective", text, func._schema.name)
            for given in tensors_in((args, kwargs)):
                fill_with_garbage(given)
        if func._schema.name in SUMS:
            wide = [given if given.dtype in SUMMED else given.float() for given in args[0]]
            result = self._run_collective(func, (wide, *args[1:]), kwargs)
            for given, summed in zip(args[0], wide, strict=True):
                if given is not summed:
                    given.copy_(summed)
            return (args[0], *result[1:]) if isinstance(result, tuple) else result
        return self._run_collective(func, args, kwargs)

    def _run_collective(
        self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        result = faults.run(
            self.config.faults, func._schema.name, "lazy", lambda: func(*args, **kwargs), args
        )
        if func._schema.name in POINT_TO_POINT:
            # The caller waits for the work. If this method waited too, gloo would wait for a second
            # receive, and the receive that matches a send may come after later calls.
            return result
        # The card's streams order a collective before later work, also in a replay, which does not
        # wait for the returned Work.
        for work in result if isinstance(result, tuple) else (result,):
            if isinstance(work, torch.ScriptObject):
                work._get_method("wait")()
        return result

    def _launch(
        self, func: Any, op: OpFacts, args: Any, kwargs: Any, given: list[HpuTensor], lazy: bool
    ) -> Any:
        name, recording = op.name, self.recording
        # A graph records the value that the host source of a copy has now; later changes have no
        # effect.
        clones_host = recording is not None
        inner_args, inner_kwargs = _unwrap(args, clones_host), _unwrap(kwargs, clones_host)
        is_upload = op.is_copy and self._is_upload(args)
        if (
            op.is_copy
            and lazy
            and not isinstance(args[1], HpuTensor)
            and not self.variables.int64()
        ):
            rules.check_upload(args[1])
        if is_upload and lazy:
            self._launch_before_upload(args[0])
        if self.only_compiled.is_on and op.writes and not is_upload:
            self.only_compiled.before_write(_targets(func, args, kwargs))
        runs = not (is_upload or op.is_view or op.is_empty)
        if op.is_copy and not isinstance(args[1], HpuTensor) and self._repeats(args[0], args[1]):
            result = copy_bytes(*inner_args[:2])
            self._wrap_to_int32(result, name)
        elif runs and self.skips_launch(name):
            with self._running_vendors():
                result = _result_of_nothing(func, inner_args, inner_kwargs)
        else:
            result = self.kernel(func, inner_args, inner_kwargs)
        outs: list[HpuTensor] = []
        wrapped = self._wrap(op, result, given, outs)
        if self.only_compiled.is_on and not op.is_view:
            if is_upload:
                self.only_compiled.uploaded(args[0])
            elif not op.writes:
                self.only_compiled.created(outs, given)
        if not op.is_view:
            # Launches wait for uploads to their inputs without an event.
            writer = self._default_stream if is_upload else self.stream_state
            for out in outs:
                writer.note_write(out.allocation)
        if name in ("aten::copy_", "aten::_to_copy"):
            self._check_fp8(name, outs)
        if recording is not None and is_upload:
            recording.uploaded(args[0])
        elif recording is not None:
            used = [tensor.allocation for tensor in given]
            recording.add(func, inner_args, inner_kwargs, wrapped, used)
        if is_upload and self.launches.is_in_use(args[0].allocation):
            self.counters.counts["upload_waits"] += 1
        if op.is_copy and _is_sent_unchanged(args) and _non_blocking(args, kwargs, 2):
            is_pinned = args[1].data_ptr() in self.pinned
            self.queue.upload(args[0].host, args[1], self.stream_state, is_pinned=is_pinned)
        needs_recipe = not op.is_empty and not is_upload
        if needs_recipe and (lazy or self.in_region or not op.is_view):
            self._add_to_segment(op, args, kwargs, given, outs)
        if not lazy and not self.in_region:
            self.counters.counts["eager_ops"] += self.segment.has_ops()
            self.close_segment()
        return wrapped

    def _check_fp8(self, op: str, outs: list[HpuTensor]) -> None:
        """Report float8_e4m3fn results of a copy or a cast that exceed the card's range."""
        largest = self.generation.fp8_max
        for out in outs:
            if out.dtype == torch.float8_e4m3fn and out.numel():
                worst = float(out.host.float().abs().max())
                if worst > largest:
                    text = f"{worst:g} in FP8, the card's largest is {largest:g}"
                    self.counters.misuse("fp8_range", text, op)

    def _launch_before_upload(self, target: HpuTensor) -> None:
        """Launch the collected operations before an upload, if they write its target. If they only
        read the target, a real card uploads before it runs them, so that they read the new data;
        this is reported (copy_hpu_lazy_H2D in the bridge's lazy_kernels.cpp)."""
        if self.launches.is_written_next(target.allocation):
            self.close_segment()
        elif self.launches.is_read_next(target.allocation):
            text = "an upload precedes operations that read its target and are not launched yet"
            self.counters.misuse("upload_order", text, "aten::copy_")

    def _add_to_segment(
        self, op: OpFacts, args: Any, kwargs: Any, given: list[HpuTensor], outs: list[HpuTensor]
    ) -> None:
        name, lazy = op.name, self.is_lazy()
        parts = self._describe(args), self._describe(kwargs)
        # A result in an argument's memory needs no workspace.
        storages = {id(tensor.allocation) for tensor in given}
        largest = 0
        for tensor in given:
            self.launches.use(tensor.allocation)
            if not op.is_view:
                self.launches.read(tensor.allocation)
        for out in outs:
            self.launches.use(out.allocation)
            if not op.is_view:
                self.launches.write(out.allocation)
            self.segment.number(out.uid)
            is_copied = lazy and name in rules.COPIED_TARGETS
            if is_copied or id(out.allocation) not in storages:
                largest = max(largest, out.host.numel() * out.host.element_size())
        self.segment.add(name, parts, largest)

    def _describe(self, value: object) -> object:
        if type(value) in SCALARS:
            return value
        if isinstance(value, HpuTensor):
            inner = value.host
            number = self.segment.number(value.uid)
            return number, tuple(inner.shape), inner.stride(), _name_of(inner.dtype)
        if isinstance(value, Tensor):
            if value.dim() == 0:
                return value.item(), str(value.dtype)
            return "host", tuple(value.shape), str(value.dtype)
        if isinstance(value, (list, tuple)):
            return tuple([self._describe(item) for item in value])
        if isinstance(value, dict):
            return tuple((key, self._describe(item)) for key, item in value.items())
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return _name_of(value)
        return type(value).__name__

    def _wrap(self, op: OpFacts, result: Any, given: list[HpuTensor], outs: list[HpuTensor]) -> Any:
        """Wrap CPU results as device tensors and append them to `outs`: an in-place op returns its
        argument, a view shares storage and lifetime with its base, any other result allocates
        memory."""
        known = {id(tensor.host): tensor for tensor in given}
        storages = {storage_of(tensor.host): tensor for tensor in given}

        def wrap(value: object) -> Any:
            if not isinstance(value, Tensor):
                return value
            rules.check_dtype(value, op.name)
            found = known.get(id(value))
            if found is None:
                storage = storage_of(value)
                base = storages.get(storage)
                if base is None:
                    found = storages[storage] = self.from_host(value)
                else:
                    found = HpuTensor(value, self, base.allocation, base.lifetime)
                    found.is_view = base.is_view or not op.is_alias
                    found.kinds = base.kinds if op.is_alias else rules.add_kind(base.kinds, op.name)
            elif found.shape != value.shape:
                raise RuntimeError(
                    f"{op.name}: the emulator does not resize tensors, here from "
                    f"{tuple(found.shape)} to {tuple(value.shape)}"
                )
            outs.append(found)
            return found

        return map_leaves(wrap, result)

    def _is_supported(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        config = self.config
        if config.faults and self.is_lazy() and faults.on_host(config.faults, name):
            return False
        if name in config.unsupported or name in config.extra_supported:
            return name in config.extra_supported
        mode = registry.Mode(self.is_lazy(), self.variables.int64(), is_compiled=self.in_region)
        return registry.is_supported(func, args, kwargs, config.generation, mode)

    def _fall_back(self, name: str) -> None:
        """Launch the collected ops, and count an op that runs on the host. Raises RuntimeError
        during a capture, and for an op that must not run on the host."""
        if self.recording is not None:
            raise RuntimeError(f"{name}: cpu fallback is not supported during hpu graph capturing")
        if not self.variables.may_fall_back(name):
            raise RuntimeError(f"{name} is not yet supported on HPU.")
        self.close_segment()
        self.counters.counts["fallbacks"] += 1
        self.counters.fallback_ops[name.removeprefix("aten::")] += 1
        self.counters.misuse("cpu_fallback", "the device has no such op", name)

    def _host_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.only_compiled.is_on:
            self.counters.misuse("compile_only_read", "nothing was launched", func._schema.name)
            return func(*_unwrap(args), **_unwrap(kwargs)).__class__(0)
        return func(*_unwrap(args), **_unwrap(kwargs))

    def _host_copy(self, source: HpuTensor, kwargs: dict[str, Any]) -> Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        target = torch.empty(source.shape, dtype=dtype)
        fill_with_garbage(target)
        return self._to_host(target, source, bool(kwargs.get("non_blocking")))

    def _to_host(self, target: Tensor, source: HpuTensor, non_blocking: bool) -> Tensor:
        """Copy to the host. With `non_blocking`, unless the host converts the dtype, the target
        keeps its contents (garbage in a new tensor) until the host has waited."""
        non_blocking = non_blocking and not self._converts(target, source)
        if self.recording is not None or not non_blocking:
            self.host_sync("aten::copy_")
        self._join_launches(target, non_blocking=non_blocking)
        self._wait_for_large_copy(target)
        if self.only_compiled.is_on:
            fill_with_garbage(target)
            self.counters.misuse("compile_only_read", "nothing was launched", "aten::copy_")
            return target
        given, target = target, self._arrival(target, source)
        if not non_blocking:
            copy_bytes(target, source.host)
            return given
        self.close_segment()
        is_late = given.data_ptr() not in self.pinned
        lost = "default-copies" if self.stream_state.is_default else "host-copies"
        if self.has_fault(lost):
            # The copy never arrives.
            return given
        if self.stream_state.is_default:
            self.queue.copy(target, source.host, self.stream_state, is_late=is_late)
        else:
            is_valid = self.stream_state.deferred_check(source, "aten::copy_", self.counters.misuse)
            # Not the device tensor itself: it would keep its memory allocated.
            host = source.host
            self.queue.copy_deferred(
                target,
                self.stream_state,
                lambda: host if is_valid() else None,
                is_late=is_late,
            )
        return given

    def _converts(self, target: Tensor, source: HpuTensor) -> bool:
        """Whether a copy to the host changes the dtype there, for which the host waits: int64 that
        the card holds as int32, and in lazy mode every other change of dtype. In lazy mode it is
        False for a pinned target (copy_hpu_ in the bridge's basic_kernels.cpp, _copy_from_d2h in
        its copy_from.cpp)."""
        if source.dtype == torch.int64 and not self.variables.int64():
            return not (self.is_lazy() and target.data_ptr() in self.pinned)
        is_pinned = target.data_ptr() in self.pinned
        return self.is_lazy() and target.dtype != source.dtype and not is_pinned

    def _arrival(self, target: Tensor, source: HpuTensor) -> Tensor:
        """Host tensor into which a copy to a non-contiguous `target` writes: in lazy mode a
        contiguous copy, so that `target` does not change; in eager mode, unless `target` is dense,
        the memory from its first address on (copy_hpu_lazy_D2H in the bridge's lazy_kernels.cpp,
        _copy_from_d2h in its copy_from.cpp)."""
        self._repeats(target, source)
        is_dense = torch.empty_like(target, device="meta").stride() == target.stride()
        if target.is_contiguous() or (is_dense and not self.is_lazy()):
            return target
        text = f"the host's tensor has shape {tuple(target.shape)} and strides {target.stride()}"
        self.counters.misuse("host_layout", text, "aten::copy_")
        if self.is_lazy():
            return target.contiguous()
        return target.as_strided(target.shape, torch.empty(target.shape, device="meta").stride())

    def _repeats(self, target: Tensor, source: Tensor) -> bool:
        """Whether a copy between host and card would have to broadcast its source. Reported as a
        misuse."""
        if target.numel() == source.numel():
            return False
        text = f"a source of shape {tuple(source.shape)} for {tuple(target.shape)}"
        self.counters.misuse("copy_broadcast", text, "aten::copy_")
        return True

    def _join_launches(self, target: Tensor, *, non_blocking: bool) -> None:
        """Before a copy to the host in lazy mode: wait for the thread that submits launches, except
        for an asynchronous copy to pinned memory (copy_hpu_lazy_D2H in the bridge's
        lazy_kernels.cpp)."""
        is_pinned = target.data_ptr() in self.pinned
        if not self.is_lazy() or (non_blocking and is_pinned):
            return
        self.close_segment()
        if WEDGED_COPIES in self.config.faults and not self.stream_state.is_default:
            self.released.wait()
            raise RuntimeError("the card was released while a copy waited for a launch")
        self.counters.counts["launch_joins"] += self.launches.join()

    def _wait_for_large_copy(self, target: Tensor) -> None:
        if LARGE_COPIES not in self.config.faults or target.nbytes < LARGE_BYTES:
            return
        if self.is_lazy() and self.variables.native("PT_HPU_ENABLE_D2H_ASYNC_THREAD") != "0":
            self.released.wait()
            raise RuntimeError("the card was released while a large copy waited")

    @contextmanager
    def compile_only(self) -> Iterator[None]:
        """Context in which recipes are compiled but not launched."""
        self.close_segment()
        self.only_compiled.is_on = True
        try:
            yield
        finally:
            self.close_segment()
            self.only_compiled.end()

    def _check_lifetimes(self, op: OpFacts, args: Any, given: list[HpuTensor]) -> None:
        for tensor in given:
            lifetime: Lifetime | None = tensor.lifetime
            if lifetime is None or not lifetime.has_ended():
                continue
            if op.overwrites and tensor is args[0]:
                lifetime.renew()
            elif not op.is_view:
                self.counters.misuse(lifetime.kind, lifetime.text, op.name)

    def _check_view_write(self, name: str, args: Any, kwargs: Any) -> None:
        """Report a write to a view in lazy mode: during a capture, while serving, or by `out`.
        Outside of a capture, the write allocates a copy of the view's base until the segment is
        launched."""
        target = kwargs.get("out", args[0] if args else None)
        if not (isinstance(target, HpuTensor) and target.is_view and self.is_lazy()):
            return
        shape, size = tuple(target.shape), target.allocation.size
        if self.recording is not None:
            text = f"a view of shape {shape} is changed in place inside a capture"
            self.counters.misuse("view_write", text, name)
            return
        self._base_versions.append(self.memory.allocate(size))
        self.counters.counts["base_versions"] += 1
        if "out" in kwargs:
            text = f"out= is a view of shape {shape}, which the runtime does not support"
            self.counters.misuse("view_write", text, name)
        elif self.is_serving:
            text = f"a write to a view of shape {shape} copies its whole base of {size} bytes"
            self.counters.misuse("view_write", text, name)

    def _is_upload(self, args: tuple[Tensor, ...]) -> bool:
        """Whether a copy comes from the host by DMA, not by a recipe. In lazy mode a recipe inserts
        an upload into a view (copy_hpu_lazy_ in the bridge's lazy_kernels.cpp), in eager mode into
        a tensor that is not contiguous (_copy_from_h2d in its copy_from.cpp). The host converts
        another dtype in lazy mode (copy_hpu_ in basic_kernels.cpp), a recipe in eager mode."""
        target = args[0]
        if self.is_lazy():
            is_inserted = isinstance(target, HpuTensor) and target.is_view
            return not isinstance(args[1], HpuTensor) and not is_inserted
        is_inserted = isinstance(target, HpuTensor) and not target.is_contiguous()
        return _is_sent_unchanged(args) and not is_inserted

    def _report_misuse(self, kind: str, text: str, op: str) -> None:
        self.counters.misuse(kind, text, op)
        if kind == "index_out_of_range":
            self.queue.fail(f"{op}: {text}")


def _targets(
    func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[HpuTensor]:
    found: list[HpuTensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [target for target in tensors_in(given) if isinstance(target, HpuTensor)]
    return found


def _result_of_nothing(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an op that is not executed: its target unchanged, or garbage."""
    if func._schema.is_mutable:
        return kwargs.get("out", args[0] if args else None)
    result = func(*args, **kwargs)
    for out in tensors_in(result):
        fill_with_garbage(out)
    return result


def _is_composite(func: Any, name: str) -> bool:
    """Whether an op is composed of other ops; only inference mode passes such an op
    undecomposed."""
    if not name.startswith("aten::") or name in rules.UNDECOMPOSED:
        return False
    if name == "aten::matmul" and func._schema.overload_name == "out":
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(func.name(), "CompositeImplicitAutograd"))


def _is_sent_unchanged(args: tuple[Tensor, ...]) -> bool:
    """Whether a copy moves the bytes of a host tensor as they are."""
    return not isinstance(args[1], HpuTensor) and bool(args[0].dtype == args[1].dtype)


def _goes_to_cpu(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and not is_hpu(device)


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> bool:
    return bool(args[position] if len(args) > position else kwargs.get("non_blocking", False))


def _check_devices(name: str, given: list[Tensor]) -> None:
    """Raise RuntimeError for a host tensor with dimensions."""
    for tensor in given:
        if not isinstance(tensor, HpuTensor) and tensor.dim() > 0:
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found at least two "
                f"devices, hpu:0 and cpu (a host tensor of shape {tuple(tensor.shape)})"
            )


def _unwrap(value: Any, clones_host: bool = False) -> Any:
    def change(leaf: object) -> Any:
        if isinstance(leaf, HpuTensor):
            return leaf.host
        if clones_host and isinstance(leaf, Tensor):
            return leaf.clone()
        return torch.device("cpu") if is_hpu(leaf) else leaf

    return map_leaves(change, value)

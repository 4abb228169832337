"""HPUGraph: a recording of the ops between begin and end, replayed without the program's Python
code, so that accidentally captured constants become visible.

A replay with static tensors (tensor cache on) writes to the tensors of the capture. Without tensor
cache, each replay allocates and frees its intermediates; the intermediates of the capture are
filled with garbage.
"""

import gc
import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpu.emulator.card import rules
from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.card.memory import Allocation
from hpu.emulator.card.stream_order import StreamState
from hpu.emulator.card.tensor import HpuTensor, device_tensors, map_leaves, storage_of, tensors_in
from hpu.emulator.card.work_queue import fill_with_garbage


@dataclass(slots=True)
class ReplayCount:
    """Number of replays of a graph."""

    value: int = 0


@dataclass(slots=True)
class OutputLifetime:
    """Lifetime of a graph's output: ends with the next replay."""

    replays: ReplayCount
    until: int
    kind: str = "stale_output"
    text: str = "a graph's output is read after the graph's next replay has overwritten it"

    def has_ended(self) -> bool:
        return self.replays.value != self.until

    def renew(self) -> None:
        self.until = self.replays.value


@dataclass(slots=True)
class InputLifetime:
    """Lifetime of an input of the first call: ends when the input of a later call is copied into
    it."""

    overwritten: bool = False
    kind: str = "input_overwritten"
    text: str = "the first call's input holds the inputs of a later call"

    def has_ended(self) -> bool:
        return self.overwritten

    def renew(self) -> None:
        self.overwritten = False


@dataclass(slots=True)
class FreedLifetime:
    """Lifetime of an intermediate of a graph without tensor cache: always ended."""

    kind: str = "freed_intermediate"
    text: str = "an intermediate was freed after capture; list it in cache_tensors_list"

    def has_ended(self) -> bool:
        return True

    def renew(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Slot:
    """Index of a tensor in a recording's table."""

    number: int


class Step(NamedTuple):
    """One recorded op: arguments and results as slots."""

    func: Any
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    constants: tuple[Tensor, ...] | None
    """Values that a random op drew, which each replay repeats. The bridge makes a seed for each
    replay, in code that it calls untested (ExecuteCachedGraph in hpu_lazy_tensors.cpp)."""
    is_static: bool
    """Whether a static replay may skip the op: a view, or memory without contents."""


class HPUGraph:
    """A recording of the ops of `device`. Raises RuntimeError for calls that the runtime
    rejects."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._steps: list[Step] = []
        self._table: list[Tensor | None] = []
        self._slot_of: dict[int, int] = {}
        self._created: dict[int, weakref.ref[HpuTensor]] = {}
        self._allocations: list[Allocation] = []
        self._graph_memory: Allocation | None = None
        self._marked: list[Tensor] = []
        self._input_slots: list[int | None] = []
        self._own: weakref.WeakSet[Allocation] = weakref.WeakSet()
        """Storages that the captured ops created."""
        self._held: set[Allocation] = set()
        """Storages of other tensors that the captured ops use, except the inputs: they stay
        allocated (capture_end in the bridge's HPUGraph.cpp)."""
        self._used: weakref.WeakSet[Allocation] = weakref.WeakSet()
        """Storages that every replay reads or writes, except the inputs."""
        self._written: weakref.WeakSet[Allocation] = weakref.WeakSet()
        """Storages that every replay changes in place, except the inputs."""
        self._written_inputs: set[int] = set()
        """Slots of inputs that every replay changes in place."""
        self._read_inputs: weakref.WeakSet[Allocation] = weakref.WeakSet()
        """Storages of the inputs of the capture that the captured ops read and do not change."""
        self._returns_input = False
        """Whether an output is an unchanged input, or a view of an unchanged input."""
        self._results: list[tuple[int, Tensor]] = []
        """Slots, and the tensors that must have the slots' values after a replay."""
        self._stream: StreamState | None = None
        """The stream on which the capture began."""
        self._input_shapes: list[torch.Size] = []
        self._input_twins: list[int] = []
        """For each marked input the first index at which the same tensor is marked."""
        self._has_user_outputs = False
        self._is_static = True
        self._is_dry = False
        """Whether the capture is a dry run, whose intermediates the graph does not keep
        allocated."""
        self._follows_failure = False
        """Whether the process was still in the dry run of a capture that failed."""
        self._first_results: dict[int, list[Tensor]] = {}
        """First results of steps, by their slot, for a faulty card that computes the steps only
        once."""
        self._first_inputs: dict[int, Tensor] = {}
        """Copies of the inputs of the capture, by slot, for a faulty card whose views are
        constants."""
        device.graphs.add(self)

    @property
    def held_bytes(self) -> int:
        """Device memory that the graph and its outputs keep in use."""
        own = self._graph_memory.size if self._graph_memory else 0
        outputs = {
            storage_of(value): value.untyped_storage().nbytes() for _, value in self._results
        }
        return own + sum(outputs.values())

    def spoil_outputs(self) -> None:
        """Fill the outputs with garbage, as a card does whose graphs share the outputs' memory."""
        for _, value in self._results:
            fill_with_garbage(value)

    def capture_begin(self, dry_run: bool = False) -> None:
        """Start recording; a process captures one graph at a time."""
        device = self._device
        if device.recording is not None:
            raise RuntimeError("an hpu graph is being captured already: one at a time")
        if device.world_size > 1 and not device.variables.lazy_collectives():
            raise RuntimeError(
                f"hpu graphs on {device.world_size} cards need PT_HPU_ENABLE_LAZY_COLLECTIVES=true"
            )
        device.acquisition.touch()
        device.close_segment()
        if device.is_serving:
            device.counters.misuse("capture_after_warmup", "a new graph is captured while serving")
        self._follows_failure = device.is_dry_run
        self._is_dry = device.is_dry_run = dry_run
        self._stream = device.stream_state
        device.recording = self

    def check_stream(self) -> None:
        """Raise RuntimeError if the current stream is not the stream on which the capture began."""
        if self._device.stream_state is not self._stream:
            raise RuntimeError("GRAPH:: Capture must end on the same stream it began on.")

    def capture_end(self) -> None:
        """Compile the recording. If compilation fails, the process stays in the capture's dry
        run."""
        device = self._device
        if not self._stream:
            return
        self.check_stream()
        self._check_marked_inputs()
        device.recording = None
        device.close_segment()
        self._stream = None
        self._match_inputs()
        most = device.config.max_graph_ops
        if most is not None and len(self._steps) > most:
            raise RuntimeError(
                f"Graph compile failed. synStatus=synFail 26 [Generic failure]: {len(self._steps)} "
                f"nodes, at most {most}"
            )
        self._graph_memory = device.memory.allocate(device.config.graph_bytes)
        device.is_dry_run = self._follows_failure and device.has_fault("graph-failures")
        device.counters.counts["captures"] += 1

    def add(self, func: Any, args: Any, kwargs: Any, result: Any, used: list[Allocation]) -> None:
        """Append an op on CPU tensors. `result`: what the program received; `used`: storages of the
        arguments."""
        self._used.update(used)
        name = func._schema.name
        outs = device_tensors(result)
        self._held.update(allocation for allocation in used if allocation not in self._own)
        shared = {storage_of(given) for given in tensors_in((args, kwargs))}
        slot_args, slot_kwargs = self._slots(args), self._slots(kwargs)
        for out in outs:
            if id(out.host) not in self._slot_of:
                if storage_of(out.host) not in shared:
                    self._own.add(out.allocation)
                self._created[self._slot_number(out.host)] = weakref.ref(out)
                if not self._is_dry:
                    self._allocations.append(out.allocation)
        results = tuple(self._slot_number(out.host) for out in outs)
        constants = None
        if name in rules.RANDOM:
            constants = tuple(out.host.clone() for out in outs)
            self._device.counters.misuse(
                "random_in_graph", "a replay draws the captured numbers again", name
            )
        # The schemas of collectives do not declare that they write to their arguments.
        is_mutable = func._schema.is_mutable or name.startswith("c10d::")
        if is_mutable:
            self._written.update(out.allocation for out in outs)
        is_view = not is_mutable and all(storage_of(out.host) in shared for out in outs)
        is_static = bool(outs) and (is_view or name in rules.EMPTY)
        self._steps.append(Step(func, slot_args, slot_kwargs, results, constants, is_static))

    def uploaded(self, target: HpuTensor) -> None:
        """Make the target of a copy from the host a constant of the graph: the copy is executed
        during the capture, and no replay repeats it (copy_hpu_lazy_H2D in the bridge's
        lazy_kernels.cpp)."""
        storage = storage_of(target.host)
        same = {
            slot
            for slot in self._created
            if (value := self._table[slot]) is not None and storage_of(value) == storage
        }
        for slot in same:
            del self._created[slot]
        self._steps = [
            step
            for step in self._steps
            if not (step.func._schema.name in rules.EMPTY and same.issuperset(step.results))
        ]
        self._own.discard(target.allocation)
        self._held.add(target.allocation)

    def mark_user_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Mark the inputs of a capture in progress, in the order of `replayV3`'s argument."""
        if self._device.recording is not self:
            raise RuntimeError("mark_user_inputs must be called while capturing is in progress")
        self._marked = list(tensors)
        self._input_shapes += [given.shape for given in tensors]
        self._input_twins = _first_twins(tensors)

    def _check_marked_inputs(self) -> None:
        """Raise RuntimeError if the runtime compares a tensor that the graph reads with a marked
        input on the host: it compares with each in turn, until one is this tensor
        (saveInputsAndOutputs in the bridge's lazy_executor.cpp)."""
        on_host = [at for at, given in enumerate(self._marked) if not isinstance(given, HpuTensor)]
        if not on_host:
            return
        before = self._marked[: on_host[0]]
        found = {
            given.allocation
            for given in before
            if isinstance(given, HpuTensor) and not given.is_view
        }
        if any(read not in found for read in self._held):
            raise RuntimeError("Got a non-HPU tensor, expecting an HPU tensor")

    def _match_inputs(self) -> None:
        """Find the marked inputs among the tensors that were read. The runtime compares identities.
        The graph input of a view is its base, which is not a marked tensor (the bridge's
        lazy_executor.cpp, saveInputsAndOutputs)."""
        for given in self._marked:
            slot = None
            if isinstance(given, HpuTensor) and not given.is_view:
                slot = self._slot_of.get(id(given.host))
            if slot is not None and isinstance(given, HpuTensor):
                self._used.discard(given.allocation)
                self._held.discard(given.allocation)
                if given.allocation in self._written:
                    self._written.discard(given.allocation)
                    self._written_inputs.add(slot)
                else:
                    self._read_inputs.add(given.allocation)
                if self._device.has_fault("graph-views"):
                    self._first_inputs[slot] = given.host.clone()
            self._input_slots.append(slot)
        self._marked.clear()

    def mark_user_outputs(self, tensors: Iterable[Tensor]) -> None:
        """Mark the outputs, which keep their memory when intermediates are freed. Raises
        RuntimeError during a capture and for a second call."""
        if self._stream:
            raise RuntimeError("GRAPH:: Capture in progress")
        if self._has_user_outputs:
            raise RuntimeError("mark_user_outputs is called more than once for the same graph")
        self._has_user_outputs = True
        self._keep(tensors)

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of outputs. No replay writes an output that is an unchanged input: the
        wrapper returns the tensor of the first call (mark_user_outputs in the bridge's
        HPUGraph.cpp, wrapped_hpugraph_forward in its graphs.py)."""
        for given in tensors:
            if isinstance(given, HpuTensor) and given.allocation in self._read_inputs:
                self._returns_input = True
            elif isinstance(given, HpuTensor) and id(given.host) in self._slot_of:
                self._results.append((self._slot_of[id(given.host)], given.host))
                self._allocations.append(given.allocation)

    def get_user_input_match_indices(self) -> list[int]:
        """Indices of the marked inputs that the graph uses."""
        return [index for index, slot in enumerate(self._input_slots) if slot is not None]

    def free_intermediates(self, keep: Sequence[Tensor] = ()) -> None:
        """Free and overwrite the intermediates except `keep`, for a graph without tensor cache."""
        self._is_static = False
        self._allocations.clear()
        self._keep(keep)
        static = {storage_of(value) for _, value in self._results}
        static |= {
            storage_of(value)
            for slot, value in enumerate(self._table)
            if value is not None and slot not in self._created
        }
        for slot, wrapper in self._created.items():
            value = self._table[slot]
            self._table[slot] = None
            if value is None or storage_of(value) in static:
                continue
            fill_with_garbage(value)
            alive = wrapper()
            if alive is not None:
                alive.lifetime = FreedLifetime()
        self.clear_inputs()
        self._created.clear()
        self._slot_of.clear()

    def replay(self, asynchronous: bool = False) -> None:
        """Run on the current contents of the captured tensors."""
        self._count((), ())
        if self._device.skips_launch("replay") or self._device.has_fault("graph-replay"):
            return
        if self._is_static:
            self._run_static()
        else:
            self._run_detached({})

    def replayV2(
        self, static: Sequence[Tensor], tensors: Sequence[Tensor], asynchronous: bool = False
    ) -> None:
        """Copy `tensors` into `static`, then replay."""
        for target, source in zip(static, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        self.replay(asynchronous)

    def replayV3(self, tensors: Sequence[Tensor], asynchronous: bool = False) -> None:
        """Run on the caller's tensors instead of the marked inputs."""
        for shape, given in zip(self._input_shapes, tensors, strict=True):
            if given.shape != shape:
                raise RuntimeError(
                    "HPU GRAPH:: Mark User Input Sizes is not same Replay Input Sizes: "
                    f"{tuple(given.shape)} for {tuple(shape)}"
                )
        if _first_twins(tensors) != self._input_twins:
            text = "tensors are the same in a replay and were not in the capture, or the reverse"
            self._device.counters.misuse("aliased_inputs", text, "replayV3")
        bound = {
            slot: given
            for slot, given in zip(self._input_slots, tensors, strict=True)
            if slot is not None and isinstance(given, HpuTensor)
        }
        if self._returns_input:
            text = "an output is an input: each replay returns the tensor of the first call"
            self._device.counters.misuse("input_returned", text, "replayV3")
        inputs = {slot: given.allocation for slot, given in bound.items()}
        self._count(
            inputs.values(),
            [storage for slot, storage in inputs.items() if slot in self._written_inputs],
        )
        if self._device.skips_launch("replayV3") or self._device.has_fault("graph-replay"):
            return
        if self._device.has_fault("graph-inputs"):
            bound.clear()
        self._run_detached({slot: given.host for slot, given in bound.items()})

    def clear_inputs(self) -> None:
        if self._device.has_fault("graph-inputs"):
            return
        for slot in self._input_slots:
            if slot is not None:
                self._table[slot] = None

    def __del__(self) -> None:
        # `_device` is missing if the constructor raised.
        if hasattr(self, "_device"):
            self._end_other_capture()

    def _end_other_capture(self) -> None:
        """End the capture in progress, as the destruction of any graph does: the captured graph
        lacks later operations (the bridge's HPUGraph.cpp, which changes the state of the process).
        """
        device = self._device
        capture = device.recording
        if not capture or capture is self:
            return
        device.recording = None
        device.counters.misuse(
            "capture_ended", "a graph was destroyed while another graph is captured"
        )

    def reset(self) -> None:
        """Drop the recording and free its memory."""
        self._end_other_capture()
        self._steps.clear()
        self._table.clear()
        self._slot_of.clear()
        self._created.clear()
        self._allocations.clear()
        self._held.clear()
        self._results.clear()
        self._graph_memory = None

    def _count(self, inputs: Collection[Allocation], written: Iterable[Allocation]) -> None:
        """Count a launch that reads the storages `inputs`, and changes `written`."""
        if self._device.recording is not None:
            raise RuntimeError("an hpu graph cannot be replayed during hpu graph capturing")
        self._device.acquisition.touch()
        self._device.close_segment()
        self._device.counters.counts["replays"] += 1
        if self._device.has_fault("graph-outputs"):
            for graph in self._device.graphs:
                if graph is not self:
                    graph.spoil_outputs()
        writes = {*self._written, *self._allocations, *written}
        self._device.use(({*self._used, *inputs} - writes), writes, "replay")
        for used in (*self._used, *self._allocations, *inputs):
            self._device.launches.use(used)
        self._device.launches.launch()

    def _run_static(self) -> None:
        table = self._table
        for step in self._steps:
            if step.is_static:
                continue
            fresh = self._compute(step, table)
            for slot, value in zip(step.results, fresh, strict=True):
                target = table[slot]
                if target is not None and target is not value:
                    target.copy_(value)

    def _run_detached(self, bound: dict[int, Tensor]) -> None:
        table = list(self._table)
        for slot, given in bound.items():
            table[slot] = given
        for step in self._steps:
            for slot, value in zip(step.results, self._compute(step, table), strict=True):
                table[slot] = value
        for slot, target in self._results:
            found = table[slot]
            if found is not None and found is not target:
                target.copy_(found)

    def _compute(self, step: Step, table: Sequence[Tensor | None]) -> list[Tensor]:
        if step.constants is not None:
            return self._replay_constants(step, step.constants, table)

        def fill(leaf: object) -> object:
            if not isinstance(leaf, Slot):
                return leaf
            if step.is_static and leaf.number in self._first_inputs:
                return self._first_inputs[leaf.number]
            return table[leaf.number]

        args, kwargs = map_leaves(fill, step.args), map_leaves(fill, step.kwargs)
        name = step.func._schema.name
        if name == "aten::index_copy_" and self._loses_writes:
            args = (args[0].clone(), *args[1:])
        if name == "c10d::allreduce_" and self._device.has_fault("captured-collectives"):
            return tensors_in(args)
        found = tensors_in(self._device.kernel(step.func, args, kwargs))
        if self._device.config.faults and self._is_repeated(step, name):
            first = [value.clone() for value in found]
            return self._first_results.setdefault(step.results[0], first)
        return found

    def _is_repeated(self, step: Step, name: str) -> bool:
        """Whether a fault makes a step return the result of its first replay."""
        has_fault = self._device.has_fault
        if name == "aten::topk":
            return has_fault("graph-sampler") and not self._is_static
        if name == "aten::slice":
            return has_fault("graph-cache-slices") and step.args[0].number not in self._input_slots
        if name != "aten::index_select":
            return False
        source = step.args[0].number
        if has_fault("graph-cache-views"):
            return any(source in other.results and other.is_static for other in self._steps)
        if not has_fault("graph-state-updates"):
            return False
        later = itertools.dropwhile(lambda other: other is not step, self._steps)
        return any(
            other.func._schema.name == "aten::index_copy_" and other.args[0].number == source
            for other in later
        )

    @property
    def _loses_writes(self) -> bool:
        """Whether a fault loses the in-place writes of a replay without tensor cache."""
        return not self._is_static and self._device.has_fault("graph-cache-writes")

    def _replay_constants(
        self, step: Step, constants: tuple[Tensor, ...], table: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The captured random values, in place if the op was in place."""
        if not step.func._schema.is_mutable:
            return [value.clone() for value in constants]
        fresh = []
        for slot, constant in zip(step.results, constants, strict=True):
            target = table[slot]
            fresh.append(constant.clone() if target is None else target.copy_(constant))
        return fresh

    def _slots(self, value: Any) -> Any:
        def change(leaf: object) -> Any:
            return Slot(self._slot_number(leaf)) if isinstance(leaf, Tensor) else leaf

        return map_leaves(change, value)

    def _slot_number(self, inner: Tensor) -> int:
        slot = self._slot_of.get(id(inner))
        if slot is None:
            slot = len(self._table)
            self._slot_of[id(inner)] = slot
            self._table.append(inner)
        return slot


def _first_twins(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the first index at which the same tensor is given."""
    known = [id(given) for given in tensors]
    return [known.index(identity) for identity in known]


class GraphContext:
    """`with torch.hpu.graph(g):` records into `g`, inside `on_stream`."""

    def __init__(
        self,
        graph: HPUGraph,
        device: EmulatedDevice,
        on_stream: AbstractContextManager[None],
        dry_run: bool,
    ) -> None:
        self._graph = graph
        self._device = device
        self._on_stream = on_stream
        self._dry_run = dry_run

    def __enter__(self) -> None:
        self._device.synchronize()
        gc.collect()
        self._on_stream.__enter__()
        self._graph.capture_begin(self._dry_run)

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()
        self._on_stream.__exit__(None, None, None)

"""wrap_in_hpu_graph, its function form and make_graphed_callables: which call captures, which
replays, and which tensors come back. Knows the key's rule; knows no ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpu.emulator.card.device import Device
from hpu.emulator.card.graphs import GraphContext, HPUGraph
from hpu.emulator.card.leases import Generation, InputLease, OutputLease
from hpu.emulator.card.tensor import HpuTensor, map_leaves
from hpu.emulator.vendor.graph_key import graph_key, outline, visible_tensors


class _Captured:
    """A graph with the tensors of its first call."""

    def __init__(self, graph: HPUGraph, inputs: list[Tensor], outputs: Any) -> None:
        self.graph = graph
        self.inputs = inputs
        self.dtypes = [given.dtype for given in inputs]
        self.outputs = outputs
        self.generation = Generation()
        self.leases: dict[int, InputLease] = {}

    def lend(self) -> Any:
        """The static outputs, readable until the next replay."""

        def lease(leaf: Any) -> Any:
            if not isinstance(leaf, HpuTensor) or any(leaf is given for given in self.inputs):
                return leaf
            until = OutputLease(self.generation, self.generation.value)
            return HpuTensor(leaf.host, leaf.owner, leaf.block, until)

        return map_leaves(lease, self.outputs)


class GraphedFunction:
    """A function behind a cache of graphs by key; nothing is ever evicted.

    Keyword arguments of its own: `bypass_hpu_graphs`, `warmup_mode` (capture if new, else hand
    out the cached outputs unreplayed) and `cache_tensors_list`, which takes part in the key.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: Device,
        *,
        disable_tensor_cache: bool,
        max_graphs: int | None,
        asynchronous: bool,
        dry_run: bool,
    ) -> None:
        if not device.is_lazy():
            raise RuntimeError("HPU graphs exist only in lazy mode: set PT_HPU_LAZY_MODE=1")
        if device.world_size > 1 and not device.variables.lazy_collectives():
            raise RuntimeError(
                f"hpu graphs on {device.world_size} cards need PT_HPU_ENABLE_LAZY_COLLECTIVES=true"
            )
        self._function = function
        self._device = device
        self._keeps_tensors = not device.variables.tensor_cache_disabled(disable_tensor_cache)
        self._max_graphs = max_graphs
        self._dry_run = dry_run
        self._graphs: dict[object, _Captured] = {}
        self._outlines: dict[object, object] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bypass = kwargs.pop("bypass_hpu_graphs", False)
        warmup = kwargs.pop("warmup_mode", False)
        if bypass:
            return self._function(*args, **kwargs)
        key = graph_key((args, kwargs), torch.is_autocast_enabled())
        keep = kwargs.pop("cache_tensors_list", None) or []
        found = self._graphs.get(key)
        if found is None:
            if self._max_graphs is not None and len(self._graphs) >= self._max_graphs:
                return self._run_ungraphed(args, kwargs)
            return self._capture(key, args, kwargs, keep)
        if warmup:
            self._device.close_segment()
            return found.lend()
        return self._replay(found, list(visible_tensors((args, kwargs))))

    def clear_cache(self) -> None:
        """Drop every graph and give its memory back."""
        for found in self._graphs.values():
            found.graph.reset()
        self._graphs.clear()
        self._outlines.clear()

    def clear_inputs(self) -> None:
        for found in self._graphs.values():
            found.graph.clear_inputs()

    def _run_ungraphed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        journal = self._device.journal
        journal.counts["ungraphed"] += 1
        journal.misuse("max_graphs", f"{self._max_graphs} graphs are captured: this call has none")
        return self._function(*args, **kwargs)

    def _capture(
        self, key: object, args: tuple[Any, ...], kwargs: dict[str, Any], keep: Sequence[Tensor]
    ) -> Any:
        shape = outline((args, kwargs))
        if self._outlines.setdefault(shape, key) != key:
            self._device.journal.misuse(
                "scalar_in_key",
                "the same shapes are captured again for another number or object among the "
                "arguments",
            )
        graph = HPUGraph(self._device)
        inputs = list(visible_tensors((args, kwargs)))
        # Without the tensor cache a capture is a dry run, followed by a replay.
        with GraphContext(graph, self._device, self._dry_run or not self._keeps_tensors):
            outputs = self._function(*args, **kwargs)
        graph.mark_user_inputs(inputs)
        graph.mark_user_outputs(visible_tensors(outputs))
        found = _Captured(graph, inputs, outputs)
        if self._keeps_tensors:
            for given in inputs:
                if isinstance(given, HpuTensor):
                    lease = InputLease()
                    given.lease = found.leases[id(given)] = lease
        else:
            graph.free_intermediates(keep)
            found.inputs = []
        self._graphs[key] = found
        return found.lend()

    def _replay(self, found: _Captured, inputs: list[Tensor]) -> Any:
        journal = self._device.journal
        for given, dtype in zip(inputs, found.dtypes, strict=True):
            if isinstance(given, HpuTensor) and given.lease is not None and given.lease.is_over():
                journal.misuse(given.lease.kind, given.lease.text)
            if given.dtype == dtype:
                continue
            text = f"captured with {dtype}, called with {given.dtype}: the key does not see types"
            journal.misuse("dtype_hit", text)
            if not self._keeps_tensors:
                raise RuntimeError(f"the graph would reinterpret its input's memory: {text}")
        if self._keeps_tensors:
            self._copy_inputs(found, inputs)
            found.graph.replay()
        else:
            found.graph.replayV3(inputs)
        found.generation.value += 1
        return found.lend()

    def _copy_inputs(self, found: _Captured, inputs: list[Tensor]) -> None:
        """Into the first call's own tensors, whoever holds them."""
        for target, given in zip(found.inputs, inputs, strict=True):
            if not isinstance(target, HpuTensor) or target is given:
                continue
            source = given.host if isinstance(given, HpuTensor) else given
            if source is target.host:
                continue
            target.host.copy_(source)
            found.leases[id(target)].overwritten = True


def wrap_module(module: nn.Module, graphed: GraphedFunction) -> nn.Module:
    """The module with its forward replaced, and `clear_cache` and `clear_inputs` added."""
    module.forward = graphed
    # nn.Module has no such attributes: the vendor adds them in the same way.
    module.clear_cache = graphed.clear_cache  # type: ignore[assignment]
    module.clear_inputs = graphed.clear_inputs  # type: ignore[assignment]
    return module


def make_graphed(
    function: Callable[..., Any], sample_args: tuple[Any, ...], device: Device, **options: Any
) -> GraphedFunction:
    """`function` captured at once with `sample_args`."""
    graphed = GraphedFunction(function, device, max_graphs=None, **options)
    graphed(*sample_args)
    return graphed

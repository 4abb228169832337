"""wrap_in_hpu_graph, its function form and make_graphed_callables: the cache key of a graph, and
the choice between capture and replay."""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.card.graphs import HPUGraph, InputLifetime, OutputLifetime, ReplayCount
from hpu.emulator.card.tensor import HpuTensor, map_leaves


class _CapturedGraph:
    """A graph with the tensors of its first call."""

    def __init__(self, graph: HPUGraph, given: object, inputs: list[Tensor], outputs: Any) -> None:
        self.graph = graph
        self.types = types_of(given)
        """Types of the arguments, which a replay with the tensor cache compares."""
        self.inputs: list[Tensor | None] = list(inputs)
        """Captured inputs; None for inputs that a replay reads in place."""
        self.dtypes = [given.dtype for given in inputs]
        self.outputs = outputs
        self.caches_tensors = False
        self.replays = ReplayCount()
        self.lifetimes: dict[int, InputLifetime] = {}

    def static_outputs(self) -> Any:
        """The outputs, readable until the next replay."""

        def limited(leaf: object) -> Any:
            if not isinstance(leaf, HpuTensor) or any(leaf is given for given in self.inputs):
                return leaf
            until = OutputLifetime(self.replays, self.replays.value)
            return HpuTensor(leaf.host, leaf.owner, leaf.allocation, until)

        return map_leaves(limited, self.outputs)


class GraphedFunction:
    """A function with a cache of graphs by key, without eviction.

    It adds the keyword arguments `bypass_hpu_graphs`, `warmup_mode` (capture if new, else return
    the cached outputs without a replay) and `cache_tensors_list`, which is part of the key.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: EmulatedDevice,
        *,
        disable_tensor_cache: bool,
        max_graphs: int | None,
        asynchronous: bool,
        dry_run: bool,
    ) -> None:
        if device.world_size > 1 and not device.variables.lazy_collectives():
            raise RuntimeError(
                f"hpu graphs on {device.world_size} cards need PT_HPU_ENABLE_LAZY_COLLECTIVES=true"
            )
        self._function = function
        self._device = device
        self._disables_cache = disable_tensor_cache
        self._max_graphs = max_graphs
        self._dry_run = dry_run
        self._has_one_graph = False
        self._graphs: dict[object, _CapturedGraph] = {}
        self._outlines: dict[object, object] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bypass = kwargs.pop("bypass_hpu_graphs", False)
        warmup = kwargs.pop("warmup_mode", False)
        if bypass:
            return self._function(*args, **kwargs)
        key = graph_key(() if self._has_one_graph else (args, kwargs), torch.is_autocast_enabled())
        cached_tensors = kwargs.pop("cache_tensors_list", None) or []
        captured = self._graphs.get(key)
        if captured is None:
            if self._max_graphs is not None and len(self._graphs) >= self._max_graphs:
                return self._run_ungraphed(args, kwargs)
            with self._device.on_default_stream():
                return self._capture(key, args, kwargs, cached_tensors)
        if warmup:
            self._device.close_segment()
            return captured.static_outputs()
        if self._caches_tensors != captured.caches_tensors:
            raise AssertionError("the graph was captured with another setting of the tensor cache")
        if self._caches_tensors and types_of((args, kwargs)) != captured.types:
            raise AssertionError("the arguments of a replay have other types than in the capture")
        return self._replay(captured, list(visible_tensors((args, kwargs))))

    def keep_one_graph(self, disable_tensor_cache: bool) -> None:
        """Use the same key for all calls, and decide the tensor cache by the argument alone,
        regardless of the environment variable, like make_graphed_callables in the vendor's
        graphs.py."""
        self._has_one_graph = True
        self._disables_cache = disable_tensor_cache

    @property
    def _caches_tensors(self) -> bool:
        """Whether this call uses the tensor cache: the variable is read at each call
        (wrapped_hpugraph_forward in the vendor's graphs.py)."""
        if self._has_one_graph:
            return not self._disables_cache
        return not self._device.variables.tensor_cache_disabled(self._disables_cache)

    def clear_cache(self) -> None:
        """Drop every graph and free its memory."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        self._outlines.clear()

    def clear_inputs(self) -> None:
        for captured in self._graphs.values():
            captured.graph.clear_inputs()

    def _run_ungraphed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counters = self._device.counters
        counters.counts["ungraphed"] += 1
        counters.misuse(
            "max_graphs", f"{self._max_graphs} graphs are captured: this call runs without a graph"
        )
        return self._function(*args, **kwargs)

    def _capture(
        self,
        key: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cached_tensors: Sequence[Tensor],
    ) -> Any:
        shape = outline((args, kwargs))
        if self._outlines.setdefault(shape, key) != key:
            self._device.counters.misuse(
                "scalar_in_key",
                "the same shapes are captured again, because a number or an object among the "
                "arguments differs",
            )
        graph = HPUGraph(self._device)
        inputs = list(visible_tensors((args, kwargs)))
        # The vendor's wrapper behaves like this: it does not synchronize, and an error in the
        # function does not end the capture. Without the tensor cache a capture is a dry run,
        # followed by a replay, which the ops of the capture replace here.
        graph.capture_begin(self._dry_run or not self._caches_tensors)
        if not self._caches_tensors:
            graph.mark_user_inputs(inputs)
        outputs = self._function(*args, **kwargs)
        graph.capture_end()
        graph.mark_user_outputs(result_tensors(outputs))
        captured = _CapturedGraph(graph, (args, kwargs), inputs, outputs)
        captured.caches_tensors = self._caches_tensors
        if self._caches_tensors:
            for given in inputs:
                if isinstance(given, HpuTensor):
                    lifetime = InputLifetime()
                    given.lifetime = captured.lifetimes[id(given)] = lifetime
        else:
            graph.free_intermediates(list(result_tensors(cached_tensors)))
            for index in graph.get_user_input_match_indices():
                captured.inputs[index] = None
        self._graphs[key] = captured
        return captured.static_outputs()

    def _replay(self, captured: _CapturedGraph, inputs: list[Tensor]) -> Any:
        counters = self._device.counters
        for given, dtype in zip(inputs, captured.dtypes, strict=True):
            lifetime = given.lifetime if isinstance(given, HpuTensor) else None
            if lifetime is not None and lifetime.has_ended():
                counters.misuse(lifetime.kind, lifetime.text)
            if given.dtype == dtype:
                continue
            text = f"captured with {dtype}, called with {given.dtype}: the key has no dtypes"
            counters.misuse("dtype_hit", text)
            if not self._caches_tensors:
                raise RuntimeError(f"the graph would reinterpret its input's memory: {text}")
        self._copy_inputs(captured, inputs)
        if self._caches_tensors:
            captured.graph.replay()
        else:
            captured.graph.replayV3(inputs)
        captured.replays.value += 1
        return captured.static_outputs()

    def _copy_inputs(self, captured: _CapturedGraph, inputs: list[Tensor]) -> None:
        """Copy the inputs that the graph does not read in place into the captured inputs, even if
        the program still uses the captured inputs. A copy into a host tensor does not reach the
        graph, which keeps the data uploaded during the capture (copy_to in the vendor's graphs.py).
        """
        for target, given in zip(captured.inputs, inputs, strict=True):
            if not isinstance(target, Tensor) or target is given:
                continue
            if isinstance(target, nn.Parameter) != isinstance(given, nn.Parameter):
                raise AssertionError("a parameter and a plain tensor are different types")
            if not isinstance(target, HpuTensor):
                target.copy_(given)
                text = "a replay does not read a tensor on the host among its arguments"
                self._device.counters.misuse("host_input", text)
                continue
            source = given.host if isinstance(given, HpuTensor) else given
            if source is target.host:
                continue
            target.copy_(given, non_blocking=True)
            self._device.counters.counts["input_copies"] += 1
            lifetime = captured.lifetimes.get(id(target))
            if lifetime is not None:
                lifetime.overwritten = True


def wrap_module(module: nn.Module, graphed: GraphedFunction) -> nn.Module:
    """Replace the module's forward and add `clear_cache` and `clear_inputs`."""
    module.forward = graphed
    # nn.Module lacks these attributes: the vendor adds them in the same way.
    module.clear_cache = graphed.clear_cache  # type: ignore[assignment]
    module.clear_inputs = graphed.clear_inputs  # type: ignore[assignment]
    return module


def make_graphed(
    function: Callable[..., Any],
    sample_args: tuple[Any, ...],
    device: EmulatedDevice,
    **options: Any,
) -> Callable[..., Any]:
    """Capture `function` with `sample_args`. The result always replays this capture, whatever the
    layout of its arguments; arguments of other shapes raise RuntimeError, and results other than a
    tensor or a tuple AssertionError. A module is returned itself, with a forward that replays only
    while the module is in the mode (training or evaluation) of the capture. Raises RuntimeError if
    neither an argument nor a parameter requires a gradient: the vendor's function also captures a
    backward pass (its graphs.py)."""
    if isinstance(function, nn.Module) and (
        function._forward_hooks or function._forward_pre_hooks or function._backward_hooks
    ):
        raise AssertionError("Modules must not have hooks registered at the time they are passed.")
    if isinstance(function, nn.Module) and any(b.requires_grad for b in function.buffers()):
        raise AssertionError(
            "In any Module passed to make_graphed_callables, only parameters may be trainable."
        )
    if not all(isinstance(given, Tensor) for given in sample_args):
        raise AssertionError("sample_args for each callable must be a tuple of Tensors.")
    parameters = function.parameters() if isinstance(function, nn.Module) else ()
    if not any(given.requires_grad for given in (*sample_args, *parameters)):
        raise RuntimeError("`inputs` argument to `grad()` cannot be empty.")
    forward = function.forward if isinstance(function, nn.Module) else function
    graphed = GraphedFunction(forward, device, max_graphs=None, **options)
    graphed.keep_one_graph(options["disable_tensor_cache"])
    graphed(*sample_args)
    shapes = [tuple(given.shape) for given in sample_args]

    def replay(*args: Tensor) -> Any:
        found = [tuple(given.shape) for given in args]
        if found != shapes:
            raise RuntimeError(f"a graph of inputs {shapes} is called with {found}")
        out = graphed(*args)
        if not isinstance(out, (Tensor, tuple)):
            raise AssertionError(f"the result of a graphed callable is a {type(out).__name__}")
        return out

    if not isinstance(function, nn.Module):
        return replay
    training = function.training

    def choose(*args: Tensor) -> object:
        return (replay if function.training == training else forward)(*args)

    function.forward = choose
    return function


def graph_key(value: object, autocast: bool) -> object:
    """The vendor's cache key: tensors by (shape, layout, autocast), not by dtype, values or device;
    containers by item; other values by their Python hash, so that another int is a new key. Raises
    TypeError for a value without a hash."""
    if isinstance(value, Tensor):
        return layout_of(value), autocast
    if isinstance(value, dict):
        return tuple((key, graph_key(item, autocast)) for key, item in value.items())
    if isinstance(value, UserDict):
        return tuple((key, _parts(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return tuple(graph_key(item, autocast) for item in value)
    return hash(value), autocast


def layout_of(value: Tensor) -> object:
    """Shape and layout of a tensor. A view differs from a whole tensor with the same strides, and
    from a view that other operators made: the runtime adds how a view was made (get_view_hash in
    the bridge's bindings.cpp)."""
    kinds = value.kinds if isinstance(value, HpuTensor) else ()
    return tuple(value.shape), value.stride(), value.storage_offset(), kinds


def _parts(value: object) -> object:
    """Part of a key for an item of a UserDict, which the vendor's code iterates. The rows of a
    tensor are new objects in each call, so that such a key never matches. Raises TypeError for a
    value that is not iterable."""
    if isinstance(value, Tensor) and value.dim():
        return object()
    found = tuple(cast(Iterable[object], value))
    hash(found)
    return found


def types_of(value: object) -> object:
    """Types that a copy into the inputs of a graph compares (copy_to in the vendor's graphs.py):
    unlike the key, they distinguish a list from a tuple, a parameter from a plain tensor, and True
    from 1."""
    if isinstance(value, Tensor):
        return nn.Parameter if isinstance(value, nn.Parameter) else Tensor
    if isinstance(value, dict):
        return type(value), tuple(types_of(item) for item in value.values())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value), tuple(types_of(item) for item in value)
    return type(value)


def outline(value: object) -> object:
    """The key without numbers and objects. Two keys with equal outlines differ only in such values,
    which tend to change from step to step."""
    if isinstance(value, Tensor):
        return layout_of(value)
    if isinstance(value, (dict, UserDict)):
        return tuple((key, outline(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return tuple(outline(item) for item in value)
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value).__name__


def visible_tensors(value: object) -> Iterator[Tensor]:
    """The tensors that a captured graph takes as inputs, in the key's order. Tensors inside other
    objects are not inputs: they become constants of the graph."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from visible_tensors(item)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            yield from visible_tensors(item)


def result_tensors(value: object) -> Iterator[Tensor]:
    """The tensors of a result, which a graph without tensor cache keeps: unlike for inputs, tensors
    in attributes of other objects are included (extract_tensors in the vendor's graphs.py)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from result_tensors(item)
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        for item in (value if isinstance(value, dict) else vars(value)).values():
            yield from result_tensors(item)

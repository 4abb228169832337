"""The emulated torch.compile backend `hpu_backend`. torch traces as for the card; each traced graph
runs as a region, with a recipe for each of its shapes."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.card.tensor import HpuTensor, map_leaves
from hpu.emulator.ops.partitioner import COLLECTIVE, left_out

NAME = "hpu_backend"
OPTIONS = frozenset(
    (
        *("decomposition_mode", "discard_frozen_params", "dump_graph_repro", "enable_sfg"),
        *("enable_allreduce_graph_split", "enable_synapse_input_reuse", "inference"),
        *("enable_waittensor_graph_split", "force_static_compile", "keep_input_mutations"),
        *("joint_graph_constant_folding", "reassign_copy_", "reassign_full_copy", "reinplace_add"),
        *("remove_unnecessary_clones", "use_boxed_input", "use_compiled_recipes"),
        *("use_cpp_partitioner", "use_eager_fallback", "use_generic_reinplacer"),
        *("use_graph_freezing", "use_inplace_allreduce", "use_inplace_index_copy"),
    )
)
"""Options of the back end (config.py of the bridge's compile back end, 2025 and 2026)."""

SWITCHES = {
    "PT_HPU_COMPILE_USE_RECIPES": True,
    "PT_HPU_KEEP_INPUT_MUTATIONS": True,
    "PT_HPU_USE_EAGER_FALLBACK": True,
    "PT_HPU_COMPILE_GRAPH_FREEZE": False,
    "PT_HPU_FORCE_STATIC_COMPILE": False,
    "PT_HPU_USE_INPLACE_INDEX_COPY": True,
}
"""Variables of the back end with their default. The vendor's back end reads them when the package
is imported, the emulated back end also for each traced graph."""
TRUE, FALSE = ("on", "1", "yes", "true", "y", "t"), ("off", "0", "no", "false", "n", "f")
DECOMPOSITION = "PT_HPU_COMPILE_DECOMPOSITION_MODE"
DECOMPOSITIONS = ("habana", "core_aten", "none")

INDEX_COPY = torch.ops.aten.index_copy.default
INDEX_COPY_ = torch.ops.aten.index_copy_.default
COPY_ = torch.ops.aten.copy_.default

CompilerFn = Callable[..., Callable[..., Any]]


def read_switches(environment: Mapping[str, str]) -> dict[str, bool]:
    """The values of SWITCHES. Raises AssertionError for a word that the back end cannot read, also
    in DECOMPOSITION (config.py of the bridge's compile back end)."""
    found = {}
    for name, default in SWITCHES.items():
        word = environment.get(name, str(default)).lower()
        if word not in (*TRUE, *FALSE):
            raise AssertionError(f"Unrecognized boolean value in env config: {name}: {word}")
        found[name] = word in TRUE
    word = environment.get(DECOMPOSITION, DECOMPOSITIONS[0]).lower()
    if word not in DECOMPOSITIONS:
        raise AssertionError(f"Unrecognized string value in env config: {DECOMPOSITION}: {word}")
    return found


def make_backend(device: EmulatedDevice) -> CompilerFn:
    """Make the function that torch.compile calls with the graph of each traced region."""

    def hpu_backend(
        graph: GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        if device.is_lazy():
            raise RuntimeError("hpu_backend needs PT_HPU_LAZY_MODE=0; lazy mode has HPU graphs")
        given = options.get("options") or {}
        for name in given:
            if name not in OPTIONS:
                raise AttributeError(f"the configuration of {NAME}: {name} does not exist")
        default = read_switches(device.variables.environment)["PT_HPU_USE_EAGER_FALLBACK"]
        falls_back = bool(given.get("use_eager_fallback", default))
        is_static = bool(given.get("force_static_compile"))
        has_symbols = any(isinstance(value, torch.SymInt) for value in inputs)
        is_dynamic = has_symbols and not is_static
        if is_dynamic:
            device.counters.misuse(
                "dynamic_compile", "symbolic shapes without force_static_compile"
            )
        device.counters.counts["traces"] += 1
        if device.is_serving:
            text = f"a region of {len(graph.graph.nodes)} nodes was traced while serving"
            device.counters.misuse("trace_after_warmup", text)
        lower = aot_autograd(
            fw_compiler=_refuse_training,
            inference_compiler=lambda lowered, _: _region(
                device, lowered, is_dynamic=is_dynamic, falls_back=falls_back
            ),
            keep_inference_input_mutations=True,
        )
        compiled: Callable[..., Any] = lower(graph, inputs)
        return compiled

    return hpu_backend


def register(backend: CompilerFn) -> Callable[[], None]:
    """Register the backend with torch.compile under NAME, and make torch's tracer treat an
    HpuTensor as a plain tensor of another device, as on a real card. Returns a function that undoes
    both and discards all compiled code."""
    builder = torch._dynamo.variables.builder
    by_type = builder.VariableBuilder._type_dispatch()
    infer = builder.infer_subclass_type

    def infer_subclass_type(value: object) -> Any:
        return None if isinstance(value, HpuTensor) else infer(value)

    by_type[HpuTensor] = builder.VariableBuilder.wrap_tensor
    vars(builder)["infer_subclass_type"] = infer_subclass_type
    _skip_tracing()
    registry = torch._dynamo.backends.registry
    registry.register_backend(backend, name=NAME)

    def undo() -> None:
        del registry._BACKENDS[NAME], registry._COMPILER_FNS[NAME], by_type[HpuTensor]
        vars(builder)["infer_subclass_type"] = infer
        torch._dynamo.reset()

    return undo


def _skip_tracing() -> None:
    """Exclude the emulated card from tracing: the real card is not Python code."""
    rules, folder = torch._dynamo.trace_rules, "hpu.emulator.card"
    before = list(rules.SKIP_DIRS)
    rules.add(folder)
    if rules.SKIP_DIRS[-1] in before:
        rules.SKIP_DIRS.pop()


def _refuse_training(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    raise RuntimeError("hpu_backend is emulated for inference")


def _region(
    device: EmulatedDevice, graph: GraphModule, *, is_dynamic: bool, falls_back: bool
) -> Callable[[list[Any]], Any]:
    """Make a function that runs the lowered graph in its own region. Graphs of different code do
    not share recipes, even for equal operations: the card's compiler sees the whole graph.
    Operators that the partitioner would leave out are counted as misuses and stay in the graph.
    Raises AssertionError for such an operator, except a collective, unless `falls_back`, the option
    use_eager_fallback (the bridge's shared_layer.py)."""
    for name, reason in left_out(graph, is_dynamic=is_dynamic):
        if not falls_back and reason != COLLECTIVE:
            raise AssertionError(f"Node: {name} requires fallback: True ({reason})")
        device.counters.misuse(
            "left_out_of_graph", f"{name} breaks a compiled graph in two: {reason}", name
        )
    _write_in_place(graph)
    key = hashlib.sha256(graph.code.encode()).hexdigest()[:32]

    def run(args: list[Any]) -> Any:
        # torch checks the operators of a graph's first run; on a card it sees no operators.
        with _disable_current_modes(), device.region(key):
            _check_stance(device)
            result = graph.forward(*args)
            if device.has_fault("torch-compile"):
                result = map_leaves(_shifted, result)
        args.clear()
        return result

    # Attribute by which torch marks functions that take their arguments in a list and may empty it.
    vars(run)["_boxed_call"] = True
    return run


def _shifted(leaf: object) -> object:
    return leaf + 1 if isinstance(leaf, HpuTensor) and leaf.is_floating_point() else leaf


def _check_stance(device: EmulatedDevice) -> None:
    stance = torch._dynamo.eval_frame._stance
    if device.has_fault("compiled-guards") and stance.skip_guard_eval_unsafe:
        raise RuntimeError("hpu_backend: a graph cannot run without its guards")


def _write_in_place(graph: GraphModule) -> None:
    """Undo the functionalization of index_copy_ on an input: an index_copy to a new tensor that is
    copied back at the end. The bridge does this too (PT_HPU_USE_INPLACE_INDEX_COPY)."""
    for node in graph.graph.find_nodes(op="call_function", target=COPY_):
        target, written = node.args[0], node.args[1]
        if _may_write(target, written, node):
            written.target = INDEX_COPY_
            node.replace_all_uses_with(target)
            graph.graph.erase_node(node)
    graph.recompile()


def _may_write(target: Any, written: object, copy: Node) -> bool:
    """Whether `written` is an index_copy on `target`, and only `copy` uses `target` after it."""
    if not (isinstance(written, Node) and written.target is INDEX_COPY):
        return False
    readers = [user for user in target.users if user is not copy and user is not written]
    return written.args[0] is target and all(user < written for user in readers)

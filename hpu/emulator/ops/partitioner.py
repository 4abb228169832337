"""Operators that the partitioner of hpu_backend takes out of a compiled graph: they run alone and
split the graph into several recipes (HabanaAI/gaudi-pytorch-bridge, shared_layer.py of the compile
back end, as of 2026)."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

ALWAYS = frozenset(
    (
        *("seed", "manual_seed", "initial_seed", "get_rng_state", "set_rng_state"),
        *("slice_backward", "addcmul", "nonzero", "_unique2", "bincount"),
        # The bridge's tests expect these to leave a graph (test_hpu_foreach_ops.py of 2025).
        *("_foreach_addcmul", "_foreach_addcdiv"),
    )
)
DYNAMIC_ONLY = frozenset(
    (
        *("sdpa_fwd", "sdpa_fwd_dropout", "sdpa_fwd_non_dropout", "sdpa_fwd_dropout_seed"),
        *("sdpa_recomp_fwd", "sdpa_recomp_fwd_dropout", "sdpa_recomp_fwd_non_dropout"),
        *("sdpa_recomp_fwd_dropout_seed", "fp8_sdpa_recomp_fwd"),
    )
)
"""Operators that are taken out of graphs with symbolic shapes."""
COLLECTIVES = "_c10d_functional"
"""Namespace of the collectives of compiled code, which the bridge never accepts into a graph (its
test_hpu_propose_partitions.py)."""
COLLECTIVE = "a collective runs alone"
"""Reason for leaving out a collective, which does not count as a fallback."""
NO_BOOL = ("full", "mul")
"""Operators that are taken out of the graph if their second argument is a bool (bool_fallback_list
of 2025 and of 2026)."""
MAX_INDEXED_DIMS = 4
INTEGERS = (torch.int64, torch.int32, torch.int16)
NO_LOGIC = {
    "logical_and": (torch.int16,),
    "logical_or": INTEGERS,
    "logical_xor": INTEGERS,
    "logical_not": (torch.bfloat16, torch.float32, *INTEGERS),
}
"""Dtypes that the logical operators of compiled code do not take (compile/test_ops.py of 2025)."""


def left_out(graph: GraphModule, *, is_dynamic: bool) -> Iterator[tuple[str, str]]:
    """(operator, reason) of each node of a lowered graph that does not stay in it, except nodes
    with results on the host. `is_dynamic`: whether the graph has symbolic shapes; shapes that
    depend on data are always symbolic."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    is_dynamic = is_dynamic or any(
        free_unbacked_symbols(value) for value in values if isinstance(value, Tensor)
    )
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        found = node.meta.get("val")
        if isinstance(found, Tensor) and found.device.type != "hpu":
            continue
        namespace, _, name = node.target._schema.name.partition("::")
        if namespace == COLLECTIVES:
            if name != "wait_tensor":
                yield name, COLLECTIVE
            continue
        if reason := _reason(name, node, is_dynamic):
            yield name, reason


def _reason(name: str, node: Node, is_dynamic: bool) -> str:
    """Why a node is taken out of the graph; empty if it stays."""
    if name in ALWAYS:
        return "the operator is never part of a graph"
    if name == "_unsafe_index":
        return "the card lacks this part of an interpolation"
    if name in NO_LOGIC and any(
        _dtype_of(given) in NO_LOGIC[name] for given in node.args if isinstance(given, Node)
    ):
        return "logic of numbers"
    if name == "bucketize" and not isinstance(node.args[0], Node):
        # "bucketize.Scalar doesn't work in compile mode" (the bridge's test_hpu_bucketize.py).
        return "a number to bucketize"
    if name == "permute" and _dtype_of(node) == torch.int64:
        return "permute of int64"
    if is_dynamic and name in DYNAMIC_ONLY:
        return "fused attention with symbolic shapes"
    if name in NO_BOOL and isinstance(node.args[1], bool):
        return "a bool as a scalar"
    if any(isinstance(value, float) and value != value for value in node.args):
        return "a NaN as a scalar"
    if name == "index":
        return _reason_of_index(node, is_dynamic)
    if name in ("index_put", "index_put_"):
        return _reason_of_put(node, is_dynamic)
    return ""


def _reason_of_index(node: Node, is_dynamic: bool) -> str:
    if is_dynamic:
        return "indices with symbolic shapes"
    indices = _indices_of(node)
    dims = _value_of(node).dim()
    if dims <= MAX_INDEXED_DIMS and dims == len(indices):
        return ""
    return _reason_of_indices(indices)


def _reason_of_put(node: Node, is_dynamic: bool) -> str:
    if is_dynamic:
        return "indices with symbolic shapes"
    indices = _indices_of(node)
    if reason := _reason_of_indices(indices):
        return reason
    masks = [index for index in indices if index and _dtype_of(index) == torch.bool]
    return f"{len(masks)} masks as indices" if len(masks) > 1 else ""


def _reason_of_indices(indices: list[Node | None]) -> str:
    if None in indices:
        return "a dimension without index before an index"
    on_host = [index for index in indices if index and _value_of(index).device.type != "hpu"]
    return "an index on the host" if on_host else ""


def _indices_of(node: Node) -> list[Node | None]:
    return cast(list[Node | None], node.args[1])


def _value_of(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _dtype_of(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)

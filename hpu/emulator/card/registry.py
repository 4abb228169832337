"""Which ops the card runs itself, and under which conditions: the bridge's own registry.

`registered_ops.txt` lists the overloads of aten that the bridge (HabanaAI/gaudi-pytorch-bridge,
release 1.19) registers for the device: the keys of its scripts/hpu_op.yaml, the list
scripts/ops_list/ops.hpu, and `matmul` of kernels_register.cpp. An op outside of it runs if torch
composes it of others, and falls back to the host otherwise. LIMITS are the bridge's own fallback
checks (hpu_ops/**/*_gen.cpp).
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NAMESPACES = ("hpu", "c10d", "_c10d_functional", "prims")
"""All ops of these run on the card."""

COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")

COMPOSED_OF_UNREGISTERED = frozenset(("aten::cummax", "aten::cummin"))
"""Composite ops whose parts the card lacks."""

MAX_STABLE_SORT = 37
"""Longest dimension that the card sorts with `stable`."""

MAX_GATHER_DIMS = 5

Arguments = dict[str, Any]


def _index_reduce(given: Arguments) -> bool:
    return bool(given["reduce"] == "amax" and given["dim"] == 0 and given["include_self"])


def _sort(given: Arguments) -> bool:
    size, dim = given["self"].shape, given["dim"] % max(given["self"].dim(), 1)
    if not given.get("stable"):
        return True
    return dim != 0 and bool(size[dim] <= MAX_STABLE_SORT)


def _where(given: Arguments) -> bool:
    if given["condition"].dtype != torch.bool:
        return False
    # Scalars have no dtype.
    return getattr(given["self"], "dtype", None) not in (torch.float8_e4m3fn, torch.float8_e5m2)


LIMITS: dict[str, Callable[[Arguments], bool]] = {
    "aten::index_reduce": _index_reduce,
    "aten::index_reduce_": _index_reduce,
    "aten::index_select": lambda given: given["self"].dim() <= MAX_GATHER_DIMS,
    "aten::sort": _sort,
    "aten::where": _where,
    "aten::embedding": lambda given: not (given["scale_grad_by_freq"] or given["sparse"]),
}
"""Whether the card runs the op with these arguments."""


def is_supported(func: Any, args: tuple[Any, ...], kwargs: Arguments) -> bool:
    """Whether the card runs the overload `func` itself with these arguments."""
    if not _is_registered(func):
        return False
    limit = LIMITS.get(func._schema.name)
    return limit is None or limit(_named(func, args, kwargs))


@functools.cache
def _is_registered(func: Any) -> bool:
    name: str = func._schema.name
    namespace, _, base = name.partition("::")
    if namespace in NAMESPACES:
        return True
    if namespace != "aten" or name in COMPOSED_OF_UNREGISTERED:
        return False
    overload = func._schema.overload_name or "default"
    overloads = _overloads().get(base, frozenset())
    if overload in overloads:
        return True
    full_name = func.name()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has_kernel(full_name, key) for key in COMPOSITE):
        return True
    # Torch composes the plain and the in-place form of a structured op of its `out` form.
    outs = _overloads().get(base.removesuffix("_"), frozenset())
    composes = has_kernel(full_name, "CompositeExplicitAutogradNonFunctional")
    return composes and any(name.endswith("out") for name in outs)


@functools.cache
def _overloads() -> dict[str, frozenset[str]]:
    """Registered overloads by the op's name."""
    found = {}
    for line in Path(__file__).with_name("registered_ops.txt").read_text().splitlines():
        name, _, overloads = line.partition(":")
        found[name] = frozenset(overloads.split() or ("default",))
    return found


def _named(func: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """The arguments by name, with the schema's defaults."""
    named = {}
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            named[argument.name] = args[number]
        else:
            named[argument.name] = kwargs.get(argument.name, argument.default_value)
    return named

"""Which ops the card runs itself, and under which conditions: the bridge's own registry.

`registered_ops.txt` lists the overloads of aten that the bridge (HabanaAI/gaudi-pytorch-bridge,
release 1.19) registers for the device: the keys of its scripts/hpu_op.yaml, the list
scripts/ops_list/ops.hpu, and `matmul` of kernels_register.cpp. An unlisted op runs if torch
decomposes it into listed ops, and falls back to the host otherwise. LIMITS are the bridge's own
fallback checks (hpu_ops/**/*_gen.cpp; habana_kernels/kernels_register.cpp for lazy mode,
habana_eager/kernels_impl.cpp for eager mode).

`registered_dtypes.txt` lists the dtypes of ops, as in the last hpu_op.yaml that names them (release
1.19). In hpu_op.yaml of 2025 only the norms have a list: the runtime's kernels, whose
sources are closed, decide for the other ops, so the last published list counts for all releases.
bmm, baddbmm, linear, mv and dot run on the matrix unit like mm, and have its list.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAMESPACES = ("hpu", "c10d", "_c10d_functional", "prims")
"""Namespaces whose ops all run on the card."""

COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")

COMPOSED_OF_UNREGISTERED = frozenset(
    (
        *("aten::cummax", "aten::cummin", "aten::cauchy", "aten::polar", "aten::nanmedian"),
        *("aten::linalg_lstsq", "aten::cholesky_solve", "aten::special_zeta"),
    )
)
"""Composite ops that torch decomposes into ops that the card lacks."""

SCATTERS = frozenset(("slice_scatter", "select_scatter", "as_strided_scatter", "copy"))
"""Ops of functional code, which torch composes of copies and views, and which stay in compiled
graphs (hpu_supported_op_list in the bridge's shared_layer.py)."""

MAX_STABLE_SORT = 37
"""Longest dimension that the card sorts with `stable`."""

MAX_DIMS = 5
"""Maximum dimensions for the kernels of the ops below."""

MAX_UNIQUE_DIMS = 4
"""Maximum dimensions for which `unique` runs on the card in eager mode."""

MAX_NARROW_NONZERO_DIMS = 4
"""Maximum dimensions for which `nonzero` uses a kernel without float16."""

NONZERO = frozenset(
    (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.bool)
)
PUT = frozenset((*NONZERO, torch.float16))
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW_INTEGERS = (torch.int16, torch.uint8)
LAZY_DTYPES = {
    "scatter_add_": frozenset((torch.float32, torch.bfloat16, torch.int64)),
    "index_add": frozenset((*PUT, torch.int16, torch.uint8)) - {torch.float16},
    "masked_select": frozenset((torch.float32, torch.bfloat16, torch.int32, torch.int64)),
    "sort": frozenset((*PUT, torch.int16)) - {torch.int8, torch.bool},
}
"""Dtypes of ops in lazy mode (the bridge's kernel_input_checks.cpp)."""

Arguments = dict[str, Any]


class Mode(NamedTuple):
    """How the card runs an op."""

    is_lazy: bool
    has_int64: bool
    """Whether int64 has 64 bits, else it is int32."""
    is_compiled: bool = False
    """Whether the op is in compiled code."""


def _index_reduce(given: Arguments, mode: Mode) -> bool:
    return bool(given["reduce"] == "amax" and given["dim"] == 0 and given["include_self"])


def _index_put(given: Arguments, mode: Mode) -> bool:
    """Outside of lazy mode and of compiled code, the op runs on the host beyond MAX_DIMS (the
    bridge's kernels_impl.cpp, later than 1.19)."""
    dtype = given["self"].dtype
    if _runs_eagerly(mode) and given["self"].dim() > MAX_DIMS:
        return False
    return dtype in PUT or dtype in (FP8 if mode.is_lazy else NARROW_INTEGERS)


def _runs_eagerly(mode: Mode) -> bool:
    return not (mode.is_lazy or mode.is_compiled)


def _unique(given: Arguments, mode: Mode) -> bool:
    return not _runs_eagerly(mode) or given["self"].dim() <= MAX_UNIQUE_DIMS


def _nonzero(given: Arguments, mode: Mode) -> bool:
    dtype, dims = given["self"].dtype, given["self"].dim()
    if mode.is_lazy and dims > MAX_DIMS:
        return False
    return dtype in NONZERO or (dtype == torch.float16 and dims > MAX_NARROW_NONZERO_DIMS)


def _masked_select(given: Arguments, mode: Mode) -> bool:
    dtypes = LAZY_DTYPES["masked_select"] if mode.is_lazy else PUT
    return given["self"].dim() <= MAX_DIMS and given["self"].dtype in dtypes


def _has_few_dims(given: Arguments, mode: Mode) -> bool:
    """Whether each tensor has few enough dimensions for the kernels of lazy mode."""
    tensors = (value for value in given.values() if isinstance(value, Tensor))
    return not mode.is_lazy or all(tensor.dim() <= MAX_DIMS for tensor in tensors)


def _scatter_add(given: Arguments, mode: Mode) -> bool:
    dtypes = LAZY_DTYPES["scatter_add_"]
    is_listed = {given[name].dtype for name in ("self", "index", "src")} <= dtypes
    return _has_few_dims(given, mode) and (is_listed or not mode.is_lazy)


def _index_add(given: Arguments, mode: Mode) -> bool:
    is_listed = given["self"].dtype in LAZY_DTYPES["index_add"]
    return _has_few_dims(given, mode) and (is_listed or not mode.is_lazy)


def _divide(given: Arguments, mode: Mode) -> bool:
    result = torch.result_type(given["self"], given["other"])
    return not given.get("rounding_mode") or result not in (torch.uint8, torch.bool)


def _index(given: Arguments, mode: Mode) -> bool:
    """In eager mode, the op runs on the host if an index tensor is on the host (the bridge's
    hpu_ops/eager/index_gen.cpp)."""
    found = (index for index in given["indices"] if isinstance(index, Tensor))
    return mode.is_compiled or mode.is_lazy or all(index.device.type == "hpu" for index in found)


def _sort(given: Arguments, mode: Mode) -> bool:
    if not _has_few_dims(given, mode):
        return False
    size, dim = given["self"].shape, given["dim"] % max(given["self"].dim(), 1)
    if not given.get("stable"):
        return not mode.is_lazy or given["self"].dtype in LAZY_DTYPES["sort"]
    return dim != 0 and bool(size[dim] <= MAX_STABLE_SORT)


def _where(given: Arguments, mode: Mode) -> bool:
    if given["condition"].dtype != torch.bool:
        return False
    # Scalars have no dtype.
    return getattr(given["self"], "dtype", None) not in FP8


LIMITS: dict[str, Callable[[Arguments, Mode], bool]] = {
    # "aten::unfold is not implemented for lazy mode" (the bridge's test_hpu_unfold.py).
    "aten::unfold": lambda _, mode: not mode.is_lazy,
    "aten::index": _index,
    "aten::index_reduce": _index_reduce,
    "aten::index_reduce_": _index_reduce,
    "aten::index_select": lambda given, _: given["self"].dim() <= MAX_DIMS,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::index_add": _index_add,
    "aten::scatter_add_": _scatter_add,
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::_unique": _unique,
    "aten::_unique2": _unique,
    "aten::unique_dim": lambda given, _: not given["sorted"],
    "aten::div": _divide,
    "aten::div_": _divide,
    "aten::sort": _sort,
    "aten::where": _where,
    "aten::embedding": lambda given, _: not (given["scale_grad_by_freq"] or given["sparse"]),
}
"""Whether the card runs the op with these arguments."""


ALIASES = {
    "float8": FP8,
    # The bridge adds bool to each list with int8 (scripts/gen_op.py).
    "int8": (torch.int8, torch.bool),
}
"""Names in `registered_dtypes.txt` that mean several dtypes."""


class DtypeRule(NamedTuple):
    """The dtypes of an op. `inputs`: names of arguments; empty: every tensor except `out`."""

    inputs: tuple[str, ...]
    dtypes: frozenset[torch.dtype]

    def allows(self, given: Arguments, mode: Mode) -> bool:
        """Whether the arguments have these dtypes. Several named arguments are promoted to a common
        dtype first."""
        return all(
            dtype in self.dtypes
            or (dtype == torch.int64 and not mode.has_int64 and torch.int32 in self.dtypes)
            for dtype in self._found(given)
        )

    def _found(self, given: Arguments) -> list[torch.dtype]:
        if not self.inputs:
            named = [value for name, value in given.items() if name != "out"]
            return [value.dtype for value in named if isinstance(value, Tensor)]
        values = [given[name] for name in self.inputs]
        if len(values) == 1:
            return [values[0].dtype] if isinstance(values[0], Tensor) else []
        return [torch.result_type(*values)]


def is_supported(
    func: Any, args: tuple[Any, ...], kwargs: Arguments, generation: str, mode: Mode
) -> bool:
    """Whether the card itself runs the overload `func` with these arguments; False: the host runs
    it."""
    if not _is_registered(func):
        return False
    limit, rules = LIMITS.get(func._schema.name), _dtype_rules(func, generation)
    if not (limit or rules):
        return True
    given = _named(func, args, kwargs)
    return (not limit or limit(given, mode)) and all(rule.allows(given, mode) for rule in rules)


@functools.cache
def _dtype_rules(func: torch._ops.OpOverload, generation: str) -> tuple[DtypeRule, ...]:
    """Rules for all overloads of the op, for this overload, and for this overload on
    `generation`."""
    base: str = func._schema.name.partition("::")[2]
    overload = f"{base}.{func._schema.overload_name or 'default'}"
    names = (base, overload, f"{overload}@{generation}")
    return tuple(rule for name in names for rule in _all_dtype_rules().get(name, ()))


@functools.cache
def _all_dtype_rules() -> dict[str, list[DtypeRule]]:
    """Rules by `op`, `op.overload` or `op.overload@generation`, from registered_dtypes.txt."""
    found: dict[str, list[DtypeRule]] = {}
    for line in Path(__file__).with_name("registered_dtypes.txt").read_text().splitlines():
        op, _, text = line.partition(" ")
        inputs, _, names = text.partition(": ")
        dtypes = (dtype for name in names.split() for dtype in _dtypes_of(name))
        named = () if inputs == "all" else tuple(inputs.split("+"))
        found.setdefault(op, []).append(DtypeRule(named, frozenset(dtypes)))
    return found


def _dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    return ALIASES.get(name) or (getattr(torch, name),)


@functools.cache
def _is_registered(func: Any) -> bool:
    name: str = func._schema.name
    namespace, _, base = name.partition("::")
    if namespace in NAMESPACES:
        return True
    if namespace != "aten" or name in COMPOSED_OF_UNREGISTERED:
        return False
    if base in SCATTERS:
        return True
    overload = func._schema.overload_name or "default"
    overloads = _overloads().get(base, frozenset())
    if overload in overloads:
        return True
    full_name = func.name()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has_kernel(full_name, key) for key in COMPOSITE):
        return True
    # Torch composes the plain and the in-place form of a structured op from its `out` form.
    outs = _overloads().get(base.removesuffix("_"), frozenset())
    composes = has_kernel(full_name, "CompositeExplicitAutogradNonFunctional")
    return composes and any(name.endswith("out") for name in outs)


@functools.cache
def _overloads() -> dict[str, frozenset[str]]:
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

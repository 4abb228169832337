"""Rules of single ops: which ops wait for the host, and how the device handles -1 indices and wide
dtypes. Pure functions of CPU tensors. registry.py lists the ops of the device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


HOST_READS = frozenset(("aten::_local_scalar_dense", "aten::equal", "aten::allclose"))
"""Ops whose result is a host value."""

DATA_SHAPED = _names("""
    nonzero masked_select unique_dim unique_consecutive _unique _unique2 unique_dim_consecutive
    repeat_interleave bincount
""")
"""Ops whose output shape depends on data, so that the host must wait for it."""

RANDOM = _names("""
    uniform uniform_ normal normal_ random random_ exponential exponential_ bernoulli bernoulli_
    geometric geometric_ cauchy cauchy_ log_normal log_normal_ multinomial randperm poisson
    native_dropout _fused_dropout rrelu_with_noise rrelu_with_noise_
    rand rand_like randn randn_like randint randint_like
""")

VIEWS = _names("""
    view _unsafe_view reshape expand as_strided slice select transpose t permute unsqueeze
    squeeze unbind split split_with_sizes detach alias unfold diagonal narrow _reshape_alias
    view_as lift_fresh movedim swapaxes chunk
""")

ALIASES = _names("detach alias lift_fresh")
"""Views that the runtime treats as the tensor itself."""

EMPTY = _names("empty empty_strided empty_like new_empty new_empty_strided")
"""Ops that allocate without writing."""

UNDECOMPOSED = ("aten::one_hot", "aten::scaled_dot_product_attention")
"""Composite ops that the device runs undecomposed."""

SUPPORTED_DTYPES = frozenset(
    (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""Types that the runtime knows (pytorch_to_synapse_type in the bridge's create_tensor.cpp). It
would take float64 as float32."""

Report = Callable[[str, str, str], None]
"""Called with (kind, text, op) if data, not shapes, break a rule."""


class IndexRule(NamedTuple):
    """Argument numbers of target, dimension (None: dimension 0) and indices of an op."""

    target: int
    dim: int | None
    indices: int
    reads: bool


INDEX_RULES = {
    "aten::embedding": IndexRule(0, None, 1, True),
    "aten::index_select": IndexRule(0, 1, 2, True),
    "aten::gather": IndexRule(0, 1, 2, True),
    "aten::index_copy": IndexRule(0, 1, 2, False),
    "aten::index_copy_": IndexRule(0, 1, 2, False),
    "aten::index_reduce": IndexRule(0, 1, 2, False),
    "aten::index_reduce_": IndexRule(0, 1, 2, False),
    "aten::index_add": IndexRule(0, 1, 2, False),
    "aten::index_add_": IndexRule(0, 1, 2, False),
    "aten::scatter": IndexRule(0, 1, 2, False),
    "aten::scatter_": IndexRule(0, 1, 2, False),
    "aten::scatter_add": IndexRule(0, 1, 2, False),
    "aten::scatter_add_": IndexRule(0, 1, 2, False),
    "aten::scatter_reduce": IndexRule(0, 1, 2, False),
    "aten::scatter_reduce_": IndexRule(0, 1, 2, False),
}
EXTREMES = {
    "aten::max.dim": (torch.amax, float("-inf")),
    "aten::min.dim": (torch.amin, float("inf")),
    "aten::argmax": (torch.amax, float("-inf")),
    "aten::argmin": (torch.amin, float("inf")),
}
"""Ops that return the index of an extreme value: the reduction, and a value that is never the
extreme. No test of the bridge specifies which of several equal floats they find, or how they treat
NaN (tests/pytest_working/any_mode/test_hpu_min_max.py, test_hpu_argmin_max.py)."""
INDEX_COPIES = ("aten::index_copy", "aten::index_copy_")
BYTES_MOVED = (*INDEX_COPIES, "aten::index_select")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MASKS = (torch.bool, torch.uint8)
PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def may_wait_for_data(name: str) -> bool:
    """Whether `waits_for_data` is True for some arguments of the op."""
    return name in DATA_SHAPED or name == "aten::index" or name in PUTS


def waits_for_data(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op's shape depends on data: ops in DATA_SHAPED, and indexing by a mask."""
    if name in DATA_SHAPED:
        return kwargs.get("output_size") is None
    if not may_wait_for_data(name):
        return False
    return any(index is not None and index.dtype in MASKS for index in args[1])


MAX_INDEX_DIMS = {"aten::index": 5, **dict.fromkeys(PUTS, 8)}
"""Dimensions of a tensor that an index may read or write; more are refused (the bridge's
indexing_ops_helper.h and lazy_kernels.cpp)."""


def check_index(name: str, args: tuple[Tensor, ...]) -> None:
    """RuntimeError for an index into a tensor of too many dimensions."""
    most, dims = MAX_INDEX_DIMS[name], args[0].dim()
    if dims > most:
        raise RuntimeError(
            f"{name.removeprefix('aten::')} op doesn't support more than {most} dims, got {dims}"
        )


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """Run the op on CPU tensors with the device's handling of indices."""
    handler = _handler(func)
    return func(*args, **kwargs) if handler is None else handler(func, args, kwargs, report)


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], Report], Any]


@functools.cache
def _handler(func: Any) -> Handler | None:
    """Handler of an op for which the device has special rules; None: the op runs unchanged."""
    # Cached: reading an op's name takes longer than many ops.
    name = func._schema.name
    overload = f"{name}.{func._schema.overload_name}".removesuffix(".")
    if name == "aten::one_hot":
        return _one_hot
    if overload == "aten::matmul.out":
        return _matmul_into
    if overload in EXTREMES:
        return functools.partial(_last_extreme, overload)
    if name in INDEX_RULES:
        return functools.partial(_run_indexed, name, INDEX_RULES[name])
    if name in PUTS:
        return functools.partial(_run_put, name)
    return _run_index if name == "aten::index" else None


def _matmul_into(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report
) -> Tensor:
    """Write the product in the dtype of `out`, without rounding it to the dtype of the factors:
    vllm-gaudi computes float32 scores of bfloat16 queries and keys this way (flat_pa in
    vllm_gaudi/extension/ops.py)."""
    left, right = args
    out: Tensor = kwargs["out"]
    product = torch.matmul(left.to(out.dtype), right.to(out.dtype))
    if product.shape != out.shape:
        raise RuntimeError(
            f"matmul: out has the shape {tuple(out.shape)}, the product {tuple(product.shape)}"
        )
    return out.copy_(product)


def _as_int64(index: Any) -> Any:
    """Convert int32 indices, which the device accepts everywhere, to int64 for the CPU."""
    if isinstance(index, (list, tuple)):
        return [_as_int64(item) for item in index]
    return index.long() if index is not None and index.dtype == torch.int32 else index


def _with_int64(args: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """`args` with argument `number` converted to int64 indices."""
    return (*args[:number], _as_int64(args[number]), *args[number + 1 :])


def _run_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    return func(*_with_int64(args, 1), **kwargs)


def _run_indexed(
    name: str,
    rule: IndexRule,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    report: Report,
) -> Any:
    if args[0].dtype in FP8 and name in BYTES_MOVED:
        # The CPU cannot index FP8, so its bytes are moved.
        moved = tuple(
            argument.view(torch.uint8)
            if isinstance(argument, Tensor) and argument.dtype in FP8
            else argument
            for argument in args
        )
        out = _run_indexed(name, rule, func, moved, kwargs, report)
        return args[0] if name.endswith("_") else out.view(args[0].dtype)
    args = _with_int64(args, rule.indices)
    index = args[rule.indices]
    if name in INDEX_COPIES and args[0].dtype == torch.bool:
        report("untested_dtype", "the bridge's tests cover no index_copy of bool", name)
    if not index.numel():
        return func(*args, **kwargs)
    dim = 0 if rule.dim is None else args[rule.dim]
    size = args[rule.target].shape[dim] if args[rule.target].dim() else 1
    low, high = int(index.min()), int(index.max())
    if low >= 0 and high < size:
        return func(*args, **kwargs)
    _report(name, low, high, size, report)
    valid = (index >= 0) & (index < size)
    clamped = list(args)
    clamped[rule.indices] = index.clamp(0, size - 1)
    if rule.reads:
        out = func(*clamped, **kwargs)
        mask = valid
        if name == "aten::index_select":
            shape = [1] * out.dim()
            shape[dim] = -1
            mask = valid.view(shape)
        elif name == "aten::embedding":
            mask = valid.unsqueeze(-1)
        return out.masked_fill_(~mask, 0)
    return _write_valid(func, name, args, kwargs, dim, valid)


def _write_valid(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dim: int,
    valid: Tensor,
) -> Any:
    """Write to a copy of the target with an extra row, which receives the writes that the device
    ignores."""
    target, index = args[0], args[2]
    extra_shape = list(target.shape)
    extra_shape[dim] = 1
    longer = torch.cat((target, target.new_zeros(extra_shape)), dim)
    redirected = index.masked_fill(~valid, target.shape[dim])
    out = func(longer, args[1], redirected, *args[3:], **kwargs).narrow(dim, 0, target.shape[dim])
    if name.endswith("_"):
        return target.copy_(out)
    return out.clone()


def _run_put(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report
) -> Any:
    """index_put along leading dimensions; an element with a -1 index is dropped."""
    args = _with_int64(args, 1)
    target, indices, values = args[0], args[1], args[2]
    given = [index for index in indices if index is not None]
    bad = False
    for dim, index in enumerate(indices):
        if index is None or index.dtype == torch.bool or not index.numel():
            continue
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= target.shape[dim]:
            _report(name, low, high, target.shape[dim], report)
            bad = True
    if not bad or len(given) != len(indices):
        return func(*args, **kwargs)
    broadcast = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]  # torch's own
    valid = torch.ones(broadcast[0].shape, dtype=torch.bool)
    for dim, index in enumerate(broadcast):
        valid &= (index >= 0) & (index < target.shape[dim])
    tail = target.shape[len(given) :]
    valid_values = values.expand(*valid.shape, *tail)[valid]
    return func(target, [index[valid] for index in broadcast], valid_values, *args[3:], **kwargs)


def _last_extreme(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report
) -> Any:
    """Index of the last of equal values, ignoring NaN: an order on which programs must not rely."""
    reduce, other = EXTREMES[name]
    values: Tensor = args[0]
    if not values.dim():
        return func(*args, **kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if dim is None:
        values, dim, keepdim = values.flatten(), 0, False
    if values.is_floating_point():
        values = torch.where(values.isnan(), other, values)
    extreme = reduce(values, dim, keepdim=True)
    last = values.shape[dim] - 1
    index = last - (values == extreme).flip(dim).to(torch.uint8).argmax(dim, keepdim=True)
    if not keepdim:
        extreme, index = extreme.squeeze(dim), index.squeeze(dim)
    if name in ("aten::max.dim", "aten::min.dim"):
        return extreme, index
    return index


def _one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Tensor:
    """One-hot encoding with zeros for index -1; the number of classes must be given."""
    index = args[0]
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes < 0:
        raise RuntimeError("one_hot without num_classes reads its shape from data")
    if index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= classes:
            _report("aten::one_hot", low, high, classes, report)
    rows: Tensor = index.unsqueeze(-1) == torch.arange(classes)
    return rows.long()


def _report(name: str, low: int, high: int, size: int, report: Report) -> None:
    if low < -1 or high >= size:
        worst = low if low < -1 else high
        report("index_out_of_range", f"index {worst} of {size}", name)
    if low < 0:
        report("negative_index", f"index {low} of {size} is ignored on the device", name)


def check_dtype(tensor: Tensor, name: str) -> None:
    """RuntimeError for a dtype that the device does not support."""
    if tensor.dtype not in SUPPORTED_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(f"{name}: tensor type {kind} is not supported by hpu")


def wrap_to_int32(tensor: Tensor, name: str, report: Report) -> None:
    """In lazy mode int64 has 32 bits on the device: values that do not fit wrap, in place."""
    wrapped = tensor.to(torch.int32)
    if torch.equal(wrapped.to(torch.int64), tensor):
        return
    worst = int(tensor.abs().max())
    tensor.copy_(wrapped)
    report("int64_wrap", f"value {worst} does not fit 32 bits and wraps", name)

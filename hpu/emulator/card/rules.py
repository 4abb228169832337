"""Rules of single ops, for example for which ops the host waits, and how the device handles -1
indices and wide dtypes."""

import functools
from collections.abc import Callable, Mapping
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

RESHAPES = _names("view _unsafe_view reshape _reshape_alias view_as")


def add_kind(kinds: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The kinds of a view of a view. Of adjacent reshapes only the last counts (get_view_hash in
    the bridge's bindings.cpp), and its shape is part of a graph's key anyway."""
    if name not in RESHAPES:
        return (*kinds, name)
    return kinds if kinds[-1:] == ("reshape",) else (*kinds, "reshape")


ALIASES = _names("detach alias lift_fresh")
"""Views that the runtime treats as the tensor itself."""

EMPTY = _names("empty empty_strided empty_like new_empty new_empty_strided")
"""Ops that allocate without writing."""

UNDECOMPOSED = ("aten::one_hot", "aten::scaled_dot_product_attention", "aten::instance_norm")
"""Composite ops that the emulator runs undecomposed. On the card, torch composes
scaled_dot_product_attention of plain ops, whose products `check_product` checks."""

SUPPORTED_DTYPES = frozenset(
    (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""Dtypes that the runtime supports (pytorch_to_synapse_type in the bridge's create_tensor.cpp). It
would treat float64 as float32."""

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Report = Callable[[str, str, str], None]
"""Called with (kind, text, op) if an op breaks a rule."""


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
"""Ops that return the index of an extreme value: the reduction, and the value that replaces NaN. No
test of the bridge specifies which of several equal floats they find, or how they treat NaN
(tests/pytest_working/any_mode/test_hpu_min_max.py, test_hpu_argmin_max.py)."""
COPIED_TARGETS = _names("index_put_ _index_put_impl_ index_add_ scatter_add_")
"""Ops that in lazy mode compute a new version of their target, and copy the version back (the
bridge's lazy_kernels.cpp)."""
SUMS_BY_INDEX = ("aten::index_add", "aten::index_add_")
INDEX_COPIES = ("aten::index_copy", "aten::index_copy_")
BYTES_MOVED = (*INDEX_COPIES, "aten::index_select")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MASKS = (torch.bool, torch.uint8)
PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def may_wait_for_data(name: str) -> bool:
    """Whether `waits_for_data` is True for some arguments of the op."""
    return name in DATA_SHAPED or name == "aten::index" or name in PUTS


def waits_for_data(name: str, args: Arguments, kwargs: Keywords) -> bool:
    """Whether the op's shape depends on data: ops in DATA_SHAPED without an `output_size`, and
    indexing by a mask."""
    if name in DATA_SHAPED:
        return kwargs.get("output_size") is None
    if not may_wait_for_data(name):
        return False
    return any(index is not None and index.dtype in MASKS for index in args[1])


CLAMPS = _names("clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_")
FILLS = _names("masked_fill masked_fill_")
INT32 = range(-(1 << 31), 1 << 31)


@functools.cache
def _number_arguments(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument of an op that may be a number of any type."""
    arguments = enumerate(func._schema.arguments)
    return tuple((at, given.name) for at, given in arguments if "number" in str(given.type))


def with_small_numbers(
    func: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    report: Report,
    *,
    has_int64: bool,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Wrap the numbers among the arguments of an integer op to 32 bits, unless `has_int64`. Raises
    RuntimeError for clamp bounds beyond 32 bits and, without 64-bit integers, for such values of
    masked_fill (the bridge's clamp_gen.cpp, masked_fill_gen.cpp, and get_tensor_for_scalar in its
    lazy_kernels.cpp)."""
    large: dict[str, int] = {}
    for at, name in _number_arguments(func):
        value = args[at] if at < len(args) else kwargs.get(name)
        if isinstance(value, int) and value not in INT32:
            large[name] = value
    tensors = [given for given in args if isinstance(given, Tensor)] if large else []
    if not tensors or any(given.is_floating_point() for given in tensors):
        return args, kwargs
    op: str = func._schema.name
    worst = next(iter(large.values()))
    if op in CLAMPS or (op in FILLS and not has_int64):
        raise RuntimeError(f"{op}: {worst} cannot be converted to type int without overflow")
    if has_int64:
        return args, kwargs
    report("int64_wrap", f"the number {worst} does not fit 32 bits and wraps", op)
    wrapped = {name: (value + (1 << 31)) % (1 << 32) - (1 << 31) for name, value in large.items()}
    places = {at: wrapped[name] for at, name in _number_arguments(func) if name in wrapped}
    return (
        tuple(places.get(at, given) for at, given in enumerate(args)),
        {name: wrapped.get(name, given) for name, given in kwargs.items()},
    )


ELUS = _names("elu elu_ celu celu_")
GELUS = _names("gelu gelu_")


def without_factors(
    func: torch._ops.OpOverload, args: Arguments, kwargs: Keywords, report: Report
) -> tuple[torch._ops.OpOverload, Arguments]:
    """The operator elu and its arguments for a call of ELUS, without the factors of the result and
    of the exponent, which the card ignores outside of compiled code (FillEluParams in the bridge's
    elu_gen.cpp). celu is composed of elu, and so is selu."""
    name: str = func._schema.name
    named = dict(zip(("self", "alpha", "scale", "input_scale"), args, strict=False)) | kwargs
    alpha = named.get("alpha", 1)
    if name in ("aten::celu", "aten::celu_"):
        named["input_scale"] = 1 / alpha
    for factor in ("scale", "input_scale"):
        if named.get(factor, 1) != 1:
            report("ignored_argument", f"the card ignores {factor}={named[factor]:g} of elu", name)
    elu = torch.ops.aten.elu_ if name.endswith("_") else torch.ops.aten.elu
    return getattr(elu, func._overloadname), (named["self"], alpha)


def check_upload(source: Tensor) -> None:
    """Raise RuntimeError for an upload of int64 beyond 32 bits to a card that holds int64 as int32:
    lazy mode compares the largest and the smallest value on the host (validateDownCast in the
    bridge's lazy_kernels.cpp)."""
    if source.dtype != torch.int64 or not source.numel():
        return
    low, high = int(source.min()), int(source.max())
    if low not in INT32 or high not in INT32:
        raise RuntimeError(
            f"Error when trying to cast Long to Int, Input values range [{low}, {high}] exceeds "
            f"Int range [{INT32[0]}, {INT32[-1]}]"
        )


MAX_INDEX_DIMS = {"aten::index": 5, **dict.fromkeys(PUTS, 8)}
"""Maximum dimensions of a tensor that is read or written by index (the bridge's
indexing_ops_helper.h and lazy_kernels.cpp)."""


PRODUCTS = _names("""
    mm bmm addmm baddbmm addbmm matmul linear mv addmv dot vdot scaled_dot_product_attention
    convolution convolution_overrideable _convolution conv1d conv2d conv3d
""") | {f"hpu::{name}" for name in ("sdpa_recomp_fwd", "sdpa_fwd", "mixture_of_experts")}
"""Ops of the matrix unit."""


def check_product(name: str, args: tuple[object, ...]) -> None:
    """Raise RuntimeError for an op in PRODUCTS with a float32 operand, which the compiler refuses
    for Gaudi 2B, 2C and 2D. Only operands count, not the result (validateNodeForGraph in
    mme_node.cpp and osal_linux.cpp of HabanaAI/Intel_Gaudi3_Software), and not the scales and
    router weights of experts, which the matrix unit does not multiply. Torch converts 16-bit
    operands of attention to float32 unless its switch allows 16-bit products
    (_scaled_dot_product_attention_math in torch's attention.cpp)."""
    given_to_unit = args[:1] if name == "hpu::mixture_of_experts" else args
    refused = [torch.float32]
    if name == "aten::scaled_dot_product_attention":
        allowed = torch._C._get_math_sdp_allow_fp16_bf16_reduction()
        refused += [] if allowed else [torch.bfloat16, torch.float16]
    tensors = [given for given in given_to_unit if isinstance(given, Tensor)]
    if name in PRODUCTS and any(given.dtype in refused for given in tensors):
        raise RuntimeError(
            f"Graph compile failed. {name}: Device Limitation - float32 operation is not supported"
        )


def check_result_dtype(args: tuple[Tensor, ...], out: Tensor) -> None:
    """Raise RuntimeError for a matmul whose result has another dtype than its operands, which
    releases before 1.24.0.171 do not support (vllm-gaudi, commit a8211ff1)."""
    if args[0].dtype != out.dtype:
        raise RuntimeError(f"matmul: the operands are {args[0].dtype}, the result is {out.dtype}")


def check_running_sum(args: tuple[Tensor, ...], report: Report) -> None:
    """Report a `cumsum_` of 16-bit floats in eager mode: the bridge's test expects wrong results
    from the fourth entry on (test_hpu_cumulative_ops.py)."""
    if args[0].dtype in (torch.bfloat16, torch.float16):
        report("running_sum", "cumsum_ of 16-bit floats is wrong in eager mode", "aten::cumsum_")


def check_number(name: str, args: tuple[Tensor, ...]) -> None:
    """Raise NotImplementedError for the number in an FP8 tensor: the bridge reads none
    (local_scalar_dense.cpp)."""
    dtype = args[0].dtype
    if name == "aten::_local_scalar_dense" and dtype in FP8:
        kind = "Float8_e4m3fn" if dtype == torch.float8_e4m3fn else "Float8_e5m2"
        raise NotImplementedError(f"\"_local_scalar_dense\" not implemented for '{kind}'")


SHIFTS = _names("""
    __rshift__ __lshift__ __irshift__ __ilshift__ bitwise_right_shift bitwise_right_shift_
    bitwise_left_shift bitwise_left_shift_
""")
DIFFERENCES = _names("sub sub_ rsub subtract subtract_")
BYTES = (torch.int8, torch.uint8)


def check_bytes(name: str, args: tuple[Tensor, ...], report: Report, *, is_compiled: bool) -> None:
    """Report a difference of 8-bit integers, which the bridge does not support
    (test_hpu_convert_from_int4.py), and a shift of 8-bit integers outside of compiled code, which
    its tests expect to fail (test_hpu_bitwise_shift.py of lazy and of eager mode)."""
    if name not in DIFFERENCES and (name not in SHIFTS or is_compiled):
        return
    if torch.result_type(args[0], args[1]) in BYTES:
        report("byte_arithmetic", "a difference or a shift of 8-bit integers", name)


COPIED_DIMS = {"aten::copy_": 8, "aten::_to_copy": 8}
"""Maximum dimensions of a tensor that lazy mode copies (the bridge's kernels_register.cpp)."""


def check_dims(name: str, args: tuple[Tensor, ...], limits: Mapping[str, int]) -> None:
    """Raise RuntimeError for a tensor of more dimensions than `limits` has for the op."""
    most, dims = limits[name], args[0].dim()
    if dims > most:
        raise RuntimeError(
            f"{name.removeprefix('aten::')} op doesn't support more than {most} dims, got {dims}"
        )


def check_put(name: str, args: tuple[Tensor, list[Tensor | None], Tensor], report: Report) -> None:
    """Report a lazy-mode index_put of several values whose index follows an unindexed dimension:
    the bridge's test calls it unsupported (test_index_put_4d.py)."""
    has_gap = not all(isinstance(index, Tensor) for index in args[1])
    if has_gap and args[2].numel() > 1:
        report("index_values", "several values for an index after an unindexed dimension", name)


def check_on_card(name: str, args: tuple[Tensor, list[Tensor | None], Tensor]) -> None:
    """Raise RuntimeError for an index_put of lazy mode with a host tensor, also without dimensions
    (_index_put_impl_hpu_lazy_ in the bridge's lazy_kernels.cpp of 2025)."""
    for given in (*args[1], args[2]):
        if isinstance(given, Tensor) and given.device.type != "hpu":
            raise RuntimeError(
                f"{name}: Expected all tensors to be on the HPU device, but found a tensor on "
                f"{given.device}"
            )


def selects_all(args: tuple[Tensor, Tensor], report: Report) -> bool:
    """Whether a masked_select of lazy mode returns its input, because the mask has more dimensions
    (masked_select_hpu_lazy in the bridge's lazy_kernels.cpp). Reported."""
    is_larger = args[1].dim() > args[0].dim()
    if is_larger:
        text = "a mask with more dimensions than the input selects nothing: the input is returned"
        report("mask_dims", text, "aten::masked_select")
    return is_larger


def is_cast(func: torch._ops.OpOverload, args: Arguments) -> bool:
    """Whether a view as another dtype is a cast in lazy mode: a view of bytes as bool
    (view_dtype_hpu in the bridge's lazy_kernels.cpp)."""
    if func is not torch.ops.aten.view.dtype or args[1] != torch.bool:
        return False
    return bool(args[0].element_size() == 1 and args[0].dtype != torch.bool)


def run(func: Any, args: Arguments, kwargs: Keywords, report: Report) -> Any:
    """Run the op on CPU tensors with the device's handling of indices."""
    handler = _handler(func)
    return func(*args, **kwargs) if handler is None else handler(func, args, kwargs, report)


Handler = Callable[[Any, Arguments, Keywords, Report], Any]


@functools.cache
def _handler(func: Any) -> Handler | None:
    """Handler of an op for which the device has special rules; None: the op runs unchanged."""
    # Cached: reading an op's name takes longer than many ops.
    name = func._schema.name
    overload = f"{name}.{func._schema.overload_name}".removesuffix(".")
    if overload == "aten::matmul.out":
        return _matmul_into
    if overload in EXTREMES:
        return functools.partial(_last_extreme, overload)
    if name in INDEX_RULES:
        return functools.partial(_run_indexed, name, INDEX_RULES[name])
    if name in PUTS:
        return functools.partial(_run_put, name)
    return OTHER_HANDLERS.get(name)


def _matmul_into(func: object, args: Arguments, kwargs: Keywords, report: Report) -> Tensor:
    """Matmul in the dtype of `out`, without rounding the result to the dtype of the inputs:
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


def _with_int64(args: Arguments, number: int) -> tuple[Any, ...]:
    """`args` with argument `number` converted to int64 indices."""
    return (*args[:number], _as_int64(args[number]), *args[number + 1 :])


def _take(func: Any, args: Arguments, kwargs: Keywords, report: Report) -> Any:
    """`take`, also with int32 indices (the bridge's test_hpu_take.py)."""
    return func(*_with_int64(args, 1), **kwargs)


def _run_index(func: Any, args: Arguments, kwargs: Keywords, report: Report) -> Any:
    """Indexing that returns zeros for -1 and for other indices out of range, because the card
    implements it with `gather`: "TPC guids like 'gather' doesn't support negative indexing" (the
    bridge's index_kernels.cpp)."""
    args = _with_int64(args, 1)
    target, given = args[0], args[1]
    if any(isinstance(index, Tensor) and index.dtype in MASKS for index in given):
        return func(*args, **kwargs)
    numbers = {dim: index for dim, index in enumerate(given) if isinstance(index, Tensor)}
    is_bad = False
    for dim, index in numbers.items():
        low, high = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
        if index.numel() and (low < 0 or high >= target.shape[dim]):
            _report("aten::index", low, high, target.shape[dim], report)
            is_bad = True
    if not is_bad:
        return func(*args, **kwargs)
    sizes = target.shape
    clamped = [
        numbers[dim].clamp(0, sizes[dim] - 1) if dim in numbers else None
        for dim in range(len(given))
    ]
    out = func(target, clamped, **kwargs)
    broadcast = torch.broadcast_tensors(*numbers.values())  # type: ignore[no-untyped-call]  # torch's own
    valid = torch.ones(broadcast[0].shape, dtype=torch.bool)
    for dim, index in zip(numbers, broadcast, strict=True):
        valid &= (index >= 0) & (index < sizes[dim])
    # Separated indices become the first dimensions of the result.
    first, last = min(numbers), max(numbers)
    rest = target.dim() - 1 - last if last - first < len(numbers) else out.dim() - valid.dim()
    return out.masked_fill_(~valid.view(*valid.shape, *(1,) * rest), 0)


def _run_indexed(
    name: str,
    rule: IndexRule,
    func: Any,
    args: Arguments,
    kwargs: Keywords,
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
    args: Arguments,
    kwargs: Keywords,
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


def _run_put(name: str, func: Any, args: Arguments, kwargs: Keywords, report: Report) -> Any:
    """index_put. Elements with an index out of range, for example -1, are dropped: they are written
    to extra rows of a copy of the target."""
    args = _with_int64(args, 1)
    target: Tensor = args[0]
    longer, indices, dim = target, list(args[1]), 0
    for number, index in enumerate(args[1]):
        if isinstance(index, Tensor) and index.dtype in MASKS:
            dim += index.dim()
            continue
        if isinstance(index, Tensor) and index.numel():
            low, high, size = int(index.min()), int(index.max()), target.shape[dim]
            if low < 0 or high >= size:
                _report(name, low, high, size, report)
                extra = longer.new_zeros((*longer.shape[:dim], 1, *longer.shape[dim + 1 :]))
                longer = torch.cat((longer, extra), dim)
                indices[number] = index.masked_fill((index < 0) | (index >= size), size)
        dim += 1
    if longer is target:
        return func(*args, **kwargs)
    written = func(longer, indices, *args[2:], **kwargs)
    out = written[tuple(slice(size) for size in target.shape)]
    return target.copy_(out) if name.endswith("_") else out.clone()


def add_by_index(
    func: torch._ops.OpOverload,
    args: tuple[Tensor, int, Tensor, Tensor],
    kwargs: dict[str, float],
    report: Report,
) -> Tensor:
    """index_add in lazy mode. Duplicate indices are reported: the bridge's test expects results
    that differ from torch's (test_index_add_duplicate_indices). With at most as many indices as
    rows, only one of the duplicates is added: the rows are selected, increased and scattered
    (IndexAddOperator in the bridge's index_kernels.cpp)."""
    target, dim, index, source = args
    name: str = func._schema.name
    rows = target.shape[dim] if target.dim() else 1
    has_equal = len(set(index.tolist())) < index.numel()
    if has_equal:
        report("duplicate_index", "duplicate indices of a sum in lazy mode", name)
    is_valid = index.numel() and int(index.min()) >= 0 and int(index.max()) < rows
    if not (has_equal and is_valid and index.numel() <= rows):
        found: Tensor = run(func, args, kwargs, report)
        return found
    index = index.long()
    increased = target.index_select(dim, index) + source * kwargs.get("alpha", 1)
    copy = target.index_copy_ if name.endswith("_") else target.index_copy
    return copy(dim, index, increased)


def _last_extreme(name: str, func: Any, args: Arguments, kwargs: Keywords, report: Report) -> Any:
    """Result of an op of EXTREMES, ignoring NaN, with the last index of equal extremes. Programs
    must not rely on this order."""
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


def _one_hot(func: object, args: Arguments, kwargs: Keywords, report: Report) -> Tensor:
    """One-hot encoding, with zeros for an index out of range. Raises RuntimeError without the
    number of classes."""
    index = args[0]
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes < 0:
        raise RuntimeError("one_hot without num_classes reads its shape from data")
    if index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= classes:
            _report("aten::one_hot", low, high, classes, report)
    rows: Tensor = index.unsqueeze(-1) == torch.arange(classes)
    return rows.to(index.dtype)


def _searchsorted(
    func: Callable[..., Tensor], args: Arguments, kwargs: Keywords, report: Report
) -> Tensor:
    """searchsorted. Raises RuntimeError for values that have other leading dimensions than the
    boundaries: boundaries of one dimension only take such values (SearchSortedMeta in the bridge's
    searchsorted_gen.cpp)."""
    boundaries, values = args[:2]
    shape = tuple(values.shape) if isinstance(values, Tensor) else (1,)
    if not shape or boundaries.shape[:-1] != shape[:-1]:
        raise RuntimeError(
            "torch.searchsorted(): the first N-1 dimensions of boundaries tensor and input value "
            f"tensor must match, but we got boundaries tensor {list(boundaries.shape)} and input "
            f"value tensor {list(shape)}"
        )
    return func(*args, **kwargs)


OTHER_HANDLERS: dict[str, Handler] = {
    "aten::index": _run_index,
    "aten::one_hot": _one_hot,
    "aten::searchsorted": _searchsorted,
    "aten::take": _take,
}


def _report(name: str, low: int, high: int, size: int, report: Report) -> None:
    if low < -1 or high >= size:
        worst = low if low < -1 else high
        report("index_out_of_range", f"index {worst} of {size}", name)
    if low < 0:
        report("negative_index", f"index {low} of {size} is ignored on the device", name)


def check_dtype(tensor: Tensor, name: str) -> None:
    """Raise RuntimeError for a dtype that the device does not support."""
    if tensor.dtype not in SUPPORTED_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(f"{name}: tensor type {kind} is not supported by hpu")


def wrap_to_int32(tensor: Tensor, name: str, report: Report) -> None:
    """Wrap int64 values to 32 bits in place, as a card without 64-bit integers does; report a
    change."""
    wrapped = tensor.to(torch.int32)
    if torch.equal(wrapped.to(torch.int64), tensor):
        return
    worst = int(tensor.abs().max())
    tensor.copy_(wrapped)
    report("int64_wrap", f"value {worst} does not fit 32 bits and wraps", name)

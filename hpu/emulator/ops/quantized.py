"""Reference implementations of quantized ops on CPU tensors: FP8 casts, which saturate like the
card's generation, FP8 matmuls, int4 unpacking, mixture of experts."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Scale = Tensor | float | list[float] | None

OVERLOADS = (("", "Tensor?", "=None"), (".scalar", "float", ""), (".scalar_list", "float[]", ""))
"""Overload names, the type of a scale in each, and its default: only a tensor may be missing."""

CAST_TO = (
    "cast_to_fp8_v2{name}(Tensor input, {scale} scale{default}, bool stochastic_rounding=False, "
    "bool is_amax=False, ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)"
)
CAST_FROM = (
    "cast_from_fp8{name}(Tensor input, {scale} scale, ScalarType out_dtype, "
    "int[]? scale_shape=None) -> Tensor"
)
GEMM = (
    "fp8_gemm_v2{name}(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, "
    "ScalarType out_dtype, {scale} A_scale_inv{default}, {scale} B_scale_inv{default}, "
    "Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor"
)
WIDE = (torch.float32, torch.bfloat16)
"""Input dtypes of casts to FP8, besides FP8 itself, and output dtypes of casts from FP8 (the
bridge's fp8_ops.cpp)."""
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_FOR_CAST = (
    "calculate_scale_for_cast(Tensor input, int maxMode, int scaleMode, int reduceAxis=0, "
    "bool reduceKeepdim=False, float fullscale=1.0, float backoff=1.0) -> Tensor"
)
NO_MAX, MAX_OF_TENSOR, MAX_OF_AXIS = range(3)
"""Values of maxMode."""
NO_ROUNDING, POWER_OF_2 = range(2)
"""Values of scaleMode."""
FROM_INT4 = (
    "convert_from_int4(Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype) "
    "-> Tensor"
)
FROM_UINT4 = FROM_INT4.replace("int4", "uint4")
FROM_UINT4_GROUPED = FROM_UINT4.replace(" out_dtype)", " out_dtype, Tensor? g_idx=None)")
"""Schema of later releases, with the group of each row."""
MOE = (
    "mixture_of_experts(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
    "Tensor[] w1, Tensor[] w2, Tensor[] w3, bool permuted_weights, str activation, "
    "int experts_min, int experts_max, *, int chunk_size=0, int total_experts=0) -> Tensor"
)
MOE_FUSED = (
    "mixture_of_experts.fused_weights(Tensor hidden_states, Tensor expert_routing_table, "
    "Tensor router_weights, Tensor[] w12, Tensor[] w3, bool permuted_weights, str activation, "
    "int experts_min, int experts_max, *, int chunk_size=0, int total_experts=0) -> Tensor"
)
MOE_FP8 = (
    "mixture_of_experts.fp8_fused_weights(Tensor hidden_states, Tensor expert_routing_table, "
    "Tensor router_weights, Tensor[] w12, Tensor[] w3, Tensor d_scale_hidden_states, "
    "Tensor[] d_scale_intermediate_hidden_states, Tensor[] d_scale_w12, Tensor[] d_scale_w3, "
    "bool permuted_weights, str activation, int experts_min, int experts_max, *, "
    "int chunk_size=0, int total_experts=0) -> Tensor"
)
MOE_FP8_DYNAMIC = MOE_FP8.replace("weights(", "weights_dynamic(").replace(
    "Tensor[] d_scale_intermediate_hidden_states, ", ""
)
"""Schema without scales for the inputs of the second matmul. Both schemas follow the bridge's
declarations (mixture_of_experts_fp8_fused_weights) and the calls of vllm-gaudi."""


def _spread(scale: Scale, shape: list[int] | None) -> Tensor | float:
    """`scale` as a number or a float32 tensor, in `shape` if it has several elements; 1 if it is
    missing. Raises RuntimeError for a shape with another number of elements (ValidateScaleShape in
    the bridge's fp8_ops.cpp)."""
    if scale is None:
        return 1.0
    if isinstance(scale, float):
        return scale
    wide = torch.tensor(scale) if isinstance(scale, list) else scale.float()
    if shape and math.prod(shape) != wide.numel():
        raise RuntimeError(
            f"Number of scale elements ({wide.numel()}) is not equal to number of scale_shape "
            f"elements ({math.prod(shape)})"
        )
    if wide.numel() == 1:
        return wide.reshape(())
    return wide.view(shape) if shape is not None else wide


def _times(op: str, x: Tensor, scale: Scale, shape: list[int] | None) -> Tensor:
    """`x` times the scale in float32. Raises RuntimeError for a scale that broadcasts `x` to a
    larger shape: results of the bridge's casts have the shape of `x` (CastToFp8V2OutputShape in its
    fp8_ops.cpp)."""
    wide = _spread(scale, shape)
    out = x.float() * wide
    if out.shape != x.shape:
        given = tuple(wide.shape) if isinstance(wide, Tensor) else ()
        raise RuntimeError(
            f"{op}: the scale has the shape {given}, which does not broadcast to the input's shape "
            f"{tuple(x.shape)}"
        )
    return out


def _check_scale(name: str, scale: Scale, shape: list[int] | None, sizes: tuple[int, ...]) -> None:
    """Raise RuntimeError for a tensor of scales that does not broadcast to `sizes`: a scale for
    each row of A, or for each column of B after its transposition (ValidateFp8GemmScales in the
    bridge's fp8_gemm_gen.cpp). Block scales, which the bridge also accepts, are not emulated."""
    if not isinstance(scale, Tensor) or scale.numel() == 1:
        return
    given = shape or list(scale.shape)
    ends = zip(reversed(given), reversed(sizes), strict=False)
    if len(given) > len(sizes) or any(size not in (1, most) for size, most in ends):
        raise RuntimeError(
            f"fp8_gemm_v2: the scale of {name} has the shape {tuple(given)}, which does not "
            f"broadcast to {sizes}"
        )


class Fp8:
    """FP8 casts and matmuls of a device with `largest` as the largest e4m3 value."""

    def __init__(
        self,
        largest: float,
        runs_eagerly: Callable[[], bool] = lambda: False,
        *,
        mixes_types: bool = True,
    ) -> None:
        """`runs_eagerly`: see Int4Conversion; the bridge's tests also list FP8 experts as
        unsupported in eager mode. `mixes_types`: whether the operands of a matmul may have
        different FP8 types."""
        self._largest = largest
        self._runs_eagerly = runs_eagerly
        self._mixes_types = mixes_types

    def cast_to(
        self,
        x: Tensor,
        scale: Scale = None,
        stochastic_rounding: bool = False,
        is_amax: bool = False,
        dtype: torch.dtype | None = None,
        scale_shape: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(x times the multiplier `scale`, saturated, in FP8; largest |x|, or (0) without
        `is_amax`). Raises RuntimeError without a dtype, which the bridge requires, for an input
        that is neither in WIDE nor of the target's dtype, for FP8 inputs with `is_amax`, and for a
        scale that does not broadcast to the shape of `x`."""
        if not dtype:
            raise RuntimeError("cast_to_fp8_v2 needs a dtype: expected a scalar type, got None")
        target = dtype
        if x.dtype not in (*WIDE, *NARROW):
            raise RuntimeError(
                "CastToFp8V2 input dtype must be one of [float, bfloat16, float8_e5m2, "
                f"float8_e4m3fn], got {x.dtype}"
            )
        if x.dtype in NARROW and is_amax:
            raise RuntimeError("CastToFp8V2 must have no amax for float8.")
        if x.dtype in NARROW and x.dtype != target:
            raise RuntimeError(
                "CastToFp8V2 input and output must have the same dtype for float8, but are "
                f"{x.dtype} and {target}"
            )
        largest = self._largest_of(target)
        wide = _times("cast_to_fp8_v2", x, scale, scale_shape)
        out = wide.clamp(-largest, largest).to(target)
        amax = x.float().abs().max() if is_amax else torch.zeros(0)
        return out, amax.to(torch.float32)

    def cast_from(
        self,
        x: Tensor,
        scale: Scale,
        out_dtype: torch.dtype,
        scale_shape: list[int] | None = None,
    ) -> Tensor:
        """Dequantize: x times `scale`. Raises RuntimeError for an `out_dtype` that is not in WIDE,
        and for a scale that does not broadcast to the shape of `x`."""
        if out_dtype not in WIDE:
            raise RuntimeError(
                f"CastFromFp8 output dtype must be equal to float or bfloat16, got {out_dtype}"
            )
        return _times("cast_from_fp8", x, scale, scale_shape).to(out_dtype)

    def gemm(
        self,
        A: Tensor,
        trans_A: bool,
        B: Tensor,
        trans_B: bool,
        D: Tensor | None,
        out_dtype: torch.dtype,
        A_scale_inv: Scale = None,
        B_scale_inv: Scale = None,
        bias: Tensor | None = None,
        accumulate: bool = False,
        B_scale_shape: list[int] | None = None,
    ) -> Tensor:
        """A @ B in float32, times both dequantization scales.

        Raises RuntimeError for operands other than FP8 (the bridge's tests have no others), for two
        FP8 types unless `mixes_types` (test_hpu_scaled_mm.py), for a transposed vector, for values
        above the card's range, for `accumulate` without `D`, and for scales that do not broadcast
        to their operand.
        """
        if not {A.dtype, B.dtype} <= {*NARROW} or (A.dtype != B.dtype and not self._mixes_types):
            raise RuntimeError(
                "Graph compile failed. fp8_gemm_v2: incompatible types, A is "
                f"{A.dtype} and B is {B.dtype}"
            )
        if (trans_A and A.dim() < 2) or (trans_B and B.dim() < 2):
            raise RuntimeError(
                "Input tensor must have at least 2 dimensions to perform transpose operation."
            )
        for name, operand in (("A", A), ("B", B)):
            self._check_range(f"fp8_gemm_v2, {name}", operand)
        left = A.float().transpose(-1, -2) if trans_A else A.float()
        right = B.float().transpose(-1, -2) if trans_B else B.float()
        _check_scale("A", A_scale_inv, None, (*left.shape[:-1], 1))
        _check_scale("B", B_scale_inv, B_scale_shape, (*right.shape[:-2], 1, right.shape[-1]))
        out = left @ right * _spread(A_scale_inv, None) * _spread(B_scale_inv, B_scale_shape)
        if bias is not None:
            out = out + bias.float()
        if accumulate:
            if D is None:
                raise RuntimeError(
                    "Accumulation tensor must be provided at index 4 for Fp8GemmV2, when "
                    "accumulate is true"
                )
            out = out + D.float()
        return out.to(out_dtype)

    def experts(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        w12: list[Tensor],
        w3: list[Tensor],
        d_scale_hidden_states: Tensor,
        d_scale_intermediate_hidden_states: list[Tensor],
        d_scale_w12: list[Tensor],
        d_scale_w3: list[Tensor],
        permuted_weights: bool,
        activation: str,
        experts_min: int,
        experts_max: int,
        chunk_size: int = 0,
        total_experts: int = 0,
    ) -> Tensor:
        """`mixture_of_experts_fused` of FP8 tensors with dequantization scales: `hidden_states` has
        a scale per token (tokens, 1) or a single scale; a weight has a scale per output or a single
        scale. The inputs of an expert's second matmul are quantized with its
        `d_scale_intermediate_hidden_states`. Returns bfloat16."""
        inner = d_scale_intermediate_hidden_states
        if len(inner) != len(w3):
            raise RuntimeError(
                f"mixture_of_experts: {len(inner)} scales of the second inputs, {len(w3)} experts "
                f"need {len(w3)}"
            )
        scales = (d_scale_hidden_states, d_scale_w12, d_scale_w3)
        tokens = (hidden_states, expert_routing_table, router_weights)
        form = (permuted_weights, activation, experts_min, experts_max)
        return self._experts(tokens, (w12, w3), scales, form, inner)

    def dynamic_experts(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        w12: list[Tensor],
        w3: list[Tensor],
        d_scale_hidden_states: Tensor,
        d_scale_w12: list[Tensor],
        d_scale_w3: list[Tensor],
        permuted_weights: bool,
        activation: str,
        experts_min: int,
        experts_max: int,
        chunk_size: int = 0,
        total_experts: int = 0,
    ) -> Tensor:
        """Like `experts`, with the inputs of the second matmul quantized per token."""
        scales = (d_scale_hidden_states, d_scale_w12, d_scale_w3)
        tokens = (hidden_states, expert_routing_table, router_weights)
        form = (permuted_weights, activation, experts_min, experts_max)
        return self._experts(tokens, (w12, w3), scales, form, None)

    def _experts(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        weights: tuple[list[Tensor], list[Tensor]],
        scales: tuple[Tensor, list[Tensor], list[Tensor]],
        form: tuple[bool, str, int, int],
        inner_scales: list[Tensor] | None,
    ) -> Tensor:
        (hidden, table, shares), (w12, w3) = tokens, weights
        (of_hidden, of_w12, of_w3), (is_permuted, activation, first, last) = scales, form
        if self._runs_eagerly():
            raise RuntimeError("mixture_of_experts in FP8 is not supported in eager mode")
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise RuntimeError(f"mixture_of_experts: {activation!r} is not one of {known}")
        sizes = {len(scale) for scale in (w12, w3, of_w12, of_w3)}
        if sizes != {last - first + 1}:
            raise RuntimeError(
                f"mixture_of_experts: {sorted(sizes)} weights and scales, experts {first} to "
                f"{last} need {last - first + 1} of each"
            )
        dtypes = {weight.dtype for weight in (hidden, *w12, *w3)}
        if dtypes != {torch.float8_e4m3fn} or shares.dtype != torch.bfloat16:
            raise RuntimeError(
                "Graph compile failed. mixture_of_experts: incompatible type, hidden and weights "
                f"are {', '.join(sorted(map(str, dtypes)))}, router weights {shares.dtype}"
            )
        for weight in (hidden, *w12, *w3):
            self._check_range("mixture_of_experts", weight)
        wide = [_scaled(weight, own, is_permuted) for weight, own in zip(w12, of_w12, strict=True)]
        narrow = [_scaled(weight, own, is_permuted) for weight, own in zip(w3, of_w3, strict=True)]
        x = (hidden.float() * of_hidden.float()).bfloat16()
        parts = [weight.bfloat16().chunk(2, 0 if is_permuted else 1) for weight in wide]
        w1, w2 = [part[0] for part in parts], [part[1] for part in parts]
        check_experts(
            x, table, shares, w1, w2, [weight.bfloat16() for weight in narrow], is_permuted
        )
        outputs = []
        for number, (gate_up, down) in enumerate(zip(wide, narrow, strict=True)):
            gate_up, down = (weight.t() if is_permuted else weight for weight in (gate_up, down))
            sums = (hidden.float() * of_hidden.float()) @ gate_up
            gate, up = sums.bfloat16().chunk(2, dim=1)
            inner = ACTIVATIONS[activation](gate) * up
            if inner_scales is None:
                scale = (inner.float().abs().amax(1, keepdim=True) + 1e-8) / self._largest
            else:
                scale = inner_scales[number].float()
            codes, _ = self.cast_to(inner, 1 / scale, dtype=torch.float8_e4m3fn)
            outputs.append((codes.float() * scale @ down).bfloat16())
        return weighted_sum(outputs, table, shares, first)

    def _largest_of(self, dtype: torch.dtype) -> float:
        """Largest value of an FP8 type on this card."""
        return self._largest if dtype == torch.float8_e4m3fn else torch.finfo(dtype).max

    def _check_range(self, name: str, operand: Tensor) -> None:
        worst = float(operand.float().abs().max()) if operand.numel() else 0.0
        largest = self._largest_of(operand.dtype)
        if worst > largest:
            raise RuntimeError(
                f"{name}: an operand has {worst}, the largest FP8 value is {largest}"
            )


def scale_for_cast(
    input: Tensor,
    maxMode: int,
    scaleMode: int,
    reduceAxis: int = 0,
    reduceKeepdim: bool = False,
    fullscale: float = 1.0,
    backoff: float = 1.0,
) -> Tensor:
    """Scales with which the largest |input| becomes `fullscale` * `backoff`, in the dtype of
    `input`: (1) for the whole tensor, or per slice along `reduceAxis`; with `NO_MAX`, `input` holds
    the scales. `POWER_OF_2` rounds scales up to a power of two. Scales of zeros are zeros.

    Arguments, shapes and formula: hpu_ops/backend/calculate_scale_for_cast_gen.cpp and the test
    test_hpu_calculate_scale_for_cast of HabanaAI/gaudi-pytorch-bridge.
    """
    if maxMode not in (NO_MAX, MAX_OF_TENSOR, MAX_OF_AXIS):
        raise RuntimeError(f"calculate_scale_for_cast: maxMode is {maxMode}, it must be 0, 1 or 2")
    if scaleMode not in (NO_ROUNDING, POWER_OF_2):
        raise RuntimeError(f"calculate_scale_for_cast: scaleMode is {scaleMode}, it must be 0 or 1")
    scale = input.float()
    if maxMode == MAX_OF_TENSOR:
        scale = scale.abs().max().reshape(1)
    elif maxMode == MAX_OF_AXIS:
        scale = scale.abs().amax(reduceAxis, keepdim=reduceKeepdim)
    if maxMode != NO_MAX:
        scale = scale * (1.0 / (fullscale * backoff))
    if scaleMode == POWER_OF_2:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return scale.to(input.dtype)


def _scaled(weight: Tensor, scale: Tensor, is_permuted: bool) -> Tensor:
    """Dequantize an FP8 weight to float32 with a scale per output or a single scale."""
    if scale.dim() == 0:
        return weight.float() * scale.float()
    outputs = weight.shape[0 if is_permuted else 1]
    if scale.shape != (outputs,):
        raise RuntimeError(
            f"mixture_of_experts: the scale is {tuple(scale.shape)}, it must be () or ({outputs},)"
        )
    return weight.float() * (scale.float().unsqueeze(1) if is_permuted else scale.float())


def _nibbles(packed: Tensor) -> Tensor:
    """Eight unsigned 4-bit values of each int32, lowest first, along the last dimension."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2)


class Int4Conversion:
    """Converts 4-bit weights to a float type. `runs_eagerly`: whether an op runs outside of lazy
    mode and of compiled code, which the bridge's tests list as unsupported for these ops."""

    def __init__(self, runs_eagerly: Callable[[], bool]) -> None:
        self._runs_eagerly = runs_eagerly

    def from_uint4(
        self,
        input: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        out_dtype: torch.dtype,
        g_idx: Tensor | None = None,
    ) -> Tensor:
        """(..., n) int32 to (..., 8 * n): (value - zero point) * scale. Raises RuntimeError for
        other types and shapes, and in eager mode.

        `scale` has the shape of the output, or is (groups, columns) for an `input` of two
        dimensions, whose rows are divided evenly among the groups, or assigned to groups by `g_idx`
        (rows) int32. Zero points have the scale's shape or, as int32, are packed like the input.
        """
        values = self._unpack("convert_from_uint4", input)
        return _dequantize("convert_from_uint4", values, scale, zero_point, out_dtype, g_idx)

    def from_int4(
        self, input: Tensor, scale: Tensor, zero_point: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Like `from_uint4` for two's complement values."""
        values = _signed(self._unpack("convert_from_int4", input))
        if zero_point is not None and zero_point.dtype == torch.int32:
            zero_point = _signed(_nibbles(zero_point)).to(scale.dtype)
        return _dequantize("convert_from_int4", values, scale, zero_point, out_dtype, None)

    def _unpack(self, name: str, packed: Tensor) -> Tensor:
        if self._runs_eagerly():
            raise RuntimeError(f"{name} is not supported in eager mode")
        if packed.dtype != torch.int32:
            raise RuntimeError(f"{name} takes packed int32, got {packed.dtype}")
        return _nibbles(packed)


def _signed(nibbles: Tensor) -> Tensor:
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _dequantize(
    name: str,
    values: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
    g_idx: Tensor | None,
) -> Tensor:
    groups = None
    if g_idx is not None or scale.shape != values.shape:
        groups = _groups_of_rows(name, values, scale, g_idx)
    _check_forms(name, zero_point, scale, out_dtype, is_grouped=isinstance(g_idx, Tensor))
    wide = values.float()
    if zero_point is not None:
        zeros = _nibbles(zero_point) if zero_point.dtype == torch.int32 else zero_point
        if zeros.shape != scale.shape:
            raise RuntimeError(
                f"{name}: zero points are {tuple(zero_point.shape)} {zero_point.dtype}, scales "
                f"{tuple(scale.shape)}: they must have the same shape, or int32 with eight zero "
                "points each"
            )
        wide = wide - (zeros if groups is None else zeros[groups]).float()
    return (wide * (scale if groups is None else scale[groups]).float()).to(out_dtype)


def _check_forms(
    name: str,
    zero_point: Tensor | None,
    scale: Tensor,
    out_dtype: torch.dtype,
    *,
    is_grouped: bool,
) -> None:
    """Raise RuntimeError for dtypes that the bridge refuses (convert_from_int4_gen.cpp of 2025):
    with a group index the output is bfloat16 and the zero points are packed, else zero points
    have the dtype of the input or of the scales."""
    if is_grouped and out_dtype != torch.bfloat16:
        raise RuntimeError(
            f"{name}: only bfloat16 output is supported with a group index, got {out_dtype}"
        )
    taken = (torch.int32,) if is_grouped else (torch.int32, scale.dtype)
    if isinstance(zero_point, Tensor) and zero_point.dtype not in taken:
        raise RuntimeError(
            f"{name}: zero points are {zero_point.dtype}, they must be "
            f"{' or '.join(map(str, taken))}"
        )


def _groups_of_rows(name: str, values: Tensor, scale: Tensor, g_idx: Tensor | None) -> Tensor:
    """Group of each row of `values`, (rows) int64."""
    if values.dim() != 2 or scale.dim() != 2 or scale.shape[1] != values.shape[1]:
        raise RuntimeError(
            f"{name}: scales are {tuple(scale.shape)}, weights {tuple(values.shape)}: scales of "
            "weights (rows, columns) must be (groups, columns) or (rows, columns)"
        )
    rows, groups = values.shape[0], scale.shape[0]
    if rows % groups:
        raise RuntimeError(f"{name}: {rows} rows do not divide evenly into {groups} groups")
    if g_idx is None:
        return torch.arange(rows) // (rows // groups)
    if g_idx.dtype != torch.int32 or g_idx.shape != (rows,):
        raise RuntimeError(
            f"{name}: g_idx is {tuple(g_idx.shape)} {g_idx.dtype}, it must be ({rows},) int32"
        )
    if rows and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
        raise RuntimeError(
            f"{name}: g_idx holds {int(g_idx.min())} to {int(g_idx.max())}, there are {groups} "
            "groups"
        )
    return g_idx.long()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def mixture_of_experts(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> Tensor:
    """Sum over each token's chosen experts of weight * w3(act(w1 x) * w2 x).

    `hidden_states` (tokens, hidden); table and weights (tokens, chosen); weights are (out, in) if
    `permuted_weights`, (in, out) if not. Only experts `experts_min` to `experts_max` are on this
    card; others add nothing. Raises RuntimeError for arguments that the card does not compile.
    """
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise RuntimeError(f"mixture_of_experts: activation {activation!r} is not one of {known}")
    if len(w1) != experts_max - experts_min + 1:
        raise RuntimeError(
            f"mixture_of_experts: {len(w1)} weights, experts {experts_min} to {experts_max} need "
            f"{experts_max - experts_min + 1}"
        )
    check_experts(hidden_states, expert_routing_table, router_weights, w1, w2, w3, permuted_weights)
    act = ACTIVATIONS[activation]
    experts = []
    for gate, up, down in zip(w1, w2, w3, strict=True):
        if permuted_weights:
            gate, up, down = gate.t(), up.t(), down.t()
        experts.append((act(hidden_states @ gate) * (hidden_states @ up)) @ down)
    return weighted_sum(experts, expert_routing_table, router_weights, experts_min)


def weighted_sum(experts: list[Tensor], table: Tensor, weights: Tensor, first: int) -> Tensor:
    """Weighted sum of the outputs of all local experts. `first`: id of the first local expert."""
    out = torch.zeros(experts[0].shape, dtype=torch.float32)
    for number, expert in enumerate(experts, first):
        out += (weights.float() * (table == number)).sum(-1, keepdim=True) * expert.float()
    return out.to(experts[0].dtype)


def check_experts(
    hidden: Tensor,
    table: Tensor,
    weights: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    w3: list[Tensor],
    permuted: bool,
) -> None:
    """Raise RuntimeError for shapes that do not match, and for dtypes with which the recipe does
    not compile. The dtypes of the bridge's test and of vllm-gaudi's calls are accepted."""
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise RuntimeError(f"Graph compile failed. mixture_of_experts: hidden is {hidden.dtype}")
    if table.dtype != torch.int64:
        raise RuntimeError(f"Graph compile failed. mixture_of_experts: ids are {table.dtype}")
    dtypes = {tensor.dtype for tensor in (weights, *w1, *w2, *w3)}
    if dtypes != {hidden.dtype}:
        raise RuntimeError(
            f"Graph compile failed. mixture_of_experts: incompatible type, hidden is "
            f"{hidden.dtype} and the weights are {', '.join(sorted(map(str, dtypes)))}"
        )
    if hidden.dim() != 2 or table.shape != weights.shape or table.shape[:1] != hidden.shape[:1]:
        raise RuntimeError(
            f"mixture_of_experts: hidden is {tuple(hidden.shape)}, ids {tuple(table.shape)}, "
            f"weights {tuple(weights.shape)}: they must be (tokens, hidden), (tokens, chosen) and "
            "(tokens, chosen)"
        )
    inner = w1[0].shape[0 if permuted else 1]
    wide = (inner, hidden.shape[1]) if permuted else (hidden.shape[1], inner)
    narrow = wide[::-1]
    if any(weight.shape != wide for weight in (*w1, *w2)) or any(
        weight.shape != narrow for weight in w3
    ):
        raise RuntimeError(
            f"mixture_of_experts: experts are {tuple(w1[0].shape)} and {tuple(w3[0].shape)}, "
            f"hidden is {tuple(hidden.shape)}: with permuted_weights {permuted}, every w1 and w2 "
            f"must be {wide}, every w3 {narrow}"
        )


def mixture_of_experts_fused(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    permuted_weights: bool,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Like `mixture_of_experts`, with w1 and w2 concatenated in one weight per expert."""
    dim = 0 if permuted_weights else 1
    w1, w2 = zip(*(weight.chunk(2, dim) for weight in w12), strict=True)
    parts = (hidden_states, expert_routing_table, router_weights, list(w1), list(w2), w3)
    return mixture_of_experts(*parts, permuted_weights, *args, **kwargs)

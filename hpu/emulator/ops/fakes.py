"""Fake implementations of torch.ops.hpu for tracing by torch.compile: shapes and dtypes without
values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from hpu.emulator.ops import biased_experts
from hpu.emulator.ops.fp8_attention import fake_sdpa, fake_softmax
from hpu.emulator.ops.quantized import MAX_OF_AXIS, MAX_OF_TENSOR


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    scale: float | None,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    valid_seq_len: Tensor | None,
    seq_padding_type: str,
    *new: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (*q.shape[:-1], 1) if requires_backward else (1,)
    is_narrow = softmax_mode == "fast" and q.dtype == torch.bfloat16
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(rows, dtype=torch.float32 if softmax_mode == "fp32" else q.dtype),
        q.new_empty(rows, dtype=torch.bfloat16 if is_narrow else torch.float32),
        q.new_empty(1, dtype=torch.int32),
    )


def _sdpa_fwd(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty((*q.shape[:-1], k.shape[-2])),
        q.new_empty(1, dtype=torch.int8),
    )


def _rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if x.dtype == gamma.dtype else torch.float32
    return torch.empty_like(x, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=dtype)


def _rotary(
    input: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int
) -> Tensor:
    return torch.empty_like(input)


def _adjustment(
    block_max: Tensor, block_sums: Tensor, block_groups: Tensor, batch: int, out_shape: list[int]
) -> Tensor:
    return block_max.new_empty(out_shape)


def _from_four_bits(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
    g_idx: Tensor | None = None,
) -> Tensor:
    return input.new_empty((*input.shape[:-1], 8 * input.shape[-1]), dtype=out_dtype)


def _cast_to_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype or torch.float8_e4m3fn), x.new_empty(
        () if is_amax else 0, dtype=torch.float32
    )


def _cast_from_fp8(
    x: Tensor, scale: Tensor | None, out_dtype: torch.dtype, scale_shape: list[int] | None = None
) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


def _scale_for_cast(
    input: Tensor,
    maxMode: int,
    scaleMode: int,
    reduceAxis: int = 0,
    reduceKeepdim: bool = False,
    fullscale: float = 1.0,
    backoff: float = 1.0,
) -> Tensor:
    if maxMode == MAX_OF_TENSOR:
        return input.new_empty(1)
    return (
        input.amax(reduceAxis, keepdim=reduceKeepdim) if maxMode == MAX_OF_AXIS else input.clone()
    )


def _fp8_gemm(
    A: Tensor,
    trans_A: bool,
    B: Tensor,
    trans_B: bool,
    D: Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: Tensor | None = None,
    B_scale_inv: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    B_scale_shape: list[int] | None = None,
) -> Tensor:
    rows, columns = A.shape[-1 if trans_A else -2], B.shape[-2 if trans_B else -1]
    before = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])  # type: ignore[no-untyped-call]
    return A.new_empty((*before, rows, columns), dtype=out_dtype)


OVERLOAD_FAKES: dict[str, Callable[..., Any]] = {
    "fp8_fused_weights": biased_experts.fake_experts,
    "fp8_fused_weights_dynamic": biased_experts.fake_experts,
    **biased_experts.FAKES,
}
"""Fakes of the overloads of mixture_of_experts."""
FAKES: dict[str, Callable[..., Any]] = {
    "sdpa_recomp_fwd": _sdpa,
    "sdpa_fwd": _sdpa_fwd,
    "rms_norm": _rms_norm,
    "rms_norm_fast": _rms_norm,
    "rotary_pos_embedding": _rotary,
    "block_softmax_adjustment": _adjustment,
    "convert_from_uint4": _from_four_bits,
    "convert_from_int4": _from_four_bits,
    "cast_to_fp8_v2": _cast_to_fp8,
    "cast_from_fp8": _cast_from_fp8,
    "calculate_scale_for_cast": _scale_for_cast,
    "fp8_gemm_v2": _fp8_gemm,
    "fp8_sdpa_recomp_fwd": fake_sdpa,
    "softmax_fp8": fake_softmax,
}


def register_fakes() -> Library:
    """Register the fakes of the defined ops; destroying the library removes them."""
    library = Library("hpu", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
    for name, fake in FAKES.items():
        if hasattr(torch.ops.hpu, name):
            torch.library.register_fake(f"hpu::{name}", fake, lib=library)
    for name, fake in OVERLOAD_FAKES.items():
        if hasattr(torch.ops.hpu, "mixture_of_experts") and hasattr(
            torch.ops.hpu.mixture_of_experts, name
        ):
            library.impl(f"mixture_of_experts.{name}", fake, "Meta")  # type: ignore[no-untyped-call]  # torch's own
    return library

"""torch.ops.hpu: reference implementations on CPU tensors of RMS norm, rotary embedding and
softmaxes, which raise the documented errors; and the registration of all ops."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import Library

from hpu.emulator.ops import biased_experts, fp8_attention, measured_experts, quantized
from hpu.emulator.ops.attention import (
    SDPA,
    SDPA_FWD,
    WINDOW,
    has_window,
    sdpa,
    sdpa_with_probabilities,
)
from hpu.gaudi_devices import generation, has_kernel, max_experts, release_of

RMS_NORM = "rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)"
RMS_NORM_FAST = RMS_NORM.replace("rms_norm", "rms_norm_fast", 1)


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, inverse rms (..., 1)). Both are float32 if the weight has another dtype than `x`
    (rms_norm_gen.cpp). Raises RuntimeError for fewer than 3 dimensions, which vllm-gaudi avoids
    (hpu_layernorm.py); no test of the bridge has fewer."""
    if x.dim() < 3:
        raise RuntimeError(f"rms_norm needs at least 3 dimensions, got a shape {tuple(x.shape)}")
    x_fp32 = x.float()
    inverse = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    dtype = x.dtype if x.dtype == gamma.dtype else torch.float32
    return (x_fp32 * inverse * gamma.float()).to(dtype), inverse.to(dtype)


ROTARY = (
    "rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, "
    "int mode) -> Tensor"
)


def rotary(
    input: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int
) -> Tensor:
    """`input` rotated: mode 0 pairs element i with i + half, mode 1 pairs adjacent elements.

    `sin` and `cos` broadcast to the input, or are tables (positions, size) indexed by
    `position_ids`, or read from `offset` on.
    """
    if position_ids is not None:
        cos, sin = cos[position_ids.long()], sin[position_ids.long()]
        while cos.dim() < input.dim():
            cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    elif offset:
        cos, sin = cos.narrow(-2, offset, input.shape[-2]), sin.narrow(-2, offset, input.shape[-2])
    if mode == 0:
        first, second = input.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    elif mode == 1:
        rotated = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    else:
        raise RuntimeError(f"rotary mode must be 0 (blockwise) or 1 (pairwise), got {mode}")
    return (input * cos + rotated * sin).to(input.dtype)


CUSTOM_SOFTMAX = "custom_softmax(Tensor input, int flavor) -> Tensor"


def custom_softmax(x: Tensor, flavor: int) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


BLOCK_SOFTMAX = "block_softmax(Tensor attn, Tensor bias, Tensor groups) -> (Tensor, Tensor, Tensor)"


def block_softmax(attn: Tensor, bias: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(exponentials, maxima, sums) over the slots of each block.

    `attn` and exponentials (blocks, kv_heads, group, rows, slots); maxima and sums with 1 slot;
    `bias` with 1 head and 1 group; `groups` (blocks): sequence of each block. The checks come from
    block_softmax_adjustment_gen.cpp.
    """
    if attn.dim() != 5:
        raise RuntimeError(f"attn tensor must be 5-dimensional, got {attn.dim()}")
    if bias.shape != (attn.shape[0], 1, 1, *attn.shape[3:]):
        raise RuntimeError(
            f"block_softmax: the bias is {tuple(bias.shape)}, it must be "
            f"{(attn.shape[0], 1, 1, *attn.shape[3:])} for scores {tuple(attn.shape)}"
        )
    if groups.shape[0] != attn.shape[0]:
        raise RuntimeError(
            f"block_softmax: groups has {groups.shape[0]} blocks, the scores have {attn.shape[0]}"
        )
    scores = attn.float() + bias.float()
    highest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - highest)
    return weights.to(attn.dtype), highest.to(attn.dtype), weights.sum(-1, True).to(attn.dtype)


BLOCK_SOFTMAX_ADJUSTMENT = (
    "block_softmax_adjustment(Tensor block_max, Tensor block_sums, Tensor block_groups, "
    "SymInt batch, SymInt[] out_shape) -> Tensor"
)


def block_softmax_adjustment(
    block_max: Tensor, block_sums: Tensor, block_groups: Tensor, batch: int, out_shape: list[int]
) -> Tensor:
    """Factor for the partial output of each block, so that the scaled partial outputs of a
    sequence sum to its attention output.

    Raises RuntimeError for maxima whose number of dimensions is not 2 or 5, or whose first
    dimension differs from the groups' length.
    """
    if block_max.dim() not in (2, 5) or block_groups.shape != block_max.shape[:1]:
        raise RuntimeError(
            f"block_softmax_adjustment: the maxima are {tuple(block_max.shape)}, the groups "
            f"{tuple(block_groups.shape)}: maxima must have 2 or 5 dimensions, the first of the "
            "groups' length"
        )
    count = block_max.shape[0]
    highest = block_max.float().reshape(count, -1)
    sums = block_sums.float().reshape(count, -1)
    real = (block_groups >= 0).view(-1, 1)
    rows = block_groups.long().clamp(0, batch - 1)
    index = rows.unsqueeze(1).expand_as(highest)
    start = torch.full((batch, highest.shape[1]), -torch.inf)
    row_max = start.scatter_reduce(0, index, highest.masked_fill(~real, -torch.inf), "amax")
    share = torch.exp(highest - row_max[rows]).masked_fill(~real, 0)
    row_sums = torch.zeros_like(start).index_add(0, rows, share * sums)
    # A padded row has a sum of 0.
    out = share / row_sums[rows].clamp_min(1e-30)
    return out.view(out_shape).to(block_max.dtype)


BLOCK_SOFTMAX_CONST_MAX = (
    "block_softmax_const_max{suffix}(Tensor attn, Tensor block_bias, Tensor block_groups, "
    "int batch_size, float global_block_max, float output_scale=1.0, "
    "ScalarType? output_dtype=None) -> Tensor"
)


def block_softmax_const_max(*_: object, **__: object) -> Tensor:
    """Refused: the bridge has the operator, and skips its test because the compiler lacks the
    kernel (test_block_softmax_const_max of 2025)."""
    raise RuntimeError("block_softmax_const_max is not modelled by the emulator")


def _limited(kernel: Callable[..., object], limit: int) -> Callable[..., object]:
    """Wrap a mixture_of_experts kernel: raises RuntimeError for more than `limit` experts in a
    call."""

    def run(*args: object, **kwargs: object) -> object:
        weights = args[3]
        if isinstance(weights, list) and len(weights) > limit:
            raise RuntimeError(
                f"Graph compile failed. mixture_of_experts: {len(weights)} experts in a call, this "
                f"release takes {limit}"
            )
        return kernel(*args, **kwargs)

    return run


def _on_card(
    name: str, kernel: Callable[..., object], check: Callable[[str], None]
) -> Callable[..., object]:
    """Wrap `kernel` to call `check(name)` first."""

    def run(*args: object, **kwargs: object) -> object:
        check(name)
        return kernel(*args, **kwargs)

    return run


def define_ops(
    card: str,
    release: str,
    runs_eagerly: Callable[[], bool],
    has_fault: Callable[[str], bool],
    check_on_card: Callable[[str], None],
) -> Library:
    """Define and implement the modelled ops that `card` has with this release; destroying the
    library removes them. `runs_eagerly`: as in quantized.Int4Conversion. `has_fault`: whether the
    card has a fault. `check_on_card(name)` raises NotImplementedError for a call on tensors of the
    host."""
    library = Library("hpu", "DEF")  # type: ignore[no-untyped-call]  # torch's own
    fp8 = quantized.Fp8(generation(card).fp8_max, runs_eagerly, mixes_types=card == "gaudi3")
    int4 = quantized.Int4Conversion(runs_eagerly)
    biased = biased_experts.BiasedExperts(runs_eagerly, has_fault)

    def has(kernel: str) -> bool:
        return bool(has_kernel(kernel, card, release_of(release)))

    grouped = has("convert_from_uint4.g_idx")
    window = WINDOW if has_window(release) else ""
    table: dict[str, Callable[..., object]] = {
        SDPA.format(window=window): sdpa,
        SDPA_FWD: sdpa_with_probabilities,
        RMS_NORM: rms_norm,
        RMS_NORM_FAST: rms_norm,
        ROTARY: rotary,
        CUSTOM_SOFTMAX: custom_softmax,
        BLOCK_SOFTMAX: block_softmax,
        quantized.FROM_UINT4_GROUPED if grouped else quantized.FROM_UINT4: int4.from_uint4,
        quantized.FROM_INT4: int4.from_int4,
        quantized.MOE: quantized.mixture_of_experts,
        quantized.MOE_FUSED: quantized.mixture_of_experts_fused,
        measured_experts.MEASURED: measured_experts.measured_experts,
    }
    if has("block_softmax_adjustment"):
        table[BLOCK_SOFTMAX_ADJUSTMENT] = block_softmax_adjustment
    if has("calculate_scale_for_cast"):
        table[quantized.SCALE_FOR_CAST] = quantized.scale_for_cast
    if has("mixture_of_experts.fp8_fused_weights"):
        table[quantized.MOE_FP8] = fp8.experts
        table[measured_experts.SCALARS] = measured_experts.ScalarExperts(fp8).run
        table[quantized.MOE_FP8_DYNAMIC] = fp8.dynamic_experts
    table |= biased.kernels(has)
    for name, scale, default in quantized.OVERLOADS:
        parts = {"name": name, "scale": scale, "default": default}
        table[quantized.CAST_TO.format(**parts)] = fp8.cast_to
        table[quantized.CAST_FROM.format(**parts)] = fp8.cast_from
        table[quantized.GEMM.format(**parts)] = fp8.gemm
    for suffix in ("", "_not_staged"):
        table[BLOCK_SOFTMAX_CONST_MAX.format(suffix=suffix)] = block_softmax_const_max
    attention = fp8_attention.Fp8Attention(fp8)
    table[fp8_attention.FP8_SDPA.format(window=window)] = attention.sdpa
    for name, scale, default in fp8_attention.SOFTMAX_OVERLOADS:
        schema = fp8_attention.SOFTMAX_FP8.format(name=name, scale=scale, default=default)
        table[schema] = attention.softmax
    limit = max_experts(release_of(release))
    for schema, kernel in table.items():
        if limit and schema.startswith("mixture_of_experts"):
            kernel = _limited(kernel, limit)
        library.define(schema)  # type: ignore[no-untyped-call]  # torch's own
        name = schema.partition("(")[0]
        library.impl(name, _on_card(name, kernel, check_on_card), "CPU")  # type: ignore[no-untyped-call]  # torch's own
    return library

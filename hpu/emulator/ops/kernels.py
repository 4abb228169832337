"""torch.ops.hpu: reference maths on CPU tensors for attention, RMS norm, rotary embedding and block
softmax, with the documented refusals; and the registration of all ops."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import Library

from hpu.emulator.ops import quantized
from hpu.gaudi_devices import generation, has_kernel, release_of

SDPA = (
    "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, float p, float? scale, "
    "bool is_causal, bool requires_backward, str softmax_mode, Tensor? valid_seq_len, "
    "str seq_padding_type) -> (Tensor, Tensor, Tensor, Tensor)"
)


def sdpa(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, row maxima, inverse sums, seed) of attention over (batch, ..., seq, head_dim); the
    dimensions before the last two broadcast. `valid_seq_len` (batch) masks padded keys; the output
    of a padded query is unspecified, here zeros.

    As in the bridge's sdpa_gen.cpp: statistics (batch, ..., seq, 1) exist only for a backward pass;
    the maxima have the dtype of `q`, the inverse sums too if that is bfloat16 and the softmax fast,
    else float32.
    """
    _check_sdpa(q, k, mask, p, is_causal, softmax_mode, valid_seq_len, seq_padding_type)
    _check_statistics(requires_backward, is_causal, valid_seq_len)
    length, span = q.shape[-2], k.shape[-2]
    scores = (q.float() @ k.float().transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    if is_causal:
        visible = torch.ones(length, span, dtype=torch.bool).tril(span - length)
        scores = scores.masked_fill(~visible, -torch.inf)
    if valid_seq_len is not None:
        visible = _valid_keys(valid_seq_len, span, seq_padding_type)
        rows = (-1, *[1] * (scores.dim() - 2), span)
        scores = scores.masked_fill(~visible.view(rows), -torch.inf)
    limits = torch.finfo(q.dtype)
    # What the exponentials are relative to is what is returned.
    highest = scores.amax(-1, keepdim=True).clamp(limits.min, limits.max).to(q.dtype)
    weights = torch.exp(scores - highest.float())
    inverse = weights.sum(-1, keepdim=True).clamp_min(1e-30).reciprocal()
    out = ((weights * inverse).to(v.dtype) @ v).to(q.dtype)
    is_narrow = softmax_mode == "fast" and q.dtype == torch.bfloat16
    inverse = inverse.to(torch.bfloat16 if is_narrow else torch.float32)
    if not requires_backward:
        highest, inverse = highest.new_zeros(1), inverse.new_zeros(1)
    return out, highest, inverse, torch.zeros(1, dtype=torch.int32)


def _check_sdpa(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    softmax_mode: str,
    valid_seq_len: Tensor | None,
    seq_padding_type: str,
) -> None:
    if q.dim() != k.dim() or any(
        wide != one and one != 1 for wide, one in zip(q.shape[:-2], k.shape[:-2], strict=True)
    ):
        raise RuntimeError(
            f"FusedSDPA: the key's shape {tuple(k.shape)} does not broadcast to the query's "
            f"{tuple(q.shape)}: groups of heads are a dimension of their own"
        )
    if mask is not None and mask.dtype not in (q.dtype, torch.bool):
        raise RuntimeError(f"FusedSDPA: the mask is {mask.dtype}, the query {q.dtype}")
    if is_causal and mask is not None:
        raise RuntimeError("FusedSDPA takes either is_causal or attn_mask, not both")
    if valid_seq_len is not None and (not is_causal or mask is not None):
        raise RuntimeError("FusedSDPA takes valid_seq_len only with is_causal and no attn_mask")
    if seq_padding_type not in ("left", "right"):
        raise RuntimeError(f"seq_padding_type is left or right, got {seq_padding_type!r}")
    if softmax_mode not in ("None", "fast", "fp32"):
        raise RuntimeError(f"softmax_mode is None, fast or fp32, got {softmax_mode!r}")
    if p:
        raise RuntimeError(f"FusedSDPA is emulated for inference: dropout is 0, got {p}")


def _check_statistics(
    requires_backward: bool, is_causal: bool, valid_seq_len: Tensor | None
) -> None:
    """Statistics are used by vllm-gaudi for slices only, and there with explicit masks: it found
    those of a causal call to differ (SlicedFusedSDPABase in vllm_gaudi/extension/utils.py)."""
    if requires_backward and valid_seq_len is not None:
        raise RuntimeError("FusedSDPA takes valid_seq_len only without a backward pass")
    if requires_backward and is_causal:
        raise RuntimeError("FusedSDPA: statistics of a causal call are not those of a mask")


def _valid_keys(lengths: Tensor, span: int, padding: str) -> Tensor:
    positions = torch.arange(span)
    if padding == "right":
        return positions < lengths.view(-1, 1)
    return positions >= span - lengths.view(-1, 1)


RMS_NORM = "rms_norm(Tensor x, Tensor gamma, float eps) -> (Tensor, Tensor)"
RMS_NORM_FAST = RMS_NORM.replace("rms_norm", "rms_norm_fast", 1)


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, inverse rms (..., 1) in float32)."""
    x_fp32 = x.float()
    inverse = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (x_fp32 * inverse * gamma.float()).to(x.dtype), inverse


ROTARY = (
    "rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, "
    "int mode) -> Tensor"
)


def rotary(
    input: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int
) -> Tensor:
    """`input` rotated: mode 0 pairs element i with i + half, mode 1 pairs neighbours.

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
        raise RuntimeError(f"rotary mode is 0 (blockwise) or 1 (pairwise), got {mode}")
    return (input * cos + rotated * sin).to(input.dtype)


CUSTOM_SOFTMAX = "custom_softmax(Tensor x, int flavor) -> Tensor"


def custom_softmax(x: Tensor, flavor: int) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


BLOCK_SOFTMAX = "block_softmax(Tensor attn, Tensor bias, Tensor groups) -> (Tensor, Tensor, Tensor)"


def block_softmax(attn: Tensor, bias: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(exponentials, maxima, sums) of each block alone; the last dimension is a block's slots.

    `attn` (blocks, ..., slots); `bias` broadcasts to it; `groups` (blocks): row of each block.
    """
    if groups.shape[0] != attn.shape[0]:
        raise RuntimeError(
            f"block_softmax: {groups.shape[0]} groups for {attn.shape[0]} blocks of scores"
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
    """The factor of each block's product with which a row's blocks sum to its softmax."""
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


def define_ops(card: str, release: str, runs_eagerly: Callable[[], bool]) -> Library:
    """Define and implement every op that `card` has with this release; destroying the library
    removes them. `runs_eagerly`: as in quantized.Int4."""
    library = Library("hpu", "DEF")  # type: ignore[no-untyped-call]  # torch's own
    fp8, int4 = quantized.Fp8(generation(card).fp8_max), quantized.Int4(runs_eagerly)

    def has(kernel: str) -> bool:
        return bool(has_kernel(kernel, card, release_of(release)))

    grouped = has("convert_from_uint4.g_idx")
    table = {
        SDPA: sdpa,
        RMS_NORM: rms_norm,
        RMS_NORM_FAST: rms_norm,
        ROTARY: rotary,
        CUSTOM_SOFTMAX: custom_softmax,
        BLOCK_SOFTMAX: block_softmax,
        quantized.FROM_UINT4_GROUPED if grouped else quantized.FROM_UINT4: int4.from_uint4,
        quantized.FROM_INT4: int4.from_int4,
        quantized.MOE: quantized.mixture_of_experts,
        quantized.MOE_FUSED: quantized.mixture_of_experts_fused,
    }
    if has("block_softmax_adjustment"):
        table[BLOCK_SOFTMAX_ADJUSTMENT] = block_softmax_adjustment
    if has("mixture_of_experts.bias_fused_weights"):
        table[quantized.MOE_BIAS] = quantized.mixture_of_experts_bias
    for name, scale in quantized.OVERLOADS:
        table[quantized.CAST_TO.format(name=name, scale=scale)] = fp8.cast_to
        table[quantized.CAST_FROM.format(name=name, scale=scale)] = fp8.cast_from
        table[quantized.GEMM.format(name=name, scale=scale)] = fp8.gemm
    for schema, kernel in table.items():
        library.define(schema)  # type: ignore[no-untyped-call]  # torch's own
        library.impl(schema.partition("(")[0], kernel, "CPU")  # type: ignore[no-untyped-call]  # torch's own
    return library

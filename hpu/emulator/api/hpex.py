"""The modules `hpex.kernels` and `hpex.normalization`: torch.ops.hpu behind the vendor's
signatures."""

from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hpu.emulator.ops.attention import has_window, scale_of


class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


class FusedSDPA:
    """Attention over [batch, heads, seq, head_dim]; check_sdpa rejects unsupported inputs. The
    query heads that share a key head become a dimension, as in the bridge's FusedSDPA.py. Like
    `apply` of every autograd function, it accepts no keyword arguments."""

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        /,
        *given: object,
    ) -> Tensor | tuple[Tensor, ...]:
        """`given`: the window and the sink of later releases."""
        softmax_mode, seq_padding_type = softmax_mode.lower(), seq_padding_type.lower()
        if not (q.numel() and k.numel() and v.numel()):
            # The bridge returns new memory (sdpa_fwd_wrapper in its FusedSDPA.py).
            return q.new_empty((*q.shape[:-1], v.shape[-1]))
        if softmax_mode == "fp32" and q.dtype != torch.bfloat16:
            raise AssertionError(
                f"softmax_mode = fp32 is supported only when q/k/v inputs are BF16, got {q.dtype}"
            )
        lengths = (q.shape[-2], k.shape[-2])
        if isinstance(attn_mask, Tensor) and attn_mask.dim() == 2 and attn_mask.shape != lengths:
            raise AssertionError(
                "unsupported 2D attention mask, the shape is not (Nt, Ns): "
                f"{tuple(attn_mask.shape)} for {lengths}"
            )
        if isinstance(attn_mask, Tensor) and attn_mask.dim() == 2:
            ones = [1] * (q.dim() - 3)
            attn_mask = attn_mask.expand(q.shape[0], *ones, *attn_mask.shape)
        recomputes = _recomputes(q, recompute_mode) and not return_attn_probs
        if recomputes and return_dropout_mask:
            raise AssertionError("Return_dropout_mask is not supported in recompute mode")
        shape, (q, k, v, attn_mask) = q.shape, _grouped(q, k, v, attn_mask)
        if given and not has_window(_hpu().emulated.config.release):
            raise TypeError(
                f"FusedSDPA.forward() takes from 4 to 14 positional arguments but {14 + len(given)}"
                " were given"
            )
        before = (q, k, v, attn_mask, dropout_p, scale_of(scale, q), is_causal)
        after = (softmax_mode, valid_seq_len, seq_padding_type)
        if recomputes:
            out: Tensor = torch.ops.hpu.sdpa_recomp_fwd(*before, False, *after, *given)[0]
            return out.reshape(*shape[:-1], v.shape[-1])
        # The bridge ignores the window and the sink without recomputation.
        out, weights, dropped = torch.ops.hpu.sdpa_fwd(*before, *after)
        out = out.reshape(*shape[:-1], v.shape[-1])
        weights = weights.reshape(*shape[:-1], k.shape[-2])
        given = ((weights, return_attn_probs), (dropped, return_dropout_mask))
        wanted = [value for value, is_wanted in given if is_wanted]
        return (out, *wanted) if wanted else out


def _recomputes(q: Tensor, mode: bool | None) -> bool:
    """Whether to use the recompute kernel, which stores no probabilities; always for a single
    query."""
    wanted: bool = mode if isinstance(mode, bool) else _hpu().recompute_sdp_enabled()
    return q.shape[-2] == 1 or wanted


def _hpu() -> Any:
    return vars(torch)["hpu"]


def fp8_fused_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softmax_mode: str = "None",
    d_scale_q: Tensor | float | None = None,
    d_scale_k: Tensor | float | None = None,
    d_scale_v: Tensor | float | None = None,
    q_scale_s: Tensor | float | None = None,
    q_scale_o: Tensor | float | None = None,
    d_scale_s: Tensor | float | None = None,
    is_amax_s: bool = False,
    is_amax_o: bool = False,
    valid_seq_len: Tensor | None = None,
    seq_padding_type: str = "left",
    recompute: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FusedSDPA with FP8 operands, or with measurement of unquantized operands: (out, largest
    softmax weight, largest |output|). Scales may be numbers, as the FP8 compressor passes them.
    Raises NotImplementedError without recomputation, which the card computes by fp8_sdpa_fwd,
    without the largest output (the bridge's Fp8FusedSDPA.py)."""
    recomputes = recompute if isinstance(recompute, bool) else _hpu().recompute_sdp_enabled()
    if not recomputes:
        raise NotImplementedError("fp8_fused_sdpa without recomputation is not modelled")
    softmax_mode, seq_padding_type = softmax_mode.lower(), seq_padding_type.lower()
    shape, (q, k, v, attn_mask) = q.shape, _grouped(q, k, v, attn_mask)
    scales = (
        torch.tensor(scale).to(q.device) if isinstance(scale, float) else scale
        for scale in (d_scale_q, d_scale_k, d_scale_v, q_scale_s, q_scale_o, d_scale_s)
    )
    found = torch.ops.hpu.fp8_sdpa_recomp_fwd(
        *(q, k, v, attn_mask, dropout_p, scale_of(scale, q), is_causal, False),
        *(softmax_mode, *scales, is_amax_s, is_amax_o, valid_seq_len, seq_padding_type),
    )
    return found[0].reshape(*shape[:-1], v.shape[-1]), found[4], found[5]


def _grouped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Reshape the tensors to have a separate dimension for the query heads that share a key head.
    Raises ValueError for a mask without a dimension of heads, as in gqa_input_reshape_fwd of the
    bridge's FusedSDPA.py."""
    kv_heads = k.shape[1]
    if q.dim() != 4 or kv_heads in (1, q.shape[1]):
        return q, k, v, mask
    if mask is not None:
        if mask.dim() != 4:
            raise ValueError(
                f"FusedSDPA with {q.shape[1]} heads and {kv_heads} key heads: the mask has "
                f"{mask.dim()} dimensions, 4 are needed"
            )
        if mask.shape[1] == q.shape[1]:
            mask = mask.reshape(mask.shape[0], kv_heads, -1, *mask.shape[2:])
        else:
            mask = mask.unsqueeze(1)
    q = q.reshape(q.shape[0], kv_heads, -1, *q.shape[2:])
    return q, k.unsqueeze(2), v.unsqueeze(2), mask


class FusedRMSNorm:
    @staticmethod
    def apply(
        x: Tensor,
        gamma: Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
        /,
    ) -> Tensor:
        kernel = torch.ops.hpu.rms_norm_fast if fast_math else torch.ops.hpu.rms_norm
        out: Tensor = kernel(x, gamma, eps)[0]
        return out


def apply_rotary_pos_emb(p: Tensor, *given: Any) -> Tensor:
    """Rotate `p` by `given`: (cos, sin, position ids, offset, mode), in float32 if `p`, cos or sin
    is float32; or a cache of cos and sin alone. The other arguments are positional, and the mode is
    a RotaryPosEmbeddingMode (the bridge's RotaryPosEmbeddingHelper.py)."""
    if len(given) == 1:
        return RotaryPosEmbeddingHelperV3.apply(p, *given)
    defaults = (None, 0, RotaryPosEmbeddingMode.BLOCKWISE)
    values: list[Any] = [*given, *defaults[len(given) - 2 :]]
    cos, sin, position_ids, offset, mode = values
    is_wide = torch.float32 in (p.dtype, cos.dtype, sin.dtype)
    dtype = torch.float32 if is_wide else p.dtype
    p, cos, sin = p.to(dtype), cos.to(dtype), sin.to(dtype)
    out: Tensor = torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, mode.value)
    return out


class RotaryPosEmbeddingHelperV1:
    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, offset: int, /) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, None, offset)


class RotaryPosEmbeddingHelperV2:
    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, /) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, position_ids)


class RotaryPosEmbeddingHelperV3:
    @staticmethod
    def apply(p: Tensor, rope_cache: Tensor, /) -> Tensor:
        """`p` (positions, batch, heads, size) with its first entries rotated, computed in the dtype
        of `p`. `rope_cache` (positions or more, batch, pairs, 2): cos and sin of each pair of
        adjacent elements (parse_rope_cache in the bridge's RotaryPosEmbeddingHelper.py)."""
        length, _, heads, _ = p.shape
        size = 2 * rope_cache.shape[-2]
        rotated = p[..., :size].reshape(length, -1, heads, size)
        angles = rope_cache[:length].reshape(length, -1, 1, size // 2, 2).to(p.dtype)
        cos, sin = (part.repeat_interleave(2, -1) for part in angles.unbind(-1))
        mode: int = RotaryPosEmbeddingMode.PAIRWISE.value
        out: Tensor = torch.ops.hpu.rotary_pos_embedding(rotated, sin, cos, None, 0, mode)
        return out if size == p.shape[-1] else torch.cat((out, p[..., size:]), -1)


def kernels_module() -> ModuleType:
    module = ModuleType("habana_frameworks.torch.hpex.kernels")
    vars(module).update(
        FusedSDPA=FusedSDPA,
        fp8_fused_sdpa=fp8_fused_sdpa,
        RotaryPosEmbeddingMode=RotaryPosEmbeddingMode,
        apply_rotary_pos_emb=apply_rotary_pos_emb,
        RotaryPosEmbeddingHelperV1=RotaryPosEmbeddingHelperV1,
        RotaryPosEmbeddingHelperV2=RotaryPosEmbeddingHelperV2,
        RotaryPosEmbeddingHelperV3=RotaryPosEmbeddingHelperV3,
    )
    return module


def normalization_module() -> ModuleType:
    module = ModuleType("habana_frameworks.torch.hpex.normalization")
    vars(module).update(FusedRMSNorm=FusedRMSNorm)
    return module

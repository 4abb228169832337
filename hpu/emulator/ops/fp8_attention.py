"""Reference implementations on CPU tensors of FP8 fused attention and softmax, and of unquantized
attention that measures its softmax.

Schemas and result types follow the bridge (HabanaAI/gaudi-pytorch-bridge: kernels_register.cpp,
sdpa_gen.cpp, and the meta functions of its compile backend).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpu.emulator.ops.attention import NO_WINDOW, check_sdpa, sdpa_scores
from hpu.emulator.ops.quantized import Fp8

FP8_SDPA = (
    "fp8_sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, "
    "float scale, bool is_causal, bool requires_backward, str softmax_mode, Tensor? d_scale_q, "
    "Tensor? d_scale_k, Tensor? d_scale_v, Tensor? q_scale_s, Tensor? q_scale_o, "
    "Tensor? d_scale_s, bool is_amax_s, bool is_amax_o, Tensor? valid_seq_len, "
    "str seq_padding_type{window}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
SOFTMAX_FP8 = (
    "softmax_fp8{name}(Tensor input, int dim, {scale} input_scale{default}, "
    "{scale} output_scale{default}, Tensor? inv_attn_heads=None, Tensor? fused_add=None) -> Tensor"
)
SOFTMAX_OVERLOADS = (("", "Tensor?", "=None"), (".Scalar_scales", "float", ""))


class Fp8Attention:
    """FP8 attention of a device whose casts are `fp8`."""

    def __init__(self, fp8: Fp8) -> None:
        self._fp8 = fp8

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        p: float,
        scale: float,
        is_causal: bool,
        requires_backward: bool,
        softmax_mode: str,
        d_scale_q: Tensor | None,
        d_scale_k: Tensor | None,
        d_scale_v: Tensor | None,
        q_scale_s: Tensor | None,
        q_scale_o: Tensor | None,
        d_scale_s: Tensor | None,
        is_amax_s: bool,
        is_amax_o: bool,
        valid_seq_len: Tensor | None,
        seq_padding_type: str,
        window_size: Sequence[int] = NO_WINDOW,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(out, 0, 0, 0, largest softmax weight or 0, largest |output| or 0), all except `out` of
        shape (1) (Fp8SDPARecompFwdOutputShape in the bridge's sdpa_gen.cpp). The zeros are in the
        places of the row maxima, inverse sums and seed of a backward pass.

        Operands are multiplied by their `d_scale`s. For FP8 operands the softmax weights are then
        rounded to FP8 with `q_scale_s`, and the output is FP8 if there is a `q_scale_o`, else
        bfloat16; for other operands the output has their dtype.
        """
        is_fp8 = q.dtype == torch.float8_e4m3fn
        if q.dtype == torch.float8_e5m2:
            # An expected failure in the bridge's test_hpu_fp8_te.py (SW-189599).
            raise RuntimeError("fp8 FusedSDPA does not support float8_e5m2")
        if {k.dtype, v.dtype} != {q.dtype}:
            raise RuntimeError(f"fp8 FusedSDPA: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}")
        if is_amax_s and is_fp8:
            raise RuntimeError(f"fp8 FusedSDPA measures float32 or bfloat16, got {q.dtype}")
        if tuple(window_size) != NO_WINDOW or isinstance(sink, Tensor):
            raise RuntimeError("a window or sink of fp8 FusedSDPA is not modelled by the emulator")
        if requires_backward:
            raise RuntimeError("statistics of fp8 FusedSDPA are not modelled by the emulator")
        wide_dtype = torch.bfloat16 if is_fp8 else q.dtype
        query, key, value = (
            operand.float() if d_scale is None else operand.float() * d_scale.float()
            for operand, d_scale in ((q, d_scale_q), (k, d_scale_k), (v, d_scale_v))
        )
        check_sdpa(
            query.to(wide_dtype),
            key.to(wide_dtype),
            attention_mask,
            p,
            is_causal,
            softmax_mode,
            valid_seq_len,
            seq_padding_type,
        )
        scores = sdpa_scores(
            query, key, attention_mask, scale, is_causal, valid_seq_len, seq_padding_type
        )
        highest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.bfloat16).min)
        weights = torch.exp(scores - highest)
        inverse = weights.sum(-1, keepdim=True).clamp_min(1e-30).reciprocal()
        weights = weights * inverse
        amax_s = weights.max() if is_amax_s else torch.zeros(())
        if is_fp8:
            quantized, _ = self._fp8.cast_to(weights, q_scale_s, dtype=torch.float8_e4m3fn)
            weights = quantized.float() if d_scale_s is None else quantized.float() * d_scale_s
        else:
            weights = weights.to(v.dtype).float()
        out = weights @ value
        amax_o = out.abs().max() if is_amax_o else torch.zeros(())
        if is_fp8 and q_scale_o is not None:
            out, _ = self._fp8.cast_to(out, q_scale_o, dtype=torch.float8_e4m3fn)
        empty = torch.zeros(1, dtype=wide_dtype)
        seed = torch.zeros(1, dtype=torch.int32)
        largest = amax_s.reshape(1), amax_o.reshape(1)
        return out.to(_out_dtype(q, q_scale_o)), empty, empty.clone(), seed, *largest

    def softmax(
        self,
        input: Tensor,
        dim: int,
        input_scale: Tensor | float | None = None,
        output_scale: Tensor | float | None = None,
        inv_attn_heads: Tensor | None = None,
        fused_add: Tensor | None = None,
    ) -> Tensor:
        """Softmax in FP8, times `output_scale`, if there is an `input_scale`; else in bfloat16.
        The checks come from softmax_fp8_gen.cpp."""
        if input.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            raise RuntimeError(
                "Input tensor must be of torch.bfloat16 or torch.float8_e4m3fn dtype, got "
                f"{input.dtype}"
            )
        is_scaled = input_scale is not None
        if [input_scale, output_scale].count(None) == 1:
            raise RuntimeError("Output and input scales must be both given or None")
        if input.dtype == torch.float8_e4m3fn and not is_scaled:
            raise RuntimeError(
                "If Input is of torch.float8_e4m3fn dtype then input scale must be given."
            )
        scales = (input_scale, output_scale)
        if any(isinstance(scale, Tensor) and scale.dtype != torch.float32 for scale in scales):
            raise RuntimeError("Input scale must be of dtype: Float")
        if inv_attn_heads is not None or fused_add is not None:
            raise RuntimeError("softmax_fp8 is emulated without inv_attn_heads and fused_add")
        if dim % input.dim() != input.dim() - 1:
            raise RuntimeError(f"softmax_fp8 takes the last dimension, got {dim}")
        wide = input.float()
        if input.dtype == torch.float8_e4m3fn and input_scale is not None:
            wide = wide * input_scale
        weights = torch.softmax(wide, dim)
        if not is_scaled:
            return weights.to(torch.bfloat16)
        return self._fp8.cast_to(weights, output_scale, dtype=torch.float8_e4m3fn)[0]


def _out_dtype(q: Tensor, q_scale_o: Tensor | None) -> torch.dtype:
    if q.dtype == torch.float8_e4m3fn and q_scale_o is None:
        return torch.bfloat16
    return q.dtype


def fake_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    d_scale_q: Tensor | None,
    d_scale_k: Tensor | None,
    d_scale_v: Tensor | None,
    q_scale_s: Tensor | None,
    q_scale_o: Tensor | None,
    d_scale_s: Tensor | None,
    is_amax_s: bool,
    is_amax_o: bool,
    valid_seq_len: Tensor | None,
    seq_padding_type: str,
    window_size: Sequence[int] = NO_WINDOW,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shapes and dtypes of `Fp8Attention.sdpa`."""
    wide_dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=_out_dtype(q, q_scale_o)),
        q.new_empty(1, dtype=wide_dtype),
        q.new_empty(1, dtype=wide_dtype),
        q.new_empty(1, dtype=torch.int32),
        q.new_empty(1, dtype=torch.float32),
        q.new_empty(1, dtype=torch.float32),
    )


def fake_softmax(
    input: Tensor,
    dim: int,
    input_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    inv_attn_heads: Tensor | None = None,
    fused_add: Tensor | None = None,
) -> Tensor:
    dtype = torch.bfloat16 if input_scale is None else torch.float8_e4m3fn
    return input.new_empty(input.shape, dtype=dtype)

"""torch.ops.hpu: reference implementations of fused attention on CPU tensors, which raise the
documented errors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention

from hpu.emulator.card.tensor import HpuTensor
from hpu.gaudi_devices import release_of

NO_WINDOW = (-1, -1)
WINDOWS_SINCE = (1, 23)
"""First release whose attention has a window and a sink (FusedSDPA.py and sdpa_gen.cpp of 2025).
vllm-gaudi leaves them out and so shows that they have defaults (SlicedFusedSDPA)."""
SDPA = (
    "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, "
    "float scale, bool is_causal, bool requires_backward, str softmax_mode, "
    "Tensor? valid_seq_len, str seq_padding_type{window}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
WINDOW = ", int[] window_size=[-1, -1], Tensor? sink=None"
SDPA_FWD = (
    "sdpa_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, "
    "bool is_causal, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type) "
    "-> (Tensor, Tensor, Tensor)"
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
    window_size: Sequence[int] = NO_WINDOW,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, row maxima, inverse sums, seed) of attention over (batch, ..., seq, head_dim); the
    dimensions before the last two broadcast. `valid_seq_len` (batch) masks padded keys; the output
    of a padded query is unspecified.

    Statistics (batch, ..., seq, 1) exist only for a backward pass, as in the bridge's sdpa_gen.cpp;
    the maxima have the dtype of `q`, or float32 in mode fp32 (2025); the inverse sums are bfloat16
    if `q` is bfloat16 and the softmax mode is fast, else float32.
    """
    check_sdpa(q, k, mask, p, is_causal, softmax_mode, valid_seq_len, seq_padding_type)
    _check_statistics(requires_backward, is_causal, valid_seq_len)
    if q.numel() == 1:
        # The bridge takes such a tensor for the seed of a dropout.
        raise RuntimeError("FusedSDPA: a query of one element is taken for a seed")
    if isinstance(sink, Tensor):
        raise RuntimeError("a sink of FusedSDPA is not modelled by the emulator")
    scores = sdpa_scores(q, k, mask, scale, is_causal, valid_seq_len, seq_padding_type)
    scores = scores.masked_fill(~_in_window(scores, window_size), -torch.inf)
    limits = torch.finfo(q.dtype)
    # The exponentials are relative to the returned, rounded maxima.
    highest = scores.amax(-1, keepdim=True).clamp(limits.min, limits.max)
    highest = highest if softmax_mode == "fp32" else highest.to(q.dtype)
    weights = torch.exp(scores - highest.float())
    inverse = weights.sum(-1, keepdim=True).clamp_min(1e-30).reciprocal()
    out = ((weights * inverse).to(v.dtype) @ v).to(q.dtype)
    is_narrow = softmax_mode == "fast" and q.dtype == torch.bfloat16
    inverse = inverse.to(torch.bfloat16 if is_narrow else torch.float32)
    if not requires_backward:
        highest, inverse = highest.new_zeros(1), inverse.new_zeros(1)
    return out, highest, inverse, torch.zeros(1, dtype=torch.int32)


def sdpa_with_probabilities(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    *modes: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `sdpa`, which does not keep probabilities: (out, probabilities (batch, ..., seq, keys),
    dropout mask) (SDPAFwdOutputShape in the bridge's sdpa_gen.cpp)."""
    check_sdpa(q, k, mask, p, is_causal, *modes)
    scores = sdpa_scores(q, k, mask, scale, is_causal, *modes[1:])
    # A row without a visible key has weights of 0.
    weights = torch.softmax(scores, -1).nan_to_num(0.0).to(q.dtype)
    return (weights @ v).to(q.dtype), weights, torch.zeros(1, dtype=torch.int8)


def has_window(release: str) -> bool:
    """Whether the attention of a release has the arguments of WINDOW."""
    return (release_of(release) or ()) >= WINDOWS_SINCE


def scale_of(scale: float | None, q: Tensor) -> float:
    """The scale of scores: 0.0 is a scale, only None means the default (FusedSDPA.py)."""
    default: float = q.shape[-1] ** -0.5
    return scale if isinstance(scale, (int, float)) else default


def sdpa_scores(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float | None,
    is_causal: bool,
    valid_seq_len: Tensor | None,
    seq_padding_type: str,
) -> Tensor:
    """Scores (batch, ..., queries, keys) float32, with a float mask added, and minus infinity for
    keys that another mask hides."""
    length, span = q.shape[-2], k.shape[-2]
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale_of(scale, q)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    if is_causal:
        # Query i sees the keys up to i also if there are more keys than queries (test_hpu_sdpa.py).
        visible = torch.ones(length, span, dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    if valid_seq_len is not None:
        visible = _valid_keys(valid_seq_len, span, seq_padding_type)
        rows = (-1, *[1] * (scores.dim() - 2), span)
        scores = scores.masked_fill(~visible.view(rows), -torch.inf)
    return scores


def _in_window(scores: Tensor, window_size: Sequence[int]) -> Tensor:
    """(queries, keys): whether a query sees a key by `window_size`, the numbers of keys before and
    after its own position; -1: all."""
    length, span = scores.shape[-2:]
    distance = torch.arange(span) - torch.arange(length).unsqueeze(1)
    before, after = (span + length if size < 0 else size for size in window_size)
    return (distance >= -before) & (distance <= after)


MAX_HEAD_SIZE = 256
"""Largest head size that the vendor's callers and the bridge's tests pass to FusedSDPA."""


def check_sdpa(
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
        wide != narrow and narrow != 1
        for wide, narrow in zip(q.shape[:-2], k.shape[:-2], strict=True)
    ):
        raise RuntimeError(
            f"FusedSDPA: the key's shape {tuple(k.shape)} does not broadcast to the query's "
            f"{tuple(q.shape)}: groups of heads must be a separate dimension"
        )
    if q.shape[-1] > MAX_HEAD_SIZE:
        raise RuntimeError(
            f"Graph compile failed. FusedSDPA: heads have {q.shape[-1]} entries, at most "
            f"{MAX_HEAD_SIZE} are known to work"
        )
    if mask is not None and mask.dtype not in (q.dtype, torch.bool):
        raise RuntimeError(f"FusedSDPA: the mask is {mask.dtype}, the query {q.dtype}")
    if is_causal and mask is not None:
        raise RuntimeError("FusedSDPA takes either is_causal or attn_mask, not both")
    if valid_seq_len is not None and (not is_causal or mask is not None):
        raise AssertionError("FusedSDPA takes valid_seq_len only with is_causal and no attn_mask")
    if seq_padding_type not in ("left", "right"):
        raise RuntimeError(f"seq_padding_type must be left or right, got {seq_padding_type!r}")
    if softmax_mode not in ("None", "none", "fast", "fp32"):
        raise RuntimeError(f"softmax_mode must be None, fast or fp32, got {softmax_mode!r}")
    if p:
        raise RuntimeError(f"FusedSDPA is emulated for inference: dropout must be 0, got {p}")


def _check_statistics(
    requires_backward: bool, is_causal: bool, valid_seq_len: Tensor | None
) -> None:
    """Raise RuntimeError for unsupported statistics. vllm-gaudi uses statistics only for slices
    with explicit masks: it found that a causal call returns different statistics
    (SlicedFusedSDPABase in vllm_gaudi/extension/utils.py)."""
    if requires_backward and valid_seq_len is not None:
        raise RuntimeError("FusedSDPA takes valid_seq_len only without a backward pass")
    if requires_backward and is_causal:
        raise RuntimeError(
            "FusedSDPA: a causal call returns different statistics than a call with a mask: "
            "pass a mask"
        )


def _valid_keys(lengths: Tensor, span: int, padding: str) -> Tensor:
    positions = torch.arange(span)
    if padding == "right":
        return positions < lengths.view(-1, 1)
    return positions >= span - lengths.view(-1, 1)


def register_flex_attention() -> None:
    """Register an implementation of torch's flex_attention for emulated tensors."""
    if HpuTensor not in flex_attention.python_key_table:
        flex_attention.py_impl(HpuTensor)(_flex_attention)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: object,
    scale: float,
    kernel_options: object,
    *buffers: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, log-sum-exp, maxima) by matmuls, a softmax, and `score_mod` on whole tensors, as a
    compiler without a kernel decomposes flex_attention. `buffers`: tensors for `score_mod`, then
    tensors for the mask. `block_mask` is ignored: it must only tell a kernel which blocks to skip,
    and not change results."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    places = []
    for dim, size in enumerate(scores.shape):
        shape = [1] * scores.dim()
        shape[dim] = size
        index = torch.arange(size, dtype=torch.int32, device=query.device)
        places.append(index.view(shape))
    scores = score_mod(scores, *places, *next(iter(buffers), ()))
    highest = scores.amax(-1)
    weights = torch.softmax(scores, dim=-1)
    out = weights.to(value.dtype) @ value
    return out, torch.logsumexp(scores, dim=-1), highest

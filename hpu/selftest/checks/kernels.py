"""Checks of the vendor's fused kernels: attention, softmax of decodes, RMS norm, rotation."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpu.selftest.base import BFLOAT16, Card, Check, Comparison, Fallback

if TYPE_CHECKING:
    from torch import Tensor

BRIDGE = "HabanaAI/gaudi-pytorch-bridge"
PLUGIN = "vllm-project/vllm-gaudi"
UNFUSED = Fallback("prompt-use-fusedsdpa", ("off",))
MASKED = -1e30
WIDE = 192
"""Head size of prompt attention in DeepSeek models."""


def _scale(card: Card) -> float:
    found: float = card.shape.head_dim**-0.5
    return found


def _scores(query: "Tensor", key: "Tensor", mask: "Tensor") -> "Tensor":
    """Masked attention scores on the CPU: (batch, heads, queries, keys)."""
    group = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(group, dim=1)
    found: Tensor = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5 + mask
    return found


def _attention(
    card: Card, query: "Tensor", key: "Tensor", value: "Tensor", mask: "Tensor"
) -> "Tensor":
    weights = card.torch.softmax(_scores(query, key, mask), dim=-1)
    found: Tensor = weights @ value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return found


def _operands(card: Card, rows: int, columns: int) -> "tuple[Tensor, Tensor, Tensor]":
    """Query (2, heads, rows, D), key and value (2, kv_heads, columns, D)."""
    shape = card.shape
    return (
        card.values(2, shape.num_heads, rows, shape.head_dim, seed=1),
        card.values(2, shape.num_kv_heads, columns, shape.head_dim, seed=2),
        card.values(2, shape.num_kv_heads, columns, shape.head_dim, seed=3),
    )


def _causal(
    card: Card, softmax_mode: str, operands: "tuple[Tensor, Tensor, Tensor]"
) -> Iterator[Comparison]:
    torch = card.torch
    fused = card.kernels().FusedSDPA
    query, key, value = operands
    scale = query.shape[-1] ** -0.5
    lengths = [32, 11]
    given = [card.put(host.bfloat16()) for host in (query, key, value)]
    lengths_on_card = card.put(torch.tensor(lengths).int())
    found = fused.apply(
        *given, None, 0.0, True, scale, softmax_mode, True, lengths_on_card, "right"
    )
    mask = torch.full((32, 32), MASKED).triu(1)
    expected = _attention(card, query, key, value, mask)
    for number, length in enumerate(lengths):
        what = f"causal attention of {length} of 32 tokens, softmax {softmax_mode}"
        rows = found[number, :, :length], expected[number, :, :length]
        yield Comparison(what, *rows, BFLOAT16)


def causal_attention(card: Card) -> Iterator[Comparison]:
    return _causal(card, "fast", _operands(card, 32, 32))


def float32_softmax(card: Card) -> Iterator[Comparison]:
    return _causal(card, "fp32", _operands(card, 32, 32))


def wide_heads(card: Card) -> Iterator[Comparison]:
    """Attention heads of latent attention: values are padded to the size of keys."""
    query, key, value = (card.values(2, 4, 32, WIDE, seed=seed) for seed in range(3))
    value[..., 128:] = 0
    return _causal(card, "fast", (query, key, value))


def masked_attention(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    fused = card.kernels().FusedSDPA
    query, key, value = _operands(card, 16, 48)
    visible = torch.ones(16, 48, dtype=torch.bool).tril(32)
    visible[:, 20:32] = False
    mask = torch.zeros(2, 1, 16, 48).masked_fill(~visible, MASKED)
    given = [card.put(host.bfloat16()) for host in (query, key, value, mask)]
    found = fused.apply(*given, 0.0, False, _scale(card), "fast", True, None, "right")
    expected = _attention(card, query, key, value, mask)
    yield Comparison("attention with a mask over cached and new tokens", found, expected, BFLOAT16)


def _statistics(card: Card, num_rows: int) -> Iterator[Comparison]:
    """Outputs and softmax statistics of a slice whose mask has `num_rows` rows."""
    torch = card.torch
    query, key, value = _operands(card, 16, 32)
    visible = torch.ones(num_rows, 32, dtype=torch.bool)
    visible[:, 25:] = False
    if num_rows > 1:
        visible = visible.tril(16)
    mask = torch.zeros(2, 1, num_rows, 32).masked_fill(~visible, MASKED)
    batch, heads, rows, size = query.shape
    kv_heads = key.shape[1]
    if kv_heads in (1, heads):
        operands = query, key, value, mask
    else:
        grouped = query.view(batch, kv_heads, heads // kv_heads, rows, size)
        operands = grouped, key.unsqueeze(2), value.unsqueeze(2), mask.unsqueeze(1)
    given = [card.put(host.bfloat16()) for host in operands]
    out, highest, inverse, _ = torch.ops.hpu.sdpa_recomp_fwd(
        *given, 0.0, _scale(card), False, True, "fast", None, "right"
    )
    scores = _scores(query, key, mask)
    tops = scores.amax(-1, keepdim=True)
    expected = _attention(card, query, key, value, mask)
    yield Comparison("output", out.view(query.shape), expected, BFLOAT16)
    found = highest.float().view(*query.shape[:3], 1)
    yield Comparison("maxima of the scores", found, tops, BFLOAT16)
    # Use the card's maxima, which may be rounded.
    sums = torch.exp(scores - found.cpu()).sum(-1, keepdim=True)
    yield Comparison(
        "inverses of the sums", inverse.float().view(*query.shape[:3], 1), 1 / sums, BFLOAT16
    )


def statistics_of_rows(card: Card) -> Iterator[Comparison]:
    return _statistics(card, 16)


def statistics_of_slices(card: Card) -> Iterator[Comparison]:
    return _statistics(card, 1)


def block_softmax(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    card.need_kernel("block_softmax_adjustment")
    # Two requests, with three blocks and one block; the last block is padding.
    groups = torch.tensor([0, 1, 0, 0, -1]).int()
    highest = card.values(5, 2, 1, 1, 1, seed=1)
    sums = card.values(5, 2, 1, 1, 1, seed=2).abs() + 1
    given = [card.put(host.bfloat16()) for host in (highest, sums)]
    found = torch.ops.hpu.block_softmax_adjustment(*given, card.put(groups), 2, list(highest.shape))
    expected = torch.zeros_like(highest)
    for request in (0, 1):
        blocks = groups == request
        factors = torch.exp(highest[blocks] - highest[blocks].amax(0, keepdim=True))
        expected[blocks] = factors / (factors * sums[blocks]).sum(0, keepdim=True)
    yield Comparison("weights of the blocks", found[:4], expected[:4], BFLOAT16)
    yield Comparison("the weight of padding", found[4:], expected[4:], BFLOAT16)


def norm(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    fused = card.module("hpex.normalization").FusedRMSNorm
    size = card.shape.hidden_size
    x, weight = card.values(2, 5, size, seed=1), card.values(size, seed=2)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    for dtype in (torch.bfloat16, torch.float32):
        found = fused.apply(card.put(x.to(dtype)), card.put(weight.to(dtype)), 1e-6)
        yield Comparison(f"RMS norm of {dtype}", found, expected, BFLOAT16)


def rotary(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    kernels = card.kernels()
    shape = card.shape
    count = shape.num_heads + shape.num_kv_heads
    heads = card.values(6, count, shape.head_dim, seed=1)
    angles = card.values(6, 1, shape.head_dim // 2, seed=2)
    cos, sin = (torch.cat((function(angles),) * 2, dim=-1) for function in (torch.cos, torch.sin))
    first, second = heads.chunk(2, -1)
    expected = heads * cos + torch.cat((-second, first), -1) * sin
    given = [card.put(host.bfloat16()) for host in (heads, cos, sin)]
    mode = kernels.RotaryPosEmbeddingMode.BLOCKWISE
    found = kernels.apply_rotary_pos_emb(*given, None, 0, mode)
    yield Comparison("rotary embedding of three dimensions", found, expected, BFLOAT16)


def float16_kernels(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    size = card.shape.hidden_size
    x, weight = card.values(2, 5, size, seed=1), card.values(size, seed=2)
    fused = card.module("hpex.normalization").FusedRMSNorm
    found = fused.apply(card.put(x.half()), card.put(weight.half()), 1e-6)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    yield Comparison("RMS norm of float16", found, expected, BFLOAT16)
    query, key, value = _operands(card, 16, 32)
    lowest = torch.finfo(torch.float16).min
    mask = torch.zeros(2, 1, 16, 32).masked_fill(~torch.ones(16, 32).bool().tril(16), lowest)
    given = [card.put(host.half()) for host in (query, key, value, mask)]
    out = card.kernels().FusedSDPA.apply(
        *given, 0.0, False, _scale(card), "fast", True, None, "right"
    )
    expected = _attention(card, query, key, value, mask)
    yield Comparison("attention of float16", out, expected, BFLOAT16)


CHECKS = (
    Check(
        name="fused-sdpa",
        assumption="causal FusedSDPA takes eleven arguments, and ignores padding",
        source=f"{BRIDGE}, FusedSDPA.py",
        program=causal_attention,
        fallbacks=(UNFUSED,),
        is_quick=True,
    ),
    Check(
        name="fused-sdpa-float32",
        assumption="FusedSDPA has a float32 softmax for bfloat16 (Qwen2)",
        source=f"{PLUGIN}, vllm_gaudi/extension/features.py",
        program=float32_softmax,
        fallbacks=(UNFUSED,),
        is_quick=True,
    ),
    Check(
        name="fused-sdpa-mask",
        assumption="FusedSDPA takes a mask in the model's dtype",
        source=f"{PLUGIN}, vllm_gaudi/extension/ops.py",
        program=masked_attention,
        fallbacks=(UNFUSED,),
        is_quick=True,
    ),
    Check(
        name="fused-sdpa-wide",
        assumption="FusedSDPA takes heads of 192 entries (DeepSeek)",
        source=f"{PLUGIN}, vllm_gaudi/attention/backends/hpu_attn.py",
        program=wide_heads,
        fallbacks=(UNFUSED,),
        needs=("fused-sdpa",),
    ),
    Check(
        name="fused-sdpa-statistics",
        assumption="sdpa_recomp_fwd returns correct statistics",
        source=f"{BRIDGE}, hpu_ops/sdpa_gen.cpp",
        program=statistics_of_rows,
        fallbacks=(UNFUSED,),
    ),
    Check(
        name="fused-sdpa-slices",
        assumption="sdpa_recomp_fwd takes a mask of one row with grouped heads",
        source=f"{PLUGIN}, vllm_gaudi/extension/utils.py (SlicedFusedSDPA)",
        program=statistics_of_slices,
        fallbacks=(Fallback("fsdpa-slicing", ("off",)),),
    ),
    Check(
        name="block-softmax",
        assumption="block_softmax_adjustment takes five dimensions, and -1 as padding",
        source=f"{PLUGIN}, vllm_gaudi/extension/ops.py (pipelined_pa)",
        program=block_softmax,
        fallbacks=(Fallback("fused-block-softmax", ("off",)),),
        is_quick=True,
    ),
    Check(
        name="rms-norm",
        assumption="FusedRMSNorm takes three dimensions",
        source=f"{BRIDGE}, tests of the fused norm",
        program=norm,
        fallbacks=(Fallback("fused-norm-rope", ("off",)),),
    ),
    Check(
        name="rotary",
        assumption="the rotary kernel takes three dimensions",
        source=f"{PLUGIN}, vllm_gaudi/ops/hpu_rotary_embedding.py",
        program=rotary,
        fallbacks=(Fallback("fused-norm-rope", ("off",)),),
    ),
    Check(
        name="float16",
        assumption="norms and attention take float16",
        source=f"{BRIDGE}, tests of the fused norm and of FusedSDPA",
        program=float16_kernels,
        fallbacks=(Fallback("dtype", ("bfloat16", "auto")),),
        needs=("rms-norm", "fused-sdpa-mask"),
    ),
)

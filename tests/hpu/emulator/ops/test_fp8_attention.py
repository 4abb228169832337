"""Fused attention and the softmax in FP8 against plain torch."""

import pytest
import torch
from emulated import emulated
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn


def operands() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    q, k, v = (torch.randn(shape).bfloat16() for shape in shapes)
    return q, k, v


def test_fp8_attention_is_close_to_bfloat16_and_measures_the_largest_weight() -> None:
    q, k, v = operands()
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with emulated():
        from habana_frameworks.torch.hpex.kernels import fp8_fused_sdpa

        measured, amax, _ = fp8_fused_sdpa(
            *(item.to("hpu") for item in (q, k, v)),
            is_causal=True,
            softmax_mode="fast",
            is_amax_s=True,
            seq_padding_type="right",
        )
        codes = [
            torch.ops.hpu.cast_to_fp8_v2(item.to("hpu"), 4.0, dtype=E4M3)[0] for item in (q, k, v)
        ]
        scales = {f"d_scale_{name}": torch.tensor(0.25).to("hpu") for name in "qkv"}
        found, _, _ = fp8_fused_sdpa(
            *codes,
            is_causal=True,
            **scales,
            q_scale_s=torch.tensor(64.0).to("hpu"),
            d_scale_s=1 / 64,
            q_scale_o=torch.tensor(4.0).to("hpu"),
            seq_padding_type="right",
        )
        out = torch.ops.hpu.cast_from_fp8(found, 0.25, torch.bfloat16).cpu()
        measured, amax = measured.cpu(), float(amax.cpu())

    assert found.dtype == torch.float8_e4m3fn
    # The first token attends only to itself.
    assert amax == 1.0
    assert torch.allclose(measured, expected, atol=0.02)
    assert 0 < (out - expected).float().square().mean().sqrt() < 0.1 * expected.float().std()


def test_fp8_attention_without_an_output_scale_gives_bfloat16_without_amax() -> None:
    q, k, v = operands()

    with emulated():
        from habana_frameworks.torch.hpex.kernels import fp8_fused_sdpa

        codes = [
            torch.ops.hpu.cast_to_fp8_v2(item.to("hpu"), 1.0, dtype=E4M3)[0] for item in (q, k, v)
        ]
        out, _, _ = fp8_fused_sdpa(*codes, is_causal=True, q_scale_s=64.0, d_scale_s=1 / 64)
        with pytest.raises(RuntimeError, match="measures float32 or bfloat16"):
            fp8_fused_sdpa(*codes, is_causal=True, is_amax_s=True)
        with pytest.raises(RuntimeError, match="q, k, v are"):
            fp8_fused_sdpa(codes[0], codes[1], v.to("hpu"), is_causal=True)

    assert out.dtype == torch.bfloat16


def test_softmax_returns_scaled_fp8_only_if_scales_are_given() -> None:
    scores = torch.randn(3, 5).bfloat16()

    with emulated():
        plain = torch.ops.hpu.softmax_fp8(scores.to("hpu"), -1).cpu()
        scale = torch.tensor([16.0]).to("hpu")
        codes = torch.ops.hpu.softmax_fp8(scores.to("hpu"), -1, scale / 16, scale).cpu()
        numbers = torch.ops.hpu.softmax_fp8.Scalar_scales(scores.to("hpu"), -1, 1.0, 16.0).cpu()

    expected = torch.softmax(scores.float(), -1)
    assert plain.dtype == torch.bfloat16 and codes.dtype == torch.float8_e4m3fn
    assert torch.allclose(plain.float(), expected, atol=0.01)
    assert torch.allclose(codes.float() / 16, expected, rtol=0.07)
    assert torch.equal(codes.float(), numbers.float())

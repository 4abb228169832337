"""The card's own operators compared with plain torch, and their refusals."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor
from torch.nn import functional

from hpu.ops.gaudi_modules import VllmMixtureOfExpertsOp
from hpu.ops.kernels import ExpertWeights

E4M3 = torch.float8_e4m3fn


def on_card(*tensors: Tensor) -> list[Tensor]:
    return [given.to("hpu") for given in tensors]


def test_attention_shares_key_heads_and_skips_padding() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    lengths = torch.tensor([6, 4], dtype=torch.int32)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        out = FusedSDPA.apply(
            *on_card(q, k, v),
            None,
            0.0,
            True,
            None,
            "fast",
            True,
            lengths.to("hpu"),
            "right",
        ).cpu()

    assert torch.allclose(out[0], expected[0], atol=1e-5)
    assert torch.allclose(out[1, :, :4], expected[1, :, :4], atol=1e-5)


def test_attention_refuses_contradictory_arguments() -> None:
    x = torch.zeros(1, 1, 2, 4)
    lengths = torch.tensor([1])
    refused: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((torch.zeros(2, 2), 0.0, True), RuntimeError, "not both"),
        (
            (None, 0.0, False, None, "None", None, lengths),
            AssertionError,
            "only with is_causal",
        ),
    ]

    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        for arguments, error, text in refused:
            on = [value.to("hpu") if isinstance(value, Tensor) else value for value in arguments]
            with pytest.raises(error, match=text):
                FusedSDPA.apply(*on_card(x, x, x), *on)


@pytest.mark.parametrize(
    ("dtype", "mode", "sums"),
    [
        (torch.bfloat16, "fast", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float16, "fast", torch.float32),
        (torch.float32, "fast", torch.float32),
    ],
)
def test_statistics_of_attention_are_returned_for_a_backward_pass_only(
    dtype: torch.dtype, mode: str, sums: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 2, 6, 8).to(dtype), torch.randn(2, 3, 1, 5, 8).to(dtype)
    mask = torch.zeros(2, 1, 1, 1, 5, dtype=dtype)
    scores = q.float() @ k.float().transpose(-1, -2)

    with emulated():
        given = on_card(q, k, k, mask)
        run = torch.ops.hpu.sdpa_recomp_fwd
        out, highest, inverse, _ = run(*given, 0.0, 1.0, False, True, mode, None, "right")
        _, no_highest, no_inverse, _ = run(*given, 0.0, 1.0, False, False, mode, None, "right")
        shapes = [tuple(item.shape) for item in (out, highest, inverse, no_highest, no_inverse)]
        highest, inverse = highest.cpu(), inverse.cpu()

    assert shapes == [(2, 3, 2, 6, 8), (2, 3, 2, 6, 1), (2, 3, 2, 6, 1), (1,), (1,)]
    maxima = torch.float32 if mode == "fp32" else dtype
    assert (highest.dtype, inverse.dtype) == (maxima, sums)
    total = highest.float().exp() / inverse.float()
    assert torch.allclose(total, scores.exp().sum(-1, keepdim=True), rtol=0.02)


def test_attention_refuses_arguments_that_the_kernel_does_not_support() -> None:
    q, k = torch.zeros(1, 4, 2, 4, dtype=torch.bfloat16), torch.zeros(1, 2, 2, 4)
    refused = [
        # Grouped heads need a separate dimension.
        ((q, k.bfloat16(), None, False, False, None), "does not broadcast"),
        ((q, q, torch.zeros(1, 1, 2, 2), False, False, None), "the mask is torch.float32"),
        ((q, q, None, True, True, None), "a causal call returns different statistics"),
        ((q, q, None, True, True, torch.tensor([1])), "without a backward pass"),
    ]

    with emulated():
        for (query, key, mask, causal, backward, lengths), text in refused:
            query, key = on_card(query, key)
            mask = None if mask is None else mask.to("hpu")
            lengths = None if lengths is None else lengths.to("hpu")
            with pytest.raises(RuntimeError, match=text):
                torch.ops.hpu.sdpa_recomp_fwd(
                    query, key, key, mask, 0.0, 1.0, causal, backward, "fast", lengths, "right"
                )


def test_a_product_is_written_in_the_dtype_of_its_target() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 4, 5).bfloat16()

    with emulated(release="1.24.1"), torch.inference_mode():
        target = torch.empty(2, 3, 5, dtype=torch.float32, device="hpu")
        found = torch.matmul(*on_card(a, b), out=target).cpu()
        with pytest.raises(RuntimeError, match="out has the shape"):
            torch.matmul(*on_card(a, b), out=target[:1])

    assert torch.allclose(found, a.float() @ b.float(), atol=1e-6)
    assert not torch.equal(found, found.bfloat16().float())


def test_norm_and_rotary_equal_their_formulas() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8), torch.rand(8)
    angles = torch.rand(5, 4)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    places = torch.tensor([4, 0, 2])
    turned = torch.cat((-x[:, 4:], x[:, :4]), -1)

    with emulated():
        from habana_frameworks.torch.hpex.kernels import apply_rotary_pos_emb
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        normed = FusedRMSNorm.apply(*on_card(x.unsqueeze(0), weight), 1e-5).cpu()[0]
        rotated = apply_rotary_pos_emb(*on_card(x, cos, sin, places)).cpu()

    assert torch.allclose(normed, functional.rms_norm(x, (8,), weight, 1e-5), atol=1e-6)
    assert torch.allclose(rotated, x * cos[places] + turned * sin[places], atol=1e-6)


def test_block_softmax_with_its_adjustment_equals_softmax() -> None:
    torch.manual_seed(0)
    scores, values = torch.randn(3, 1, 2, 1, 4).bfloat16(), torch.randn(3, 1, 1, 4, 5).bfloat16()
    rows = torch.tensor([0, 1, 0])
    joined = torch.cat((scores[0], scores[2]), -1).softmax(-1)
    expected = joined @ torch.cat((values[0], values[2]), -2)

    with emulated(generation="gaudi3"):
        attn, highest, sums = torch.ops.hpu.block_softmax(
            *on_card(scores, torch.zeros(3, 1, 1, 1, 4).bfloat16(), rows)
        )
        share = torch.ops.hpu.block_softmax_adjustment(
            highest, sums, rows.to("hpu"), 2, list(highest.shape)
        )
        weighed = ((attn @ values.to("hpu")) * share).cpu()

    assert torch.allclose(weighed[0] + weighed[2], expected, atol=0.05)
    assert torch.allclose(weighed[1], scores[1].softmax(-1) @ values[1], atol=0.05)


def test_softmax_by_block_refuses_what_the_bridge_refuses() -> None:
    scores, groups = torch.zeros(3, 1, 2, 1, 4), torch.zeros(3, dtype=torch.int32)
    highest = torch.zeros(3, 1, 2, 1, 1)

    with emulated(generation="gaudi3"):
        refused = [
            (torch.ops.hpu.block_softmax, (scores.flatten(1), scores[:, :, :1], groups), ()),
            (torch.ops.hpu.block_softmax, (scores, scores, groups), ()),
            (
                torch.ops.hpu.block_softmax_adjustment,
                (highest.view(3, 2, 1), highest.view(3, 2, 1), groups),
                (1, [3, 2]),
            ),
        ]
        for kernel, tensors, numbers in refused:
            with pytest.raises(RuntimeError, match=r"5-dimensional|the bias is|maxima"):
                kernel(*on_card(*tensors), *numbers)


def test_fused_attention_refuses_what_the_bridge_refuses() -> None:
    wide, large = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 576)

    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        with pytest.raises(AssertionError, match="only when q/k/v inputs are BF16"):
            FusedSDPA.apply(*on_card(wide, wide, wide), None, 0.0, True, None, "fp32")
        with pytest.raises(RuntimeError, match="heads have 576 entries, at most 256"):
            FusedSDPA.apply(*on_card(large, large, large), None, 0.0, True, None, "fast")


@pytest.mark.parametrize(("generation", "count"), [("gaudi2", 2), ("gaudi3", 0)])
def test_values_beyond_the_cards_fp8_are_counted(generation: str, count: int) -> None:
    with emulated(generation=generation) as card:
        torch.full((2,), 300.0, device="hpu").to(torch.float8_e4m3fn)
        torch.tensor([448.0]).to(torch.float8_e4m3fn).to("hpu")
        torch.full((2,), 240.0, device="hpu").to(torch.float8_e4m3fn)

        assert card.counters.counts["fp8_range"] == count


def test_repeat_interleave_with_an_output_size_needs_no_host_read() -> None:
    with emulated(strict=True) as card, card.step():
        counts = torch.full((3,), 2, device="hpu")
        found = torch.arange(3, device="hpu").repeat_interleave(counts, output_size=6)

        assert found.shape == (6,) and torch.arange(3, device="hpu").shape == (3,)
    assert found.cpu().tolist() == [0, 0, 1, 1, 2, 2]


def test_fp8_products_apply_the_inverse_scales_of_their_operands() -> None:
    a, b = torch.tensor([[2.0, 4.0]]), torch.tensor([[1.0], [3.0]])

    with emulated():
        cast_a, amax = torch.ops.hpu.cast_to_fp8_v2(a.to("hpu"), 0.5, is_amax=True, dtype=E4M3)
        cast_b, _ = torch.ops.hpu.cast_to_fp8_v2(b.to("hpu"), 2.0, dtype=E4M3)
        out = torch.ops.hpu.fp8_gemm_v2(cast_a, False, cast_b, False, None, torch.float32, 2.0, 0.5)

        assert (out.item(), amax.item()) == (14.0, 4.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # The largest absolute value is 6.
        ((1, 0, 0, False, 240.0, 0.5), [6 / 120]),
        ((1, 1, 0, False, 240.0, 0.5), [2.0**-4]),
        ((2, 0, -1, True, 240.0, 1.0), [[3 / 240], [6 / 240]]),
        ((2, 1, 0, False, 1.0, 1.0), [2.0, 8.0, 4.0]),
        # The arguments are scales, so the shape stays.
        ((0, 1, 0, False, 240.0, 0.5), [[1.0, 2.0, 4.0], [2.0, 8.0, 1.0]]),
    ],
    ids=["tensor", "tensor, power of 2", "rows", "columns, power of 2", "given, power of 2"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calculate_scale_for_cast_supports_per_tensor_and_per_axis_scales(
    arguments: tuple[Any, ...], expected: list[Any], dtype: torch.dtype
) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [-2.0, 6.0, 0.75]], dtype=dtype)
    given = x.abs() if arguments[0] == 0 else x

    with emulated():
        scale = torch.ops.hpu.calculate_scale_for_cast(given.to("hpu"), *arguments).cpu()

    assert scale.dtype == dtype
    torch.testing.assert_close(scale, torch.tensor(expected, dtype=dtype), rtol=1e-6, atol=0)


def test_compiled_row_scales_are_powers_of_two_and_zero_for_zero_rows() -> None:
    x = torch.tensor([[1.0, -7.0], [0.0, 0.0]])

    def scales(x: Tensor) -> Tensor:
        scale: Tensor = torch.ops.hpu.calculate_scale_for_cast(x, 2, 1, -1, True, 240.0, 1.0)
        return scale

    with emulated(lazy=False):
        compiled = torch.compile(scales, backend="hpu_backend", fullgraph=True)(x.to("hpu")).cpu()

    assert compiled.tolist() == [[2.0**-5], [0.0]]


def test_calculate_scale_for_cast_refuses_unknown_modes_and_requires_a_later_release() -> None:
    x = torch.ones(2, 2)

    with emulated():
        for modes, text in (((3, 0), "maxMode is 3"), ((0, 2), "scaleMode is 2")):
            with pytest.raises(RuntimeError, match=text):
                torch.ops.hpu.calculate_scale_for_cast(x.to("hpu"), *modes)
    with emulated(release="1.19.0"):
        assert not hasattr(torch.ops.hpu, "calculate_scale_for_cast")


def packed(values: Tensor) -> Tensor:
    """Eight 4-bit values of the last dimension packed into each int32, the first value lowest."""
    words = sum((values[..., lane::8].to(torch.int64) & 15) << (4 * lane) for lane in range(8))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def int4_weights(low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values (6, 16), and scales and zero points (3, 16) for three groups of rows."""
    torch.manual_seed(0)
    values, zeros = torch.randint(low, high, (6, 16)), torch.randint(low, high, (3, 16))
    return values, torch.rand(3, 16), zeros


@pytest.mark.parametrize(("name", "low", "high"), [("uint4", 0, 16), ("int4", -8, 8)])
@pytest.mark.parametrize("packs_zeros", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bit_weights_unpack_to_their_values(
    name: str, low: int, high: int, packs_zeros: bool, dtype: torch.dtype
) -> None:
    values, scales, zeros = int4_weights(low, high)
    scales = scales.to(dtype)
    rows = torch.arange(6) // 2
    expected = ((values - zeros[rows]) * scales[rows].float()).to(dtype)

    with emulated():
        given = packed(zeros) if packs_zeros else zeros.to(dtype)
        op = getattr(torch.ops.hpu, f"convert_from_{name}")
        out = op(*on_card(packed(values), scales, given), dtype)
        alone = op(*on_card(packed(values), scales[rows]), None, dtype)

        assert out.dtype == dtype and torch.equal(out.cpu(), expected)
        assert torch.equal(alone.cpu(), (values * scales[rows].float()).to(dtype))


def test_four_bit_weights_take_the_group_of_each_row_from_its_index() -> None:
    values, scales, zeros = int4_weights(0, 16)
    g_idx = torch.tensor([2, 0, 1, 1, 0, 2], dtype=torch.int32)
    expected = ((values - zeros[g_idx]) * scales[g_idx]).bfloat16()

    with emulated(release="1.22.0"):
        weights = on_card(packed(values), scales, packed(zeros))
        out = torch.ops.hpu.convert_from_uint4(*weights, torch.bfloat16, g_idx.to("hpu"))
        plain = torch.ops.hpu.convert_from_uint4(*weights, torch.float32, None)

        assert torch.equal(out.cpu(), expected)
        shorter = torch.ops.hpu.convert_from_uint4(*weights, torch.float32)
        assert torch.equal(plain.cpu(), shorter.cpu())


def test_an_older_release_has_no_index_of_groups() -> None:
    values, scales, zeros = int4_weights(0, 16)

    with emulated(release="1.19.0"):
        weights = on_card(packed(values), scales, packed(zeros))
        with pytest.raises(RuntimeError, match="at most 4 argument"):
            torch.ops.hpu.convert_from_uint4(*weights, torch.float32, None)

        assert torch.ops.hpu.convert_from_uint4(*weights, torch.float32).shape == (6, 16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input": torch.zeros(6, 2, dtype=torch.int64)}, "takes packed int32, got torch.int64"),
        ({"scale": torch.zeros(4, 16), "zero_point": None}, "6 rows do not divide evenly into 4"),
        ({"scale": torch.zeros(3, 8)}, r"scales are \(3, 8\), weights \(6, 16\)"),
        ({"zero_point": torch.zeros(3, 16, dtype=torch.int32)}, r"zero points are \(3, 16\)"),
        ({"g_idx": torch.zeros(6, dtype=torch.int64)}, r"g_idx is \(6,\) torch.int64"),
        ({"g_idx": torch.zeros(3, dtype=torch.int32)}, r"it must be \(6,\) int32"),
        ({"g_idx": torch.full((6,), 3, dtype=torch.int32)}, "holds 3 to 3, there are 3 groups"),
    ],
)
def test_four_bit_weights_of_wrong_types_and_shapes_are_refused(
    changes: dict[str, Tensor | None], text: str
) -> None:
    values, scales, zeros = int4_weights(0, 16)
    arguments = {"input": packed(values), "scale": scales, "zero_point": packed(zeros), **changes}

    with emulated():
        given = {
            name: value if value is None else value.to("hpu") for name, value in arguments.items()
        }
        with pytest.raises(RuntimeError, match=text):
            torch.ops.hpu.convert_from_uint4(**given, out_dtype=torch.float32).cpu()


def test_four_bit_weights_unpack_in_compiled_code_but_not_eagerly() -> None:
    values, scales, _ = int4_weights(0, 16)

    with emulated(lazy=False):
        weights = on_card(packed(values), scales)
        with pytest.raises(RuntimeError, match="not supported in eager mode"):
            torch.ops.hpu.convert_from_uint4(*weights, None, torch.float32)

        def unpacked(weights: Tensor, scales: Tensor) -> Tensor:
            found: Tensor = torch.ops.hpu.convert_from_uint4(weights, scales, None, torch.float32)
            return found

        compiled = torch.compile(unpacked, backend="hpu_backend", fullgraph=True)
        assert compiled(*weights).shape == (6, 16)


def test_experts_outside_the_local_range_add_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    gate, up, down = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 3)
    table, weights = torch.tensor([[5, 0], [1, 0]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    expected = 0.25 * (functional.silu(x[:1] @ gate.t()) * (x[:1] @ up.t())) @ down.t()

    with emulated():
        hidden, routing, share, w1, w2, w3 = on_card(x, table, weights, gate, up, down)
        out = torch.ops.hpu.mixture_of_experts(
            hidden, routing, share, [w1], [w2], [w3], True, "silu", 5, 5
        ).cpu()

    assert torch.allclose(out, torch.cat((expected, torch.zeros(1, 4))), atol=1e-5)


def test_experts_of_a_wrong_type_or_shape_do_not_compile() -> None:
    x, weight, down = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4, 3)
    ids, shares = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    refused: list[tuple[dict[str, Tensor], str]] = [
        ({"ids": ids.int()}, "Graph compile failed.* ids are torch.int32"),
        ({"shares": shares.bfloat16()}, "incompatible type, hidden is torch.float32"),
        ({"weight": weight.half()}, "incompatible type, .* torch.float16"),
        ({"ids": ids[:1]}, r"hidden is \(2, 4\), ids \(1, 1\), weights \(2, 1\)"),
        ({"weight": weight.t()}, r"experts are \(4, 3\) and \(4, 3\), hidden is \(2, 4\)"),
    ]

    with emulated():
        for changed, text in refused:
            given = {"ids": ids, "shares": shares, "weight": weight, **changed}
            hidden, table, part, wide, narrow = on_card(
                x, given["ids"], given["shares"], given["weight"], down
            )
            with pytest.raises(RuntimeError, match=text):
                torch.ops.hpu.mixture_of_experts(
                    hidden, table, part, [wide], [wide], [narrow], True, "silu", 0, 0
                ).cpu()


def test_experts_with_biases_exist_in_later_releases_and_take_no_biases_of_another_type() -> None:
    x, ids, shares = torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    wide, narrow = torch.zeros(2, 2), torch.tensor([[1.0], [0.0]])
    # The gate, 9, is clamped to 7; up is -3.
    biases = torch.tensor([9.0, -3.0]), torch.tensor([0.5, 0.25])

    with emulated():
        assert not hasattr(torch.ops.hpu.mixture_of_experts, "bias_fused_weights")
    with emulated(release="1.24.0"):
        kernel = torch.ops.hpu.mixture_of_experts.bias_fused_weights
        hidden, table, part, w12, w3, b12, b3 = on_card(x, ids, shares, wide, narrow, *biases)
        out = kernel(hidden, table, part, [w12], [w3], [b12], [b3], True, 0, 0).cpu()
        with pytest.raises(RuntimeError, match=r"incompatible type, .* are torch.bfloat16"):
            kernel(hidden, table, part, [w12], [w3], [b12.bfloat16()], [b3], True, 0, 0).cpu()
        with pytest.raises(RuntimeError, match="1 weights, 0 and 1 biases, experts 0 to 0 need 1"):
            kernel(hidden, table, part, [w12], [w3], [], [b3], True, 0, 0).cpu()

    inner = (1 - 3) * 7 / (1 + math.exp(-1.702 * 7))
    assert torch.allclose(out, torch.tensor([[inner + 0.5, 0.25]]))


@pytest.mark.parametrize("generation", ["gaudi2", "gaudi3"])
@pytest.mark.parametrize("is_static", [False, True])
def test_fp8_experts_apply_scales_of_tokens_outputs_and_experts(
    is_static: bool, generation: str
) -> None:
    torch.manual_seed(0)
    x, ids, shares = torch.randn(3, 8), torch.tensor([[1], [1], [0]]), torch.ones(3, 1)
    w12, w3 = torch.randn(10, 8), torch.randn(8, 5)
    scales = (torch.rand(3, 1) + 0.5) / 32, torch.rand(10) / 32, torch.rand(8) / 32
    codes = [(16 * item).to(torch.float8_e4m3fn) for item in (x, w12, w3)]
    wide = [code.float() for code in codes]
    gate, up = (wide[0] * scales[0] @ (wide[1] * scales[1].unsqueeze(1)).T).chunk(2, dim=1)
    expected = functional.silu(gate) * up @ (wide[2] * scales[2].unsqueeze(1)).T
    expected[2] = 0

    with emulated(generation=generation):
        hidden, wide_card, narrow_card = on_card(*codes)
        table, part, of_x, of_w12, of_w3, inner = on_card(
            ids, shares.bfloat16(), *scales, torch.tensor(0.1)
        )
        given = {"d_scale_intermediate_hidden_states": [inner]} if is_static else {}
        found = torch.ops.hpu.mixture_of_experts(
            hidden_states=hidden,
            expert_routing_table=table,
            router_weights=part,
            w12=[wide_card],
            w3=[narrow_card],
            d_scale_hidden_states=of_x,
            d_scale_w12=[of_w12],
            d_scale_w3=[of_w3],
            permuted_weights=True,
            activation="silu",
            experts_min=1,
            experts_max=1,
            **given,
        )
        out = found.cpu()

    assert out.dtype == torch.bfloat16
    error = (out.float() - expected).square().mean().sqrt()
    assert error < 0.06 * expected.std()


def test_fp8_experts_refuse_other_dtypes_scales_and_codes() -> None:
    kernel = "fp8_fused_weights_dynamic"
    given = {
        "x": torch.ones(2, 4).to(torch.float8_e4m3fn),
        "shares": torch.ones(2, 1).bfloat16(),
        "w12": torch.ones(6, 4).to(torch.float8_e4m3fn),
        "of_w12": torch.ones(6),
    }
    refused: list[tuple[dict[str, Tensor], str]] = [
        ({"x": torch.ones(2, 4).bfloat16()}, "incompatible type, .* torch.bfloat16"),
        ({"shares": torch.ones(2, 1)}, "incompatible type, .* router weights torch.float32"),
        ({"of_w12": torch.ones(3)}, r"the scale is \(3,\), it must be \(\) or \(6,\)"),
        (
            {"w12": torch.full((6, 4), 448.0).to(torch.float8_e4m3fn)},
            "has 448.* largest FP8 value is 240",
        ),
    ]

    with emulated(release="1.19.0"):
        assert not hasattr(torch.ops.hpu.mixture_of_experts, kernel)
    with emulated(generation="gaudi2"):
        call = getattr(torch.ops.hpu.mixture_of_experts, kernel)
        ids, w3, of_x, of_w3 = on_card(
            torch.zeros(2, 1, dtype=torch.int64),
            torch.ones(4, 3).to(torch.float8_e4m3fn),
            *(torch.ones(2, 1), torch.ones(4)),
        )
        for changed, text in refused:
            x, shares, w12, of_w12 = on_card(*{**given, **changed}.values())
            with pytest.raises(RuntimeError, match=text):
                call(
                    *(x, ids, shares, [w12], [w3], of_x, [of_w12], [of_w3]),
                    *(True, "silu", 0, 0),
                ).cpu()


def test_gelu_of_the_experts_is_the_approximation_by_tanh() -> None:
    x, unit = torch.full((1, 1), 1.5), torch.ones(1, 1)

    with emulated():
        hidden, weight, table = on_card(x, unit, torch.zeros(1, 1, dtype=torch.int64))
        out = torch.ops.hpu.mixture_of_experts(
            hidden, table, weight, [weight], [weight], [weight], True, "gelu", 0, 0
        ).cpu()

    assert torch.allclose(out, functional.gelu(x, approximate="tanh") * 1.5, atol=1e-6)
    assert not torch.allclose(out, functional.gelu(x) * 1.5, atol=1e-6)


def test_release_1_20_takes_64_experts_in_a_call_and_more_experts_are_split() -> None:
    torch.manual_seed(0)
    weights = ExpertWeights(torch.randn(70, 8, 4), torch.randn(70, 4, 4))
    x, shares = torch.randn(5, 4), torch.rand(5, 2)
    ids = torch.tensor([[0, 69], [63, 64], [1, 65], [5, 6], [66, 67]])
    with emulated(release="1.22.1"):
        whole = VllmMixtureOfExpertsOp(ExpertWeights(*on_card(*weights[:2])))
        expected = whole(*on_card(x, ids, shares)).cpu()

    with emulated(release="1.20.0"):
        on_its_card = ExpertWeights(*on_card(*weights[:2]))
        with pytest.raises(RuntimeError, match="70 experts in a call, this release takes 64"):
            VllmMixtureOfExpertsOp(on_its_card)(*on_card(x, ids, shares)).cpu()
        found = VllmMixtureOfExpertsOp(on_its_card, 64)(*on_card(x, ids, shares)).cpu()

    torch.testing.assert_close(found, expected)


def test_a_norm_with_a_weight_of_another_dtype_returns_float32() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        x = torch.ones(1, 2, 8, dtype=torch.bfloat16).to("hpu")

        assert FusedRMSNorm.apply(x, torch.ones(8).to("hpu"), 1e-5).dtype == torch.float32
        assert FusedRMSNorm.apply(x, x[0, 0].clone(), 1e-5).dtype == torch.bfloat16


def test_rope_with_float32_angles_returns_float32() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import apply_rotary_pos_emb

        narrow = torch.ones(2, 1, 8, dtype=torch.bfloat16).to("hpu")
        wide = narrow.float()

        assert apply_rotary_pos_emb(narrow, wide, wide, None, 0).dtype == torch.float32
        assert apply_rotary_pos_emb(wide, narrow, narrow, None, 0).dtype == torch.float32
        assert apply_rotary_pos_emb(narrow, narrow, narrow, None, 0).dtype == torch.bfloat16


def test_apply_rotary_pos_emb_refuses_keyword_arguments_and_an_integer_mode() -> None:
    with emulated():
        from habana_frameworks.torch.hpex import kernels

        rotate: Callable[..., Tensor] = kernels.apply_rotary_pos_emb
        x = torch.ones(2, 1, 8).to("hpu")

        with pytest.raises(TypeError):
            rotate(x, cos=x, sin=x)
        with pytest.raises(AttributeError):
            rotate(x, x, x, None, 0, 0)


def test_fused_attention_takes_a_mask_for_each_query_head() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.randn(1, 4, 3, 3, generator=generator)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        found = FusedSDPA.apply(*(given.to("hpu") for given in (q, k, v, mask)))

        torch.testing.assert_close(found.cpu(), wanted)

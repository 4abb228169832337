"""Quantized weights: rounding, products, and the blocks of a GGUF file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from kernel_rows import BLOCK, MOST_PACKED, exact_product
from paged_harness import PagedHarness
from tiny_gguf import family_weights, write_gguf
from tiny_models import make_tiny

from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.read_config import read_model_config
from config.startup_checks import check_checkpoint
from hpu.backends.cpu import use_cpu_kernels
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.linear import LinearBase
from hpu.model_loader.loader import load_weights
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.native.library import Library, PackedLinear
from hpu.native.panels import kind_of
from hpu.ops.cpu import quantized_linear
from hpu.quantization.quantized_weight import GROUP_SIZE, QuantizedWeight, concatenate
from hpu.quantization.registry import SCHEMES, process_weights
from hpu.quantization.weight_only import quantize_int4, quantize_int8

OUT, SIZE = 176, 160
KINDS = ["int8", "int4", "Q8_0"]
FEW_AND_MANY_ROWS = [1, 2, 3, 4, 5, 33]


def weight_of(kind: str) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    if kind == "Q8_0":
        values = torch.randint(-127, 128, (OUT, SIZE), dtype=torch.int8, generator=generator)
        return QuantizedWeight(
            8, values, torch.rand(OUT, SIZE // GROUP_SIZE, generator=generator).half()
        )
    quantize = quantize_int8 if kind == "int8" else quantize_int4
    return quantize(torch.randn(OUT, SIZE, generator=generator))


@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_the_dequantized_weight(
    kind: str, quantizing: Library, rounds_weights: bool
) -> None:
    weight = weight_of(kind)
    ours, torchs = PackedLinear(quantizing, weight, None), quantized_linear(weight, None)
    exact = weight.dequantize(torch.float32)
    for rows in FEW_AND_MANY_ROWS:
        torch.manual_seed(rows)
        x = torch.randn(rows, SIZE).bfloat16()

        expected = exact_product(quantizing, weight, x)

        assert torch.allclose(ours(x).float(), expected, rtol=0.01, atol=0.01 * expected.std())
        sums = ours.multiply_float32(x)
        if quantizing.rounds_inputs:
            assert torch.allclose(sums, expected, rtol=1e-5, atol=1e-5 * float(expected.std()))
        elif rows > MOST_PACKED and kind != "int8":
            assert rounds_weights or (sums - expected).norm() < 5e-4 * expected.norm()
        elif rows <= 4 or not rounds_weights:
            assert torch.allclose(sums, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        assert torch.equal(sums.bfloat16(), ours(x))
        assert torch.equal(ours.argmax(x), sums.argmax(1))
        expected = x.float() @ exact.T
        assert torch.allclose(torchs(x).float(), expected, rtol=0.02, atol=0.02 * expected.std())


@pytest.mark.parametrize("kind", ["int4", "Q8_0"])
def test_products_of_many_rows_equal_products_of_the_bfloat16_weight(
    kind: str, quantizing: Library, rounds_weights: bool
) -> None:
    if not rounds_weights:
        pytest.skip("the weights are not rounded")
    weight, x = weight_of(kind), torch.randn(97, SIZE).bfloat16()
    wide = PackedLinear(quantizing, weight.dequantize(torch.bfloat16), None)

    assert torch.equal(PackedLinear(quantizing, weight, None)(x), wide(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 40])
def test_an_outlier_among_the_inputs_costs_no_precision_elsewhere(
    kind: str, rows: int, quantizing: Library, rounds_weights: bool
) -> None:
    weight, x = weight_of(kind), torch.randn(rows, SIZE)
    x[:, 40] = 1000 * (1 + torch.rand(rows))
    x[:, 64:128] /= 2**20
    x = x.bfloat16()
    sums = PackedLinear(quantizing, weight, None).multiply_float32(x)

    exact = weight.dequantize(torch.float64)
    expected, sizes = x.double() @ exact.T, x.double().abs() @ exact.T.abs()

    most, largest = x.double().abs().amax(1, keepdim=True), exact.abs().amax(1)
    if quantizing.rounds_inputs:
        # Half a step of each block: 1/127 of its largest input; the outlier's own block has 1/254
        # of that.
        steps = x.double().unflatten(1, (-1, BLOCK)).abs().amax(-1) / 127
        steps[:, 40 // BLOCK] /= 254
        bound = 0.501 * steps @ exact.abs().unflatten(1, (-1, BLOCK)).sum(-1).T
    elif rounds_weights:
        bound = 2**-8 * sizes
    elif rows > MOST_PACKED and kind != "int8":
        # 2^-13 of the outlier, for the inputs that share its power of two. In addition, weights,
        # like their scales and minima, are rounded to multiples of at most 2^-11 of the largest
        # number that the output's groups can hold.
        held = largest if kind == "int4" else largest * 128 / 127
        bound = 2**-13 * most * exact[:, :64].abs().sum(1)
        bound += 1.5 * 2**-11 * held * x.double().abs().sum(1, keepdim=True)
    else:
        # 2^-15 of the outlier, for inputs in 8 bits.
        bound = 2**-15 * most * exact[:, 32:64].abs().sum(1)
    assert ((sums - expected).abs() <= bound + 2**-20 * sizes).all()


@pytest.mark.parametrize("kind", [*KINDS, "stored"])
def test_inputs_in_8_bits_give_a_row_the_same_sums_in_every_batch(
    kind: str, quantizing: Library
) -> None:
    if not quantizing.rounds_inputs:
        pytest.skip("inputs are not rounded")
    weight = weight_of("int4" if kind == "stored" else kind)
    if kind == "stored":
        assert weight.mins is not None
        weight = weight._replace(
            scales=weight.scales.float()[:, ::5], mins=weight.mins.float()[:, ::5]
        )
    product, x = PackedLinear(quantizing, weight, None), torch.randn(2100, SIZE).bfloat16()
    sums = product.multiply_float32(x)

    for first, count in [(0, 1), (1, 2), (3, 3), (6, 4), (10, 5), (15, 6), (21, 7), (28, 50)]:
        rows = slice(first, first + count)
        assert torch.equal(product.multiply_float32(x[rows].contiguous()), sums[rows]), count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_row_affects_no_other_row(
    kind: str, value: float, quantizing: Library
) -> None:
    weight, x = weight_of(kind), torch.randn(9, SIZE).bfloat16()
    product = PackedLinear(quantizing, weight, None)
    before = product.multiply_float32(x)
    x[4, 100] = value

    after = product.multiply_float32(x)

    assert not after[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("size", [2.0**-113, 2.0**110])
def test_outputs_scale_with_tiny_and_huge_inputs(size: float, quantizing: Library) -> None:
    weight, x = weight_of("int8"), torch.rand(8, SIZE).bfloat16()
    product = PackedLinear(quantizing, weight, None)
    expected = product.multiply_float32(x).double() * size

    found = product.multiply_float32((x.double() * size).bfloat16()).double()

    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-2 * size)


def test_a_bias_is_added(quantizing: Library) -> None:
    weight, x, bias = weight_of("int8"), torch.randn(2, SIZE).bfloat16(), torch.randn(OUT)
    plain = PackedLinear(quantizing, weight, None)(x).float()

    biased = PackedLinear(quantizing, weight, bias.bfloat16())(x).float()

    assert torch.allclose(biased, plain + bias, rtol=0.01, atol=0.05)
    torchs = quantized_linear(weight, bias.bfloat16())(x).float()
    expected = x.float() @ weight.dequantize(torch.float32).T + bias
    assert torch.allclose(torchs, expected, rtol=0.02, atol=0.2)


def test_the_rounding_error_is_at_most_half_a_step() -> None:
    weight = torch.randn(OUT, SIZE)
    weight[0] = 0
    weight[1, :GROUP_SIZE] = 3

    eight, four = quantize_int8(weight), quantize_int4(weight)

    step = eight.scales * 0.501
    assert ((eight.dequantize(torch.float32) - weight).abs() <= step).all()
    # Scale and minimum are rounded to float16.
    step = four.scales.float().repeat_interleave(GROUP_SIZE, 1) * 0.51 + 0.01
    assert ((four.dequantize(torch.float32) - weight).abs() <= step).all()
    assert eight.num_bytes == OUT * (SIZE + 4)
    assert four.num_bytes == OUT * (SIZE // 2 + 4 * SIZE // GROUP_SIZE)


def test_weights_of_different_kinds_are_not_concatenated() -> None:
    assert concatenate([weight_of("int8"), weight_of("int4")]) is None
    both = concatenate([weight_of("int4"), weight_of("int4")])
    assert both is not None and both.values.shape == (2 * OUT, SIZE)


def test_a_shape_without_whole_panels_has_no_kernel() -> None:
    assert kind_of(quantize_int8(torch.randn(20, 64))) is None


def loaded(folder: str, quantization: str | None = None, group: ProcessGroup = SINGLE) -> Decoder:
    """The model before its weights are quantized."""
    dtype, device = torch.bfloat16, torch.device("cpu")
    scheme = None if quantization is None else SCHEMES[quantization](EngineConfig(folder))
    facts = read_model_config(folder)
    model = build_model(
        facts, ModelBuild(dtype=dtype, device=device, quantization=scheme, group=group)
    )
    load_weights(model, folder, on_progress=lambda done, total: None, group=group)
    return model


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    """A folder converted from a GGUF file with all types that stay packed, and a type that does
    not."""
    weights = family_weights("llama", tied=False)
    kinds = [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q5_0]
    stems = {"attn_q": 0, "attn_k": 0, "attn_v": 0, "attn_output": 1, "ffn_gate": 2, "ffn_up": 2}
    types = {"output.weight": Type.Q8_0, "token_embd.weight": Type.Q4_0}
    for name in weights:
        if name.startswith("blk.") and "norm" not in name:
            types[name] = kinds[stems.get(name.split(".")[2], 3)]
    source = write_gguf(tmp_path / "tiny.gguf", weights=weights, quantized=types)
    return resolve(
        EngineConfig(str(source), cache_dir=str(tmp_path), quantization="gguf"), progress=False
    )


def test_gguf_blocks_are_used_as_quantized_weights(gguf: str) -> None:
    model = loaded(gguf, "gguf")
    linears = [module for module in model.modules() if isinstance(module, LinearBase)]
    weights = {linear: linear.weight for linear in linears}

    num_bytes = process_weights(model, "gguf")

    quantized = [linear for linear in linears if linear.quantized_weight is not None]
    # qkv, output, and gate with up of both layers, and the head; `down` has five bits and is not
    # packed.
    assert len(quantized) == 2 * 3 + 1
    assert {linear.quantized_weight.bits for linear in quantized} == {4, 8}
    assert num_bytes == sum(linear.quantized_weight.num_bytes for linear in quantized)
    for linear in quantized:
        assert torch.equal(linear.quantized_weight.dequantize(torch.bfloat16), weights[linear])


@pytest.mark.parametrize(("size", "has_output"), [(2, True), (4, False)])
def test_the_blocks_of_a_rank_equal_its_shard(size: int, has_output: bool, gguf: str) -> None:
    for rank in range(size):
        model = loaded(gguf, "gguf", ProcessGroup(range(size), rank))
        linears = [module for module in model.modules() if isinstance(module, LinearBase)]
        weights = {linear: linear.weight for linear in linears}

        process_weights(model, "gguf")

        quantized = [linear for linear in linears if linear.quantized_weight is not None]
        # Each of four ranks has 16 of the output projection's inputs, half a block.
        assert len(quantized) == 2 * (2 + has_output) + 1
        for linear in quantized:
            assert torch.equal(linear.quantized_weight.dequantize(torch.bfloat16), weights[linear])


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["ours", "torch"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_decoder_runs_on_quantized_weights(
    bits: str, kernels: str, built: Library, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 320}
    folder = str(make_tiny("llama", tmp_path, num_attention_heads=4, **sizes))
    exact, quantized = use_cpu_kernels(loaded(folder), None), loaded(folder, bits)
    process_weights(quantized, bits)

    model = use_cpu_kernels(quantized, built if kernels == "ours" else None)

    prompt = {0: list(range(10, 40)), 1: [5, 6, 7]}
    found, expected = (PagedHarness(model).prefill(prompt) for model in (model, exact))
    for row in prompt:
        error = (found[row].float() - expected[row].float()).square().mean().sqrt()
        # Random weights are the worst case for rounding: 4 bits lose a tenth in each product.
        assert 0 < error < {"int8": 0.06, "int4": 0.5}[bits] * expected[row].float().std()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantization": "int3"},
            "quantization is 'int3', it must be one of auto-round, awq, .*int8, int4",
        ),
        ({"quantization": "int8", "dtype": "float32"}, "is int8 and dtype is float32"),
        ({"quantization": "int8", "device": "hpu"}, "is int8 and device is hpu"),
    ],
)
def test_unsupported_quantization_settings_are_refused(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("model", **settings)  # type: ignore[arg-type]


def test_a_folder_without_gguf_blocks_is_refused(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path))

    with pytest.raises(ConfigError, match="not made from a GGUF file"):
        check_checkpoint(EngineConfig(folder, quantization="gguf"), folder)


def test_four_bits_need_whole_groups() -> None:
    with pytest.raises(ValueError, match="in_features is 33, it must be a multiple of 32"):
        quantize_int4(torch.from_numpy(np.ones((16, 33), np.float32)))

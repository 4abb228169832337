"""Models on a card that multiplies no float32 matrices (Gaudi 2B, 2C and 2D): products of bfloat16
parts, and layers that need them."""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import SPLIT_PRODUCTS, WRITES_FLOAT32, change_cards, emulated
from tiny_encoders import Reader, make_pooling
from tiny_models import make_tiny
from torch import Tensor
from torch.nn import functional
from two_prompts import SLICE, greedy, working
from worker_rig import BLOCK_SIZE

from config.execution import EMULATED_RELEASE, HPU_GRAPHS, ExecutionConfig, ModeChoice
from hpu.backends.gaudi import GaudiBackend
from hpu.emulator.card import rules
from hpu.ops.products import Matmul, matmul_by_element, matmul_in_parts
from hpu.ops.ssm import (
    gated_delta_scan,
    gated_delta_step,
    l2_norm,
    mamba2_scan,
    mamba2_step,
    unit_lower_inverse,
)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5, 40), (40, 6)),
        ((2, 3, 5, 40), (40, 6)),
        ((2, 1, 5, 40), (3, 40, 6)),
        ((2, 3, 1, 40), (3, 40, 6)),
        ((2, 3, 5, 40), (2, 3, 40, 1)),
    ],
)
@pytest.mark.parametrize(("matmul", "release"), SPLIT_PRODUCTS)
def test_a_split_product_is_as_exact_as_in_float32(
    left: tuple[int, ...], right: tuple[int, ...], matmul: Matmul, release: str
) -> None:
    factors = _random(*left), _random(*right, seed=1) * torch.logspace(-3, 3, right[-1])
    exact = factors[0].double() @ factors[1].double()
    scale = factors[0].double().abs() @ factors[1].double().abs()
    with torch.inference_mode(), emulated(multiplies_float32=False, release=release):
        found = matmul(*(factor.to("hpu") for factor in factors)).cpu()

    assert found.dtype == torch.float32
    assert float(((found - exact).abs() / scale).max()) < 2**-21


@pytest.mark.parametrize(("matmul", "release"), SPLIT_PRODUCTS)
def test_a_product_of_bfloat16_has_the_exact_sum_in_float32(matmul: Matmul, release: str) -> None:
    factors = _random(4, 16).bfloat16(), _random(16, 8, seed=1).bfloat16()
    with torch.inference_mode(), emulated(multiplies_float32=False, release=release):
        found = matmul(*(factor.to("hpu") for factor in factors)).cpu()

    torch.testing.assert_close(found, factors[0].float() @ factors[1].float())


def test_a_product_of_elements_in_slices_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = _random(2, 7, 40), _random(2, 40, 6, seed=1)
    expected = matmul_by_element(left, right)
    monkeypatch.setattr("hpu.ops.products.MAX_ELEMENTS", 3 * 40 * 6)

    assert torch.equal(matmul_by_element(left, right), expected)


def _on_card(function: Callable[..., Any], *given: Tensor) -> list[Tensor]:
    """Results of `function` on a card that multiplies no float32 matrices."""
    with torch.inference_mode(), emulated(multiplies_float32=False, release=WRITES_FLOAT32):
        found = function(*(tensor.to("hpu") for tensor in given), matmul=matmul_in_parts)
        return [tensor.cpu() for tensor in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("length", [1, 70])
def test_mamba2_runs_without_products_of_float32(length: int) -> None:
    batch, heads, dim, groups, size = 2, 4, 5, 2, 6
    x, dt = _random(batch, length, heads, dim), _random(batch, length, heads, seed=1).exp()
    b, c = (_random(batch, length, groups, size, seed=seed) for seed in (2, 3))
    given = (x, dt, -_random(heads, seed=4).exp(), b, c, _random(batch, heads, dim, size, seed=5))

    for found, expected in zip(_on_card(mamba2_scan, *given), mamba2_scan(*given), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    x, dt, a, b, c, state = given
    step = (x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], state)
    for found, expected in zip(_on_card(mamba2_step, *step), mamba2_step(*step), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("length", [1, 70])
def test_the_gated_delta_rule_runs_without_products_of_float32(length: int) -> None:
    batch, heads, key_dim, value_dim = 2, 4, 5, 6
    query, key = (l2_norm(_random(batch, length, heads, key_dim, seed=seed)) for seed in (0, 1))
    given = (
        *(query, key, _random(batch, length, heads, value_dim, seed=2)),
        -_random(batch, length, heads, seed=3).exp(),
        _random(batch, length, heads, seed=4).sigmoid(),
        _random(batch, heads, key_dim, value_dim, seed=5),
    )

    expected = gated_delta_scan(*given)
    for found, wanted in zip(_on_card(gated_delta_scan, *given), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    step: tuple[Any, ...] = (*(tensor[:, 0] for tensor in given[:-1]), given[-1])
    expected = gated_delta_step(*step)
    for found, wanted in zip(_on_card(gated_delta_step, *step), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_inverse_in_bfloat16_parts_is_exact() -> None:
    lower = _random(3, 33, 33).tril(-1) / math.sqrt(33)

    (found,) = _on_card(unit_lower_inverse, lower)

    torch.testing.assert_close(found, unit_lower_inverse(lower), atol=1e-4, rtol=1e-4)


FAMILIES: dict[str, dict[str, Any]] = {
    # Gated delta rule, and Mamba 2.
    "qwen3_5_text": {},
    "granitemoehybrid": {},
    # A block indexer, and a router in float32.
    "minimax_m3_vl_text": {"index_block_size": BLOCK_SIZE},
    # A router in float32.
    "deepseek_v3": {},
}
WITH_STATES = ("qwen3_5_text", "granitemoehybrid")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mode", ["hpu-graphs", pytest.param("torch-compile", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("family", "release"),
    [*((family, EMULATED_RELEASE) for family in FAMILIES), ("qwen3_5_text", WRITES_FLOAT32)],
)
def test_states_indexers_and_routers_need_no_products_of_float32(
    family: str, release: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny(family, tmp_path, **FAMILIES[family])
    settings: dict[str, Any] = {"dtype": "bfloat16"}
    if family in WITH_STATES:
        settings |= SLICE | {"prefix_caching": False}
    with working(folder, **settings) as rig:
        expected = greedy(rig)
    settings |= {"device": "hpu-emulator", "execution": ExecutionConfig(mode=mode)}
    change_cards(monkeypatch, multiplies_float32=False, strict=True, release=release)
    with working(folder, **settings) as rig:
        # Later tokens of random weights may follow from rounding.
        assert [found[:4] for found in greedy(rig)] == [found[:4] for found in expected]


def test_a_classifier_needs_no_products_of_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_pooling("bert", tmp_path, num_labels=3)
    change_cards(monkeypatch, multiplies_float32=False)
    found = {}
    for device in ("cpu", "hpu-emulator"):
        reader = Reader(folder, device=device, dtype="bfloat16")
        with closing(reader.worker):
            (found[device],) = reader.read([[5, 9, 7, 8]])

    assert abs(found["cpu"] - found["hpu-emulator"]).max() < 0.05


def test_scales_of_fp8_experts_are_no_operands_of_a_product() -> None:
    name = "hpu::mixture_of_experts"
    narrow, wide = torch.ones(2, 2, dtype=torch.float8_e4m3fn), torch.ones(2, 1)
    rules.check_product(name, (narrow, wide.int(), wide.bfloat16(), wide))
    with pytest.raises(RuntimeError, match="float32 operation is not supported"):
        rules.check_product(name, (wide, wide.int(), wide.bfloat16()))


@pytest.fixture
def widens_attention() -> Iterator[None]:
    """Torch's default: products of attention in float32."""
    before = torch._C._get_math_sdp_allow_fp16_bf16_reduction()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.usefixtures("widens_attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_torch_multiplies_float32_unless_16_bit_products_are_allowed(
    dtype: torch.dtype,
) -> None:
    operands = (_random(1, 2, 5, 8).to(dtype),) * 3
    with torch.inference_mode(), emulated(multiplies_float32=False):
        on_card = tuple(operand.to("hpu") for operand in operands)
        with pytest.raises(RuntimeError, match="float32 operation is not supported"):
            functional.scaled_dot_product_attention(*on_card)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        found = functional.scaled_dot_product_attention(*on_card).cpu()

    expected = functional.scaled_dot_product_attention(*operands)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("widens_attention")
def test_a_card_worker_allows_attention_of_torch_in_16_bits() -> None:
    with torch.inference_mode(), emulated(multiplies_float32=False):
        backend = GaudiBackend(ExecutionConfig(), ModeChoice(HPU_GRAPHS, ""))
        operand = _random(1, 2, 5, 8).bfloat16().to("hpu")

        assert functional.scaled_dot_product_attention(*[operand] * 3).shape == operand.shape
        backend.close()

    assert not torch._C._get_math_sdp_allow_fp16_bf16_reduction()

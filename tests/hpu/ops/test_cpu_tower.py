"""Vision towers with packed products on a CPU equal transformers up to rounding."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision_models import make_tiny_vision, prepare
from torch import nn
from torch.nn import functional

from config.model.read_config import read_model_config
from hpu.backends.cpu import CpuBackend
from hpu.model_loader.loader import load_weights
from hpu.multimodal.towers.tower import VisionTower
from hpu.native.library import PackedLinear
from hpu.native.tower import NativeTowerKernels
from hpu.ops.cpu import can_pack
from hpu.ops.cpu_tower import (
    ATTENTIONS,
    GATED_MLPS,
    TowerKernels,
    _attend_within,
    use_cpu_kernels_in_tower,
)

FAMILIES = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "llava", "mistral3"]
FAMILIES += [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
]
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype) -> VisionTower:
    tower = VisionTower(read_model_config(str(folder)), dtype=dtype, device=CPU)
    load_weights(tower, str(folder), on_progress=lambda done, total: None)
    return tower


@torch.inference_mode()
@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_equal_plain_modules(
    name: str, is_ours: bool, tmp_path: Path, kernel_folder: Path
) -> None:
    if not is_ours and not can_pack(torch.bfloat16, CPU):
        pytest.skip("no products in bfloat16")
    whole = make_tiny_vision(name, tmp_path)
    # An image with windows of several sizes.
    (picture,) = prepare(name, whole, [3])
    exact = load(tmp_path, torch.float32)(picture.tensors)
    tower = load(tmp_path, torch.bfloat16)
    plain = tower(picture.tensors).float()
    num_linears = sum(type(module) is nn.Linear for module in tower.modules())

    if is_ours:
        backend = CpuBackend(1, kernels=kernel_folder)
        if backend.open_kernels() is None:
            pytest.skip("no compiler")
        backend.prepare_tower(tower)
        ours = [isinstance(module.forward, PackedLinear) for module in tower.modules()]
        # torch's products are used if they are as fast; this project's products do not support a
        # single tile.
        assert any(ours) or can_pack(torch.bfloat16, CPU)
    else:
        assert use_cpu_kernels_in_tower(tower) >= num_linears > 0

    found = tower(picture.tensors).float()
    if name.startswith("qwen"):
        assert any(type(module).__name__ in ATTENTIONS for module in tower.modules())
    assert found.shape == exact.shape
    error = (found - exact).square().mean().sqrt()
    assert error < 1.2 * (plain - exact).square().mean().sqrt() + 1e-3 * exact.std()


def test_without_bfloat16_instructions_the_native_products_are_used(
    tmp_path: Path, kernel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CpuBackend(1, kernels=kernel_folder)
    if backend.open_kernels() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr("hpu.native.tower.can_pack", lambda dtype, device: False)
    make_tiny_vision("qwen2_5_vl", tmp_path)
    tower = load(tmp_path, torch.bfloat16)
    gated: list[Any] = [module for module in tower.modules() if type(module).__name__ in GATED_MLPS]
    inside = {id(part) for module in gated for part in module.children()}
    linears = [
        module
        for module in tower.modules()
        if type(module) is nn.Linear and id(module) not in inside
    ]

    backend.prepare_tower(tower)

    assert linears and all(isinstance(linear.forward, PackedLinear) for linear in linears)
    assert gated and all(not module.gate_proj.weight.numel() for module in gated)


@pytest.fixture
def native(kernel_folder: Path) -> NativeTowerKernels:
    backend = CpuBackend(1, kernels=kernel_folder)
    if backend.open_kernels() is None:
        pytest.skip("no compiler")
    return NativeTowerKernels(backend._library)


@torch.inference_mode()
@pytest.mark.parametrize("size", [16, 64, 72, 80, 128])
@pytest.mark.parametrize(
    "ends", [[0, 1], [0, 130], [0, 64, 128], [0, 5, 5, 38, 70, 199], [0, 300]], ids=str
)
def test_native_patch_attention_equals_torch(
    size: int, ends: list[int], native: NativeTowerKernels
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(ends[-1], 3, 2, size).bfloat16()
    angles = torch.rand(ends[-1], size // 2) * 6
    arguments = (angles.cos(), angles.sin(), torch.tensor(ends, dtype=torch.int32), size**-0.5)
    exact = TowerKernels().attend(qkv.float(), *arguments)
    plain = TowerKernels().attend(qkv, *arguments)

    found = native.attend(qkv, *arguments)

    assert found.shape == exact.shape
    error, allowed = ((item.float() - exact).abs() for item in (found, plain))
    assert error.max() <= 2 * allowed.max() + 1e-3
    assert error.square().mean().sqrt() <= 1.2 * allowed.square().mean().sqrt() + 1e-4


@torch.inference_mode()
def test_native_patch_attention_is_the_same_with_more_threads(
    native: NativeTowerKernels,
) -> None:
    qkv, angles = torch.randn(200, 3, 1, 64).bfloat16(), torch.rand(200, 32)
    arguments = (angles.cos(), angles.sin(), torch.tensor([0, 200]), 0.125)
    found = []
    for num_threads in (1, 3):
        native._library.use_threads(num_threads)
        found.append(native.attend(qkv, *arguments))

    assert torch.equal(*found)


@torch.inference_mode()
@pytest.mark.parametrize("inner", [32, 44, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_native_gated_mlp_equals_torch(
    inner: int, has_bias: bool, native: NativeTowerKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use this project's products, even where torch's products would be chosen.
    monkeypatch.setattr("hpu.native.tower.can_pack", lambda dtype, device: False)
    torch.manual_seed(0)
    gate, up, down = (
        nn.Linear(*shape, bias=has_bias).bfloat16()
        for shape in ((64, inner), (64, inner), (inner, 64))
    )
    x = torch.randn(70, 64).bfloat16()
    exact = _gated(x, gate, up, down, torch.float32)
    plain = _gated(x, gate, up, down, torch.bfloat16)

    forward = native.gated_mlp(gate, up, down)

    assert forward is not None
    error, allowed = ((item.float() - exact).square().mean().sqrt() for item in (forward(x), plain))
    assert error < 1.2 * allowed + 1e-4


def _gated(
    x: torch.Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear, dtype: torch.dtype
) -> torch.Tensor:
    def product(x: torch.Tensor, by: nn.Linear) -> torch.Tensor:
        bias = None if by.bias is None else by.bias.to(dtype)
        return functional.linear(x.to(dtype), by.weight.to(dtype), bias)

    return product(functional.silu(product(x, gate)) * product(x, up), down)


@torch.inference_mode()
@pytest.mark.parametrize("size", [48, 50])
def test_the_native_rms_norm_equals_torch(size: int, native: NativeTowerKernels) -> None:
    x, weight = torch.randn(3, 7, size).bfloat16() * 5, torch.rand(size).bfloat16()
    exact = functional.rms_norm(x.float(), (size,), weight.float(), 1e-6)

    found = native.rms_norm(weight, 1e-6)(x)

    assert found.shape == x.shape
    assert torch.allclose(found.float(), exact, rtol=2**-7, atol=1e-3)


def test_a_float32_tower_is_not_packed(tmp_path: Path) -> None:
    make_tiny_vision("llava", tmp_path)

    assert use_cpu_kernels_in_tower(load(tmp_path, torch.float32)) == 0


@torch.inference_mode()
@pytest.mark.parametrize("ends", [[0, 12], [0, 4, 8, 12], [0, 3, 7, 11, 12], [0, 4, 4, 12]])
def test_patches_attend_only_to_their_own_part(ends: list[int]) -> None:
    q, k, v = torch.randn(3, 12, 2, 8)

    found = _attend_within(q, k, v, torch.tensor(ends, dtype=torch.int32), 0.5)

    for start, end in itertools.pairwise(ends):
        weights = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]).mul(0.5).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v[start:end])
        assert torch.allclose(found[start:end], expected, atol=1e-5)

"""Vision towers with packed products on a CPU: what transformers computes, but for rounding."""

import itertools
from pathlib import Path

import pytest
import torch
from tiny_vision_models import make_tiny_vision, prepare
from torch import nn

from config.model.read_config import read_model_config
from hpu.backends.cpu import CpuBackend
from hpu.model_loader.loader import load_weights
from hpu.multimodal.tower import VisionTower
from hpu.native.library import PackedLinear
from hpu.ops.cpu import can_pack
from hpu.ops.cpu_tower import ATTENTIONS, _attend_within, use_cpu_kernels_in_tower

FAMILIES = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "llava", "mistral3"]
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype) -> VisionTower:
    tower = VisionTower(read_model_config(str(folder)), dtype=dtype, device=CPU)
    load_weights(tower, str(folder), on_progress=lambda done, total: None)
    return tower


@torch.inference_mode()
@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_those_of_plain_modules(
    name: str, is_ours: bool, tmp_path: Path, kernel_folder: Path
) -> None:
    if not is_ours and not can_pack(torch.bfloat16, CPU):
        pytest.skip("no products in bfloat16")
    whole = make_tiny_vision(name, tmp_path)
    # Of several windows, which have several sizes.
    (picture,) = prepare(name, whole, [3])
    exact = load(tmp_path, torch.float32)(picture.tensors)
    tower = load(tmp_path, torch.bfloat16)
    plain = tower(picture.tensors).float()
    num_linears = sum(type(one) is nn.Linear for one in tower.modules())

    if is_ours:
        backend = CpuBackend(kernels=kernel_folder)
        if backend._library is None:
            pytest.skip("no compiler")
        backend.prepare_tower(tower)
        ours = [isinstance(one.forward, PackedLinear) for one in tower.modules()]
        # Torch's are used where they are as fast, and ours is not made for one tile.
        assert any(ours) or can_pack(torch.bfloat16, CPU)
    else:
        assert use_cpu_kernels_in_tower(tower) >= num_linears > 0

    found = tower(picture.tensors).float()
    if name.startswith("qwen"):
        assert any(type(one).__name__ in ATTENTIONS for one in tower.modules())
    assert found.shape == exact.shape
    error = (found - exact).square().mean().sqrt()
    assert error < 1.2 * (plain - exact).square().mean().sqrt() + 1e-3 * exact.std()


def test_without_bfloat16_instructions_the_products_are_ours(
    tmp_path: Path, kernel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CpuBackend(kernels=kernel_folder)
    if backend._library is None:
        pytest.skip("no compiler")
    monkeypatch.setattr("hpu.backends.cpu.can_pack", lambda dtype, device: False)
    make_tiny_vision("qwen2_5_vl", tmp_path)
    tower = load(tmp_path, torch.bfloat16)
    linears = [one for one in tower.modules() if type(one) is nn.Linear]

    backend.prepare_tower(tower)

    assert linears and all(isinstance(one.forward, PackedLinear) for one in linears)


def test_a_tower_in_float32_stays_as_it_is(tmp_path: Path) -> None:
    make_tiny_vision("llava", tmp_path)

    assert use_cpu_kernels_in_tower(load(tmp_path, torch.float32)) == 0


@torch.inference_mode()
@pytest.mark.parametrize("ends", [[0, 12], [0, 4, 8, 12], [0, 3, 7, 11, 12], [0, 4, 4, 12]])
def test_patches_see_those_of_their_part_only(ends: list[int]) -> None:
    q, k, v = torch.randn(3, 12, 2, 8)

    found = _attend_within(q, k, v, torch.tensor(ends, dtype=torch.int32), 0.5)

    for start, end in itertools.pairwise(ends):
        weights = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]).mul(0.5).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v[start:end])
        assert torch.allclose(found[start:end], expected, atol=1e-5)

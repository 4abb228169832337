"""Quantized checkpoints sharded over two ranks with gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FORMATS, STACKING, Integers, Vectors, make_quantized
from random_checkpoint import write_mxfp4
from rank_pool import RankPool, generate
from stored_ranks import prefill_packed, weights_of
from tiny_models import make_tiny

from hpu.distributed.process_groups import SINGLE
from hpu.native.library import Library

MOE, MXFP4 = "qwen3_moe", "mxfp4"
NAMES = [
    "gptq",
    "gptq, desc_act",
    "gptq, 8 bits",
    "awq",
    "wna16",
    "wna16, channels",
    "fp8",
    "fp8, blocks",
    "float-quantized, channels",
]
OTHERS = [*(name for name in FORMATS if name not in (*NAMES, STACKING)), STACKING, MXFP4]
EXPERTS = ["gptq", "wna16, 8 bits", "fp8, blocks"]
OTHER_EXPERTS = ["awq", "gptq, desc_act", "wna16", "fp8", "float-quantized, channels"]
LLAMA4 = {"num_hidden_layers": 2, "intermediate_size": 128, "intermediate_size_mlp": 256}


def integers(names: list[str]) -> list[str]:
    """Formats whose weights stay packed on a CPU."""
    return [name for name in names if isinstance(FORMATS.get(name), Integers | Vectors)]


def slow(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def make_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint of a format, or of a family with a format."""
    if name == MXFP4:
        return write_mxfp4(folder)
    if name == STACKING:
        return make_quantized(FORMATS[name], folder, "llama4_text", **LLAMA4).folder
    fields: dict[str, Any] = {"num_hidden_layers": 1}
    family, _, form = name.rpartition(": ")
    if family == MOE:
        fields |= {"num_experts": 4, "moe_intermediate_size": 128}
    return make_quantized(FORMATS[form], folder, family or "llama", **fields).folder


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, Path] = {}

    def make(name: str) -> str:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("checkpoint"))
        return str(made[name])

    return make


@pytest.mark.parametrize("name", [*NAMES, *slow(OTHERS)])
def test_ranks_give_the_tokens_of_a_single_process(
    name: str, make: Callable[[str], str], pool: RankPool
) -> None:
    with torch.inference_mode():
        expected = generate(SINGLE, make(name))

    found = pool.run(2, generate, make(name))

    assert all(entry.tokens == expected.tokens for entry in found)
    torch.testing.assert_close(found[0].logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*integers(NAMES), *slow(integers(OTHERS))])
def test_ranks_multiply_by_packed_shards(
    name: str, make: Callable[[str], str], pool: RankPool
) -> None:
    with torch.inference_mode():
        expected = prefill_packed(SINGLE, make(name))

    found = pool.run(2, prefill_packed, make(name))

    assert torch.equal(*found)
    error = (found[0] - expected).square().mean().sqrt()
    assert error < 0.03 * expected.std()


@pytest.mark.parametrize("distributes", [False, True])
@pytest.mark.parametrize("name", [*EXPERTS, *slow(OTHER_EXPERTS)])
def test_ranks_with_quantized_experts_give_the_tokens_of_a_single_process(
    name: str,
    distributes: bool,
    make: Callable[[str], str],
    pool: RankPool,
    kernel_folder: Path,
    built: Library,
) -> None:
    folder = make(f"{MOE}: {name}")
    with torch.inference_mode():
        expected = generate(SINGLE, folder)
        rounded = prefill_packed(SINGLE, folder, kernel_folder)

    found = pool.run(2, generate, folder, distributes)

    assert all(entry.tokens == expected.tokens for entry in found)
    torch.testing.assert_close(found[0].logits, expected.logits, rtol=1e-4, atol=1e-4)
    for kernels in (None, kernel_folder):
        packed = pool.run(2, prefill_packed, folder, kernels, distributes)
        assert torch.equal(*packed)
        # A token with two close router logits may choose another expert.
        errors = (packed[0] - rounded).square().mean(-1).sqrt()
        assert errors.median() < 0.03 * rounded.std()


def test_each_rank_quantizes_its_own_shard_while_loading(tmp_path: Path, pool: RankPool) -> None:
    folder = str(make_tiny("qwen2_moe", tmp_path, num_hidden_layers=1))
    plain = pool.run(2, weights_of, folder, "")

    found = pool.run(2, weights_of, folder, "fp8")

    largest = torch.finfo(torch.float8_e4m3fn).max
    for own, rounded in zip(plain, found, strict=True):
        changed = {key for key in own if not torch.equal(own[key], rounded[key])}
        assert len(changed) == 6 and all("_proj" in key or "experts.w" in key for key in changed)
        for key in changed:
            scales = own[key].abs().amax(-1, keepdim=True) / largest
            expected = (own[key] / scales).to(torch.float8_e4m3fn).float() * scales
            torch.testing.assert_close(rounded[key], expected, rtol=1e-6, atol=1e-7, msg=key)

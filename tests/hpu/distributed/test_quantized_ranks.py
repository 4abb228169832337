"""Quantized checkpoints divided among two ranks over gloo."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FORMATS, make_quantized
from rank_pool import RankPool, generate
from stored_ranks import prefill_packed

from hpu.distributed.process_groups import SINGLE

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


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, Path] = {}

    def make(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[name] = make_quantized(FORMATS[name], folder, num_hidden_layers=1).folder
        return str(made[name])

    return make


@pytest.mark.parametrize("name", NAMES)
def test_ranks_give_the_tokens_of_one(
    name: str, make: Callable[[str], str], pool: RankPool
) -> None:
    with torch.inference_mode():
        expected = generate(SINGLE, make(name))

    found = pool.run(2, generate, make(name))

    assert all(one.tokens == expected.tokens for one in found)
    torch.testing.assert_close(found[0].logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if "f" not in name])
def test_ranks_multiply_by_packed_shards(
    name: str, make: Callable[[str], str], pool: RankPool
) -> None:
    with torch.inference_mode():
        expected = prefill_packed(SINGLE, make(name))

    found = pool.run(2, prefill_packed, make(name))

    assert torch.equal(*found)
    error = (found[0] - expected).square().mean().sqrt()
    assert error < 0.03 * expected.std()

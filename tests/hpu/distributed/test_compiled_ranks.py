"""Ranks that run the CPU's compiled decoder and all-reduce in shared memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import PagedHarness
from rank_pool import PROMPTS, RankPool
from tiny_models import make_tiny
from torch import Tensor

from config.errors import EngineDied
from config.model.read_config import read_model_config
from hpu.backends.cpu import use_cpu_kernels
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.model_loader.loader import load_weights
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model
from hpu.native.decoder import CompiledDecoder
from hpu.native.library import Library, open_library
from hpu.native.shared_sums import SharedSums
from hpu.quantization.registry import process_weights

SIZES: dict[str, Any] = {
    "head_dim": 32,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}


def logits_of(group: ProcessGroup, folder: str, kernels: str) -> Tensor:
    """Logits of two prompts and of four decodes each, in bfloat16."""
    library = open_library(Path(kernels), 1)
    config = read_model_config(folder)
    model = build_model(
        config, ModelBuild(dtype=torch.bfloat16, device=torch.device("cpu"), group=group)
    )
    load_weights(model, folder, on_progress=lambda done, total: None, group=group)
    process_weights(model, None)
    compiled = use_cpu_kernels(model, library)
    assert isinstance(compiled, CompiledDecoder) and compiled.is_compiled
    harness = PagedHarness(compiled)
    found = [rows[-1:] for rows in harness.prefill(PROMPTS).values()]
    last = {row: int(rows.argmax()) for row, rows in zip(PROMPTS, found, strict=True)}
    for _ in range(4):
        step = harness.decode(last)
        last = {row: int(logits.argmax()) for row, logits in step.items()}
        found += [logits.view(1, -1) for logits in step.values()]
    return torch.cat(found).float()


@pytest.mark.parametrize(
    ("family", "size", "overrides"),
    [
        ("llama", 2, {"attention_bias": True}),
        ("llama", 4, {"vocab_size": 323}),
        ("qwen3", 2, {"tie_word_embeddings": True}),
        ("qwen2_moe", 2, {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
    ],
)
def test_ranks_that_share_memory_give_the_logits_of_a_single_process(
    family: str,
    size: int,
    overrides: dict[str, Any],
    pool: RankPool,
    built: Library,
    kernel_folder: Path,
    tmp_path: Path,
) -> None:
    folder = str(make_tiny(family, tmp_path, **{**SIZES, **overrides}))
    with torch.inference_mode():
        expected = logits_of(SINGLE, folder, str(kernel_folder))

    found = pool.run(size, logits_of, folder, str(kernel_folder))

    assert all(torch.equal(entry, found[0]) for entry in found)
    # The all-reduce adds in another order, and integer products scale the inputs of each rank
    # separately.
    error = (found[0] - expected).square().mean().sqrt()
    assert error < 0.01 * expected.std()


def grow(group: ProcessGroup) -> list[int]:
    """Capacity after each reservation."""
    sums, found = SharedSums(group), []
    for count in (5, 16, 17, 4000):
        assert sums.reserve(count)
        found.append(sums.structure.capacity)
    return found


def test_the_shared_all_reduce_buffer_grows_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(2, grow) == [[16, 16, 32, 4000]] * 2


def test_a_rank_that_has_ended_is_an_error() -> None:
    sums = SharedSums(SINGLE)
    sums.structure.lost = 2

    with pytest.raises(EngineDied, match="rank 1 has ended"):
        sums.check()

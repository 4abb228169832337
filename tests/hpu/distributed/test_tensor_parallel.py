"""A decoder divided between two ranks over gloo gives the logits of the whole one."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from paged_harness import PagedHarness, load_decoder
from tiny_models import make_tiny
from torch import Tensor

from config.model.model_config import read_model_config
from hpu.distributed.process_groups import ProcessGroup, Ranks, join, leave
from hpu.model_loader.loader import load_weights
from hpu.model_loader.size_estimate import count_parameters
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model

PROMPTS = {0: list(range(10, 31)), 1: [40, 41]}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "granite": {},
    "phi3": {},
}


def logits_of(model: Decoder) -> Tensor:
    """(tokens, vocab) of a prefill and a decode."""
    harness = PagedHarness(model)
    with torch.inference_mode():
        prefill = harness.prefill(PROMPTS).values()
        decode = harness.decode({0: 5, 1: 6}).values()
    return torch.cat([*prefill, *(row.unsqueeze(0) for row in decode)])


def run_rank(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    group = join("gloo", Ranks(2, rank, f"file://{folder}/store", timeout_s=60))
    for family in FAMILIES:
        config = read_model_config(str(folder / family))
        device = torch.device("cpu")
        model = build_model(config, dtype=torch.float32, device=device, group=group)
        load_weights(model, str(folder / family), on_progress=lambda done, total: None, group=group)
        torch.save(logits_of(model), folder / f"{family}-{rank}")
    leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family, and the logits that two ranks gave."""
    folder = tmp_path_factory.mktemp("ranks")
    for family, overrides in FAMILIES.items():
        make_tiny(family, folder / family, **overrides)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(folder, rank)) for rank in (0, 1)]
    for child in ranks:
        child.start()
    for child in ranks:
        child.join(120)
    assert [child.exitcode for child in ranks] == [0, 0]
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_logits_of_one(family: str, folder: Path) -> None:
    expected = logits_of(load_decoder(folder / family))

    found = [torch.load(folder / f"{family}-{rank}") for rank in (0, 1)]

    assert expected.std() > 0.1
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_holds_the_parameters_that_the_estimate_gives_it(family: str, folder: Path) -> None:
    config, group = read_model_config(str(folder / family)), ProcessGroup(range(2), rank=1)

    shard = build_model(config, dtype=torch.float32, device=torch.device("meta"), group=group)

    count = count_parameters(config)
    assert sum(p.numel() for p in shard.parameters()) == count.sharded // 2 + count.whole

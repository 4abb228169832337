"""A decoder divided among ranks over gloo gives the logits of the whole one."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import PagedHarness, load_decoder, load_transformers_model
from releases import transformers_before
from tiny_models import make_tiny
from torch import Tensor

from config.errors import ConfigError
from config.model.read_config import read_model_config
from hpu.distributed.process_groups import ProcessGroup, Ranks, join, leave
from hpu.model_loader.size_estimate import count_parameters, kv_block_bytes
from hpu.models.base import CausalLM
from hpu.models.registry import build_model, build_transformers_model

META = torch.device("meta")
PROMPTS = {0: list(range(10, 31)), 1: [40, 41]}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "llama": (2, "llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (2, "qwen3", {"tie_word_embeddings": True}),
    "granite": (2, "granite", {}),
    "phi3": (2, "phi3", {}),
    "qwen2_moe": (2, "qwen2_moe", {"mlp_only_layers": [0]}),
    "glm4_moe": (2, "glm4_moe", {}),
    "granitemoeshared": (2, "granitemoeshared", {}),
    "ernie4_5_moe": (2, "ernie4_5_moe", {}),
    # Latents are on every rank.
    "deepseek_v2": (2, "deepseek_v2", {"attention_bias": True}),
    "deepseek_v3, no latent of queries": (4, "deepseek_v3", {"q_lora_rank": None}),
    # Queries and keys are normed over the heads of all ranks.
    "olmoe": (2, "olmoe", {}),
    # One KV head on two ranks, learned positions.
    "gpt_bigcode": (2, "gpt_bigcode", {"n_inner": 128}),
    # Queries, keys and values by head, and the head's own name.
    "gpt_neox": (2, "gpt_neox", {}),
    # A head with a bias.
    "phi": (2, "phi", {}),
    # The norm of each head is a tensor.
    "stablelm": (2, "stablelm", {"qk_layernorm": True}),
    "stablelm, two KV heads": (4, "stablelm", {"qk_layernorm": True}),
    # Norms in float32 of each head, a rope for each kind of layer.
    "gemma3": (
        2,
        "gemma3_text",
        {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    # ALiBi, one tensor for queries, keys and values.
    "mpt": (2, "mpt", {}),
    # Matrices of (in, out), one tensor for queries, keys and values.
    "gpt2": (2, "gpt2", {"n_inner": 128}),
    # Fewer KV heads than ranks.
    "olmoe, one KV head": (2, "olmoe", {"num_key_value_heads": 1}),
    "qwen3, one KV head": (2, "qwen3", {"num_key_value_heads": 1}),
    "phi3, one KV head": (2, "phi3", {"num_key_value_heads": 1}),
    "llama, two KV heads": (4, "llama", {"num_key_value_heads": 2, "attention_bias": True}),
    "qwen3, one KV head on four": (4, "qwen3", {"num_key_value_heads": 1}),
}
"""Number of ranks, family, and what differs from its tiny model of 4 heads on 2 KV heads."""
FOREIGN: dict[str, dict[str, Any]] = {}
if not transformers_before("5.18"):
    FOREIGN = {"gpt_neox": {}, "starcoder2": {"use_bias": True}, "ministral": {"head_dim": 16}}
"""Likewise, on two ranks in the code of transformers."""


def logits_of(model: CausalLM) -> Tensor:
    """(tokens, vocab) of a prefill and a decode."""
    harness = PagedHarness(model)
    with torch.inference_mode():
        prefill = harness.prefill(PROMPTS).values()
        decode = harness.decode({0: 5, 1: 6}).values()
    return torch.cat([*prefill, *(row.unsqueeze(0) for row in decode)])


def run_rank(folder: Path, size: int, rank: int) -> None:
    torch.set_num_threads(1)
    group = join("gloo", Ranks(size, rank, f"file://{folder}/store-{size}", timeout_s=60))
    for name, (num_ranks, _, _) in CASES.items():
        if num_ranks == size:
            torch.save(
                logits_of(load_decoder(folder / name, group=group)), folder / f"{name}-{rank}"
            )
    if size == 2:
        for name in FOREIGN:
            foreign = load_transformers_model(folder / name, group=group)
            torch.save(logits_of(foreign), folder / f"{name}-{rank}")
    leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each case, and the logits that its ranks gave."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, (_, family, overrides) in CASES.items():
        make_tiny(family, folder / name, **overrides)
    for name, fields in FOREIGN.items():
        make_tiny(name, folder / name, **fields)
    context = multiprocessing.get_context("spawn")
    for size in (2, 4):
        ranks = [
            context.Process(target=run_rank, args=(folder, size, rank)) for rank in range(size)
        ]
        for child in ranks:
            child.start()
        for child in ranks:
            child.join(120)
        assert [child.exitcode for child in ranks] == [0] * size
    return folder


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_give_the_logits_of_one(name: str, folder: Path) -> None:
    expected = logits_of(load_decoder(folder / name))

    found = [torch.load(folder / f"{name}-{rank}") for rank in range(CASES[name][0])]

    assert expected.std() > 0.1
    for logits in found:
        assert torch.equal(logits, found[0])
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FOREIGN)
def test_ranks_with_the_code_of_transformers_give_the_logits_of_one(
    name: str, folder: Path
) -> None:
    expected = logits_of(load_transformers_model(folder / name))

    found = [torch.load(folder / f"{name}-{rank}") for rank in range(2)]

    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_the_parameters_and_caches_that_the_estimate_gives_it(
    name: str, folder: Path
) -> None:
    config, size = read_model_config(str(folder / name)), CASES[name][0]
    group = ProcessGroup(range(size), rank=1)

    shard = build_model(config, dtype=torch.float32, device=torch.device("meta"), group=group)

    assert sum(p.numel() for p in shard.parameters()) == count_parameters(config, size)
    caches = [shape for shapes in shard.cache_shapes(1, 16) for shape in shapes]
    is_latent = shard.spec.mla is not None
    kv_heads = 1 if is_latent else max(1, config.num_kv_heads // size)
    assert {heads for _, heads, _ in caches} == {kv_heads}
    held = sum(torch.Size(shape).numel() for shape in caches) * 4
    assert held == kv_block_bytes(config, num_cards=size, width=4, block_size=16)


def test_a_model_that_the_ranks_cannot_divide_is_refused_with_both_numbers(folder: Path) -> None:
    config, group = read_model_config(str(folder / "llama")), ProcessGroup(range(3))

    with pytest.raises(ConfigError, match=r"has 2 KV heads, and .* on 3 cards"):
        build_model(config, dtype=torch.float32, device=torch.device("meta"), group=group)


@pytest.mark.skipif(transformers_before("5.18"), reason="needs the interfaces of 5.18")
@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("persimmon", {}, "has no plan for several cards"),
        ("olmo2", {}, "divides .*q_proj among cards as colwise_gather_output"),
        ("mixtral", {"num_local_experts": 4}, "has experts, which are not divided among cards"),
        ("starcoder2", {"num_key_value_heads": 1}, "2 .tensor-parallel-size. does not divide"),
    ],
)
def test_the_code_of_transformers_is_refused_on_cards_that_it_cannot_be_divided_among(
    family: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = read_model_config(str(make_tiny(family, tmp_path, **overrides)))

    with pytest.raises(ConfigError, match=reason):
        build_transformers_model(
            config, dtype=torch.float32, device=META, group=ProcessGroup(range(2))
        )

"""A model in a card's memory: the guide's example, and suggestions when it does not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import load_decoder
from tiny_models import make_tiny

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.model_config import ModelConfig
from config.model.multimodal.vision import VisionFacts
from config.model.read_config import read_model_config
from config.params.speculation import SpeculationConfig
from config.startup_checks import facts_at_load
from hpu.gaudi_devices import GIB
from hpu.runner.kv_cache import block_bytes
from hpu.worker.card_plan import CardDemand, changes, plan_card, with_companions

SMALL = ModelConfig(
    "8b", "LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, max_position=131072
)
LARGE = replace(
    SMALL, path="70b", hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
FLAGS = 2 * 128
"""Bytes per block of the flags for non-finite tokens."""


def demand(**changed: Any) -> CardDemand:
    given: dict[str, Any] = {
        "device": "gaudi2",
        "num_cards": 1,
        "width": 2,
        "kv_width": 2,
        "max_model_len": 8192,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "block_size": 128,
        "utilization": 0.9,
        "graph_reserved": 0.1,
    }
    return CardDemand(**{**given, **changed})


def test_the_example_of_the_guide_is_split_as_published() -> None:
    guide = demand(utilization=0.5, graph_reserved=0.4, max_model_len=2048)
    taken = plan_card(SMALL, guide)
    card_bytes = taken.weight_bytes + taken.activation_bytes + int(79.16 * GIB)

    plan = plan_card(SMALL, replace(guide, card_bytes=card_bytes))

    parts = [plan.free_bytes, plan.parts.usable, plan.parts.graphs, plan.parts.kv]
    assert [round(part / GIB, 2) for part in parts] == [79.16, 39.58, 15.83, 23.75]
    assert plan.block_bytes == (16 << 20) + FLAGS
    assert plan.fits
    # The guide's log prints the blocks of the memory that it rounds to 23.75 GiB, for keys and
    # values alone.
    kv_bytes = int(23.75 * GIB) + 1520 * FLAGS
    assert plan_card(SMALL, replace(guide, kv_bytes=kv_bytes)).num_blocks == 1519


def test_a_long_context_with_many_new_tokens_needs_no_full_mask() -> None:
    long = demand(max_model_len=131072, max_num_seqs=4, max_num_batched_tokens=8192)

    joined = plan_card(SMALL, long).activation_bytes
    sliced = plan_card(SMALL, replace(long, slices=(8192, 4096))).activation_bytes

    assert [round(item / GIB, 2) for item in (joined, sliced)] == [4.29, 1.54]
    assert joined - sliced > 8192 * 131072 * 2


def test_the_plan_leaves_about_the_free_memory_that_the_guide_logs() -> None:
    plan = plan_card(SMALL, demand(max_model_len=2048))

    assert round(plan.card_bytes / GIB, 2) == 94.62
    assert abs(plan.weight_bytes / GIB - 14.97) < 0.02
    assert abs(plan.free_bytes / GIB - 79.16) < 0.25


def test_each_card_holds_its_share_of_weights_and_blocks() -> None:
    alone, shared = plan_card(SMALL, demand()), plan_card(SMALL, demand(num_cards=8))

    assert 8 * (shared.block_bytes - FLAGS) == alone.block_bytes - FLAGS
    assert alone.weight_bytes / 8 < shared.weight_bytes < alone.weight_bytes / 7
    assert shared.num_blocks > 8 * alone.num_blocks


def test_flags_of_the_non_finite_guard_are_counted_for_a_model_and_its_draft_model(
    tmp_path: Path,
) -> None:
    folder = make_tiny("llama", tmp_path)
    model = load_decoder(folder)
    # Attention on a card zeroes non-finite numbers, which needs the flags.
    model.read_contiguously()
    block = block_bytes(model, 16, torch.float32)
    method = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    drafts = SpeculationConfig(speculative_config=json.dumps(method))
    facts = read_model_config(str(folder))
    alone = demand(width=4, kv_width=4, max_model_len=128, block_size=16)

    both = with_companions(alone, EngineConfig(str(folder), speculation=drafts), facts)

    assert plan_card(facts, alone).block_bytes == block
    assert plan_card(facts, both).block_bytes == 2 * block


def test_concurrent_sequences_are_counted_in_whole_blocks() -> None:
    plan = plan_card(SMALL, demand(num_blocks=100))

    assert [plan.sequences(tokens) for tokens in (128, 129, 8192)] == [100, 50, 1]


def test_weights_larger_than_a_card_suggest_more_cards() -> None:
    plan = plan_card(LARGE, demand())

    advice = changes(LARGE, plan)

    assert not plan.fits
    assert advice == [
        "--quantization fp8: 67.70 GiB of weights and 543 blocks on each card",
        "--tensor-parallel-size 2: 65.71 GiB of weights and 1177 blocks on each card",
    ]


def test_a_context_beyond_the_cache_suggests_a_shorter_context_or_more_memory() -> None:
    tight = demand(card_bytes=int(20.93 * GIB), max_model_len=32768, utilization=0.85)
    plan = plan_card(SMALL, tight)

    advice = changes(SMALL, plan)

    assert not plan.fits
    holds = plan.num_blocks * 128
    assert advice[0].startswith(f"--max-model-len {holds}: ")
    for flag, field in (
        ("--gpu-memory-utilization", "utilization"),
        ("--graph-reserved-mem", "graph_reserved"),
    ):
        (said,) = [line for line in advice if line.startswith(flag)]
        value = float(said.split()[1].rstrip(":"))
        assert plan_card(SMALL, replace(tight, **{field: value})).fits
    assert any(line.startswith("--tensor-parallel-size 2") for line in advice)
    assert plan_card(SMALL, replace(tight, max_model_len=holds)).fits


def test_a_plan_that_does_not_fit_suggests_a_larger_generation() -> None:
    plan = plan_card(LARGE, demand(num_cards=2, max_model_len=131072, utilization=0.75))

    advice = changes(LARGE, plan)

    assert not plan.fits
    assert any(line.startswith("--device gaudi3: ") for line in advice)


@pytest.mark.parametrize("max_model_len", [4096, 131072])
def test_a_plan_that_does_not_fit_suggests_weights_in_fp8(max_model_len: int) -> None:
    plan = plan_card(LARGE, demand(max_model_len=max_model_len))

    advice = changes(LARGE, plan)

    assert not plan.fits
    (line,) = [line for line in advice if line.startswith("--quantization fp8")]
    flags, _, told = line.partition(": ")
    length = int(flags.split()[3]) if "--max-model-len" in flags else max_model_len
    assert (length < max_model_len) == (max_model_len == 131072)
    fp8 = facts_at_load("fp8", LARGE)
    quantized = plan_card(fp8, replace(plan.demand, max_model_len=length))
    assert quantized.fits
    assert f"{quantized.num_blocks} blocks on each card" in told
    # Weights that are already quantized cannot be quantized while loading.
    assert not any("--quantization" in line for line in changes(fp8, plan_card(fp8, plan.demand)))


def test_a_given_number_of_blocks_must_fit_into_free_memory() -> None:
    plan = plan_card(SMALL, demand(num_blocks=6000))

    (first, *_) = changes(SMALL, plan)

    most = int(first.rpartition("which is ")[2].split()[0])
    assert not plan.fits
    assert first.startswith("lower --num-gpu-blocks-override: 6000 blocks take 93.77 GiB")
    assert plan_card(SMALL, demand(num_blocks=most)).fits
    assert not plan_card(SMALL, demand(num_blocks=most + 1)).fits


def test_no_setting_is_suggested_for_a_model_too_large_for_eight_cards() -> None:
    huge = replace(LARGE, num_layers=4000)

    assert changes(huge, plan_card(huge, demand())) == [
        "no setting makes it fit: use a smaller model"
    ]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 32 query heads, and 12 .* 1, 2, 4, 8, 16, 32$"):
        plan_card(SMALL, demand(num_cards=12))


def test_each_card_of_the_first_stage_holds_the_tower_and_embeddings_of_images() -> None:
    vision = VisionFacts("LlavaForConditionalGeneration", 7)
    seeing = replace(SMALL, vision=vision, num_tower_parameters=300_000_000)
    rows = max(2048, 8192)

    for cards in (1, 4):
        without, with_images = (
            plan_card(item, demand(num_cards=cards)) for item in (SMALL, seeing)
        )

        assert with_images.weight_bytes - without.weight_bytes == 2 * 300_000_000
        assert without.free_bytes - with_images.free_bytes == 2 * (300_000_000 + rows * 4096)
        assert with_images.num_blocks < without.num_blocks

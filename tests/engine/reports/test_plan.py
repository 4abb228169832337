"""The plan's two reports, and what contradicts itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.errors import ConfigError
from config.execution import WarmupConfig
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig
from engine.reports.plan import Target, as_json, as_text, make_plan

FACTS = ModelConfig(
    "8b", "LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, max_position=16384
)


def config(**changed: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "max_model_len": 4096,
        "scheduler": SchedulerConfig(max_num_seqs=8),
        "cache": CacheConfig(gpu_memory_utilization=0.5),
        "warmup": WarmupConfig(graph_memory_fraction=0.4),
    }
    return EngineConfig("8b", **{**given, **changed})


def test_both_reports_say_the_same() -> None:
    plan = make_plan(FACTS, config(), Target(device="gaudi2", lengths=(2000, 4096)))

    text, told = as_text(plan), as_json(plan)

    assert told["parameters"] == 8_030_261_248
    assert "8.03 billion parameters, bfloat16" in text
    assert f"{told['num_blocks']} blocks of 128 tokens, 16.00 MiB each" in text
    assert told["sequences"] == {
        "2000": told["num_blocks"] // 16,
        "4096": told["num_blocks"] // 32,
    }
    assert "--max-num-seqs allows 8" in text
    buckets = told["buckets"]
    assert f"{buckets['prompts']} for prompts, {buckets['decodes']} for decodes" in text
    assert 0 < buckets["graphs"] <= buckets["prompts"] + buckets["decodes"]
    assert f"{buckets['graphs']} graphs, about {buckets['graphs'] / 20:.1f} minutes" in text
    assert (told["fits"], told["changes"]) == (True, [])
    assert "\nIt fits." in text


def test_parts_of_the_memory_make_up_the_card() -> None:
    told = as_json(make_plan(FACTS, config(), Target(device="gaudi3")))

    taken = ("weight", "activation", "graph", "kv", "margin")
    assert abs(sum(told[f"{part}_bytes"] for part in taken) - told["memory_bytes"]) <= 4


def test_windows_are_planned_like_states_where_prefix_caching_is_off() -> None:
    # Every second layer of 32 sees 1024 tokens.
    layers = ("sliding_attention", "full_attention") * 16
    facts = replace(FACTS, sliding_window=1024, layer_types=layers)
    off = CacheConfig(gpu_memory_utilization=0.5, enable_prefix_caching=False)
    target = Target(device="gaudi3")

    cached = as_json(make_plan(facts, config(), target))
    plan = make_plan(facts, config(cache=off), target)
    told = as_json(plan)

    # Keys and values of 8 heads of 128 in bfloat16, 9 blocks of 128 tokens for 8 requests, the
    # index of a warm-up and padding.
    windows = 16 * 2 * 8 * 128 * 2 * 9 * 128 * 10
    assert (cached["window_bytes"], told["window_bytes"]) == (0, windows)
    assert cached["block_bytes"] == 2 * told["block_bytes"]
    assert told["free_bytes"] == cached["free_bytes"] - windows
    assert told["num_blocks"] > 1.9 * cached["num_blocks"]
    assert f"{'windows':<16}{windows / 2**30:>8.2f}  of 8 sequences" in as_text(plan)
    # So many requests at once would leave less room than blocks of all layers do.
    many = config(cache=off, scheduler=SchedulerConfig(max_num_seqs=2000))
    assert as_json(make_plan(facts, many, target))["window_bytes"] == 0


def test_a_plan_that_does_not_fit_says_why_and_what_would() -> None:
    plan = make_plan(FACTS, config(), Target(device="gaudi2", card_bytes=10 << 30))

    text, told = as_text(plan), as_json(plan)

    assert "It does not fit: weights and activations take 15.30 GiB, a card has 10.00" in text
    assert "  --tensor-parallel-size 2: 7.48 GiB of weights" in text
    assert (told["fits"], told["buckets"]) == (False, None)
    assert told["changes"]


def test_without_graphs_none_are_reserved_for() -> None:
    plan = make_plan(FACTS, config(enforce_eager=True), Target(device="gaudi2"))

    assert as_json(plan)["graph_bytes"] == 0
    assert "no graphs are captured" in as_text(plan)


def test_a_reserve_too_small_for_all_graphs_is_noted() -> None:
    small = config(warmup=WarmupConfig(graph_memory_fraction=0.001))

    (note,) = make_plan(FACTS, small, Target(device="gaudi2")).notes

    assert "will not all fit into 0.04 GiB" in note
    assert "--graph-reserved-mem 0." in note


def test_what_is_only_planned_is_called_so() -> None:
    plan = make_plan(FACTS, config(), Target(device="gaudi3", num_cards=8, kv_dtype="fp8_inc"))

    text = as_text(plan)

    assert "Gaudi 3, 8 cards" in text
    assert "serving it comes with a later version" in text
    assert "serving with it comes with a later version" in text
    assert as_json(plan)["block_bytes"] == 1 << 20


def test_quantized_weights_are_counted_as_if_they_were_not() -> None:
    raw = {"quantization_config": {"quant_method": "fp8"}}
    quantized = replace(FACTS, fields=Fields(raw, Path("config.json")))

    plan, plain = (
        make_plan(facts, config(), Target(device="gaudi3")) for facts in (quantized, FACTS)
    )

    assert "are quantized, which is not served yet: they are counted in bfloat16" in as_text(plan)
    assert as_json(plan)["weight_bytes"] == as_json(plain)["weight_bytes"]


def test_told_blocks_are_the_plans() -> None:
    told = config(cache=CacheConfig(num_blocks=1000, block_size=64))

    plan = as_json(make_plan(FACTS, told, Target(device="gaudi2")))

    assert (plan["num_blocks"], plan["block_bytes"]) == (1000, 8 << 20)


@pytest.mark.parametrize(
    ("changed", "target", "words"),
    [
        ({"max_model_len": 20000}, {}, "max-model-len is 20000.*made for 16384"),
        ({}, {"lengths": (5000,)}, "a length is 5000.*max-model-len, 4096"),
        ({}, {"num_cards": 3}, "32 query heads, and 3"),
        ({}, {"num_cards": 0}, "tensor-parallel-size is 0"),
        ({}, {"device": "gaudi1"}, "'gaudi1' is not one of gaudi2, gaudi3"),
    ],
)
def test_contradictions_are_refused(
    changed: dict[str, Any], target: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(FACTS, config(**changed), Target(**{"device": "gaudi2", **target}))


def test_a_model_that_cannot_be_built_is_not_planned() -> None:
    with pytest.raises(ConfigError, match="supported are"):
        make_plan(
            replace(FACTS, architecture="MambaForCausalLM"), config(), Target(device="gaudi2")
        )

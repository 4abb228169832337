"""The plan's two reports, and refusals of contradictory settings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.buckets import BucketConfig
from config.data_parallel import DataParallelConfig
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.errors import ConfigError
from config.execution import ExecutionConfig, WarmupConfig
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from config.parallel import ParallelConfig, Stage
from config.params.lora import LoRAConfig
from config.params.offload import OffloadConfig
from config.params.speculation import SpeculationConfig
from engine.reports.plan import Plan, Target, as_json, as_text, make_plan
from hpu.model_loader.size_estimate import layer_bytes
from hpu.spec_decode.drafter_sizes import NO_DRAFTER
from hpu.worker.card_plan import _plan_stage, plan_card

FLAGS = 2 * 128
"""Bytes per block of the flags for non-finite tokens, in the model and in a draft model."""

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


def on_cards(
    num_cards: int, num_stages: int = 1, *, load_format: str = "auto", **changed: Any
) -> EngineConfig:
    parallel = ParallelConfig(
        tensor_parallel_size=num_cards, pipeline_parallel_size=num_stages, **changed
    )
    return config(parallel=parallel, load_format=load_format)


def test_the_text_and_the_json_of_a_plan_agree() -> None:
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


def test_memory_parts_of_a_plan_add_up_to_the_memory_of_the_card() -> None:
    told = as_json(make_plan(FACTS, config(), Target(device="gaudi3")))

    taken = ("weight", "activation", "graph", "kv", "margin")
    assert abs(sum(told[f"{part}_bytes"] for part in taken) - told["memory_bytes"]) <= 4


def test_windows_are_planned_per_request_without_prefix_caching() -> None:
    # 16 of the 32 layers have a window of 1024 tokens.
    layers = ("sliding_attention", "full_attention") * 16
    facts = replace(FACTS, sliding_window=1024, layer_types=layers)
    off = CacheConfig(gpu_memory_utilization=0.5, enable_prefix_caching=False)
    target = Target(device="gaudi3")

    cached = as_json(make_plan(facts, config(), target))
    plan = make_plan(facts, config(cache=off), target)
    told = as_json(plan)

    # Keys and values of 8 heads of 128 in bfloat16, 9 blocks of 128 tokens for each of 10 request
    # indices: 8 requests, warm-up and padding.
    windows = 16 * 2 * 8 * 128 * 2 * 9 * 128 * 10
    assert (cached["window_bytes"], told["window_bytes"]) == (0, windows)
    assert cached["block_bytes"] - FLAGS == 2 * (told["block_bytes"] - FLAGS)
    assert told["free_bytes"] == cached["free_bytes"] - windows
    assert told["num_blocks"] > 1.9 * cached["num_blocks"]
    assert f"{'windows':<16}{windows / 2**30:>8.2f}  of 8 sequences" in as_text(plan)
    # With window caches for 2,000 requests, less memory would remain than with full blocks in all
    # layers.
    many = config(
        cache=off,
        scheduler=SchedulerConfig(max_num_seqs=2000),
        buckets=BucketConfig(strategy="exponential-v3"),
    )
    assert as_json(make_plan(facts, many, target))["window_bytes"] == 0


def test_a_plan_that_does_not_fit_suggests_working_settings() -> None:
    plan = make_plan(FACTS, config(), Target(device="gaudi2", card_bytes=10 << 30))

    text, told = as_text(plan), as_json(plan)

    assert "It does not fit: weights and activations take 15.30 GiB, a card has 10.00" in text
    assert "  --tensor-parallel-size 2: 7.48 GiB of weights" in text
    assert (told["fits"], told["buckets"]) == (False, None)
    assert told["changes"]


def test_eager_mode_reserves_no_memory_for_graphs() -> None:
    plan = make_plan(FACTS, config(enforce_eager=True), Target(device="gaudi2"))

    assert as_json(plan)["graph_bytes"] == 0
    assert "no graphs are captured" in as_text(plan)


def test_a_reserve_that_may_be_too_small_for_all_graphs_is_noted() -> None:
    tight = config(warmup=WarmupConfig(graph_memory_fraction=0.02))

    plan = make_plan(FACTS, tight, Target(device="gaudi2"))

    (note,) = plan.notes
    least, most = plan.graph_bytes
    assert least <= plan.card.parts.graphs < most
    assert f"{plan.num_graphs} graphs may not all fit into 0.79 GiB" in note
    assert "--graph-reserved-mem 0." in note
    assert plan.fits and "\nIt fits." in as_text(plan)


def test_a_reserve_too_small_for_the_smallest_graphs_does_not_fit() -> None:
    small = config(warmup=WarmupConfig(graph_memory_fraction=0.001))

    plan = make_plan(FACTS, small, Target(device="gaudi2"))

    text, told = as_text(plan), as_json(plan)
    least = plan.graph_bytes[0] / 2**30
    assert f"graphs take {least:.2f} GiB at least, 0.04 GiB are reserved for graphs" in text
    assert "  --graph-reserved-mem 0." in text
    assert not plan.fits and told["fits"] is False and len(told["changes"]) == 2
    assert told["buckets"]["least_bytes"] == plan.graph_bytes[0]


def test_a_startup_probe_allows_twice_the_reading_of_weights_and_the_warm_up() -> None:
    plan = make_plan(FACTS, config(), Target(device="gaudi2", seconds_per_graph=6.0))

    seconds = 600 + 2 * (plan.card.weight_bytes / 500e6 + plan.num_graphs * 6.0)
    assert plan.startup_seconds == pytest.approx(seconds)
    assert f"startup probe: failureThreshold {-(-seconds // 10):.0f}, periodSeconds 10" in (
        as_text(plan)
    )
    assert as_json(plan)["startup_seconds"] == -(-seconds // 1)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "block_bytes"),
    [("auto", 2 << 20), ("float16", 2 << 20), ("fp8", 1 << 20), ("fp8_inc", 1 << 20)],
)
def test_block_bytes_follow_the_kv_cache_dtype(kv_cache_dtype: str, block_bytes: int) -> None:
    cached = replace(on_cards(8), cache=CacheConfig(kv_cache_dtype=kv_cache_dtype))

    plan = make_plan(FACTS, cached, Target(device="gaudi3"))

    assert "Gaudi 3, 8 cards" in as_text(plan)
    assert as_json(plan)["block_bytes"] == block_bytes + FLAGS


def test_a_data_type_that_gaudi_does_not_cache_in_is_refused() -> None:
    cached = replace(on_cards(1), cache=CacheConfig(kv_cache_dtype="int8"))

    with pytest.raises(ConfigError, match="--kv-cache-dtype is int8 and the cards are gaudi2"):
        make_plan(FACTS, cached, Target(device="gaudi2"))


def test_weights_in_an_unsupported_quantization_format_are_counted_in_bfloat16() -> None:
    raw = {"quantization_config": {"quant_method": "fp8"}}
    quantized = replace(FACTS, fields=Fields(raw, Path("config.json")))

    plan, plain = (
        make_plan(facts, config(), Target(device="gaudi3")) for facts in (quantized, FACTS)
    )

    assert (
        "are quantized in a format that is not supported: they are counted in bfloat16"
        in as_text(plan)
    )
    assert as_json(plan)["weight_bytes"] == as_json(plain)["weight_bytes"]


def test_mxfp4_experts_are_counted_at_their_stored_size(tmp_path: Path) -> None:
    raw = {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64},
        **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_local_experts": 8},
        **{"num_experts_per_tok": 2, "max_position_embeddings": 4096, "sliding_window": 128},
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    facts = read_model_config(str(tmp_path))

    wide, packed = (
        make_plan(
            facts, config(execution=ExecutionConfig(native_mxfp4=native)), Target(device="gaudi3")
        )
        for native in (False, True)
    )

    numbers = 2 * 8 * 3 * 64 * 128
    saved = as_json(wide)["weight_bytes"] - as_json(packed)["weight_bytes"]
    assert saved == numbers * 2 - numbers * 17 // 32
    assert "--native-mxfp4 keeps them in 4 bits" in as_text(wide)
    assert "packed experts" not in as_text(packed)


def test_a_given_number_of_blocks_is_used_by_the_plan() -> None:
    told = config(cache=CacheConfig(num_blocks=1000, block_size=64))

    plan = as_json(make_plan(FACTS, told, Target(device="gaudi2")))

    assert (plan["num_blocks"], plan["block_bytes"]) == (1000, (8 << 20) + 64 * 2)


@pytest.mark.parametrize(
    ("changed", "target", "words"),
    [
        ({"max_model_len": 20000}, {}, "max-model-len is 20000.*made for 16384"),
        ({}, {"lengths": (5000,)}, "a length is 5000.*max-model-len, 4096"),
        ({"parallel": ParallelConfig(tensor_parallel_size=3)}, {}, "32 query heads, and 3"),
        (
            {"parallel": ParallelConfig(pipeline_parallel_size=33)},
            {},
            "32 layers and --pipeline-parallel-size is 33",
        ),
        ({}, {"device": "gaudi1"}, "'gaudi1' is not one of gaudi2, gaudi3"),
    ],
)
def test_contradictions_are_refused(
    changed: dict[str, Any], target: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(FACTS, config(**changed), Target(**{"device": "gaudi2", **target}))


def test_a_model_that_cannot_be_built_is_not_planned() -> None:
    with pytest.raises(ConfigError, match="MambaForCausalLM, which is not supported"):
        make_plan(
            replace(FACTS, architecture="MambaForCausalLM"), config(), Target(device="gaudi2")
        )


LLAMA_70B = ModelConfig(
    "70b", "LlamaForCausalLM", 128256, 8192, 28672, 80, 64, 8, 128, max_position=131072
)
DEEPSEEK_R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
"""Fields of the published config.json."""


def test_a_model_of_70_billion_parameters_fits_eight_cards() -> None:
    single, eight = (
        as_json(make_plan(LLAMA_70B, on_cards(count), Target(device="gaudi2"))) for count in (1, 8)
    )

    assert single["parameters"] == eight["parameters"] == 70_553_706_496
    assert (single["fits"], eight["fits"]) == (False, True)
    # Norms and the rotary table are replicated on every card.
    assert 0.999 < eight["weight_bytes"] * 8 / single["weight_bytes"] < 1.01
    assert (eight["block_bytes"] - FLAGS) * 8 == single["block_bytes"] - FLAGS
    assert eight["notes"] == [note for note in eight["notes"] if "later version" not in note]


@pytest.mark.slow
def test_expert_parallel_plans_place_whole_experts_on_each_card(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1))
    facts = read_model_config(str(tmp_path))
    target = Target(device="gaudi3")

    whole, parts, two_machines = (
        make_plan(facts, on_cards(8, stages, enable_expert_parallel=whole), target)
        for stages, whole in ((1, True), (1, False), (2, True))
    )

    told = as_json(whole)
    assert round(told["parameters"] / 1e9) == 671 and round(told["active_parameters"] / 1e9) == 37
    assert told["enable_expert_parallel"] and "8 cards, whole experts on each" in as_text(whole)
    # 32 of 256 whole experts have as many weights as an eighth of each expert.
    assert told["weight_bytes"] == as_json(parts)["weight_bytes"]
    assert told["weight_bytes"] > 671e9 * 2 / 8
    # Latents of 576 numbers in 61 layers, replicated on each card.
    assert told["block_bytes"] == 61 * 576 * 2 * 128 + FLAGS
    # 1.3 TB of bfloat16 weights exceed the memory of eight cards of 128 GB.
    assert not told["fits"]
    assert any(
        line.startswith("--tensor-parallel-size 8 --pipeline-parallel-size 2, on 2 machines: ")
        for line in told["changes"]
    )
    told = as_json(two_machines)
    assert told["fits"] and (told["pipeline_parallel_size"], told["stage"]) == (2, 1)
    assert told["block_bytes"] == 31 * 576 * 2 * 128 + FLAGS
    assert "16 cards in 2 stages, whole experts on each" in as_text(two_machines)
    assert "stage 2 of 2" in as_text(two_machines)
    with pytest.raises(ConfigError, match="has no experts to distribute"):
        make_plan(FACTS, on_cards(2, enable_expert_parallel=True), target)


def test_experts_are_planned_over_the_cards_of_all_engines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1))
    facts = read_model_config(str(tmp_path))

    def plan(num_engines: int, *, whole: bool = True) -> Plan:
        settings = replace(
            on_cards(8, enable_expert_parallel=whole),
            data_parallel=DataParallelConfig(data_parallel_size=num_engines),
        )
        return make_plan(facts, settings, Target(device="gaudi3"))

    single, two = as_json(plan(1)), as_json(plan(2))

    # 16 of 256 experts instead of 32, in 58 layers; no other weights are divided further.
    expert = 3 * DEEPSEEK_R1["hidden_size"] * DEEPSEEK_R1["moe_intermediate_size"]
    assert single["weight_bytes"] - two["weight_bytes"] == 16 * 58 * expert * 2
    assert single["block_bytes"] == two["block_bytes"]
    assert not single["fits"] and two["fits"]
    assert two["num_coupled_engines"] == 2
    assert "16 cards of 2 engines, whole experts on each" in as_text(plan(2))
    # Engines without expert parallelism each hold all experts.
    apart = as_json(plan(2, whole=False))
    assert (apart["weight_bytes"], apart["fits"]) == (single["weight_bytes"], False)
    with pytest.raises(ConfigError, match=r"256 experts, and 24 \(--data-parallel-size 3 x --tens"):
        plan(3)


def test_a_draft_model_takes_weights_and_a_part_of_each_block(tmp_path: Path) -> None:
    drafts = SpeculationConfig(speculative_config=write_small_drafter(tmp_path))
    target = Target(device="gaudi2")
    dummy = {"load_format": "dummy"}

    plain = as_json(make_plan(FACTS, config(**dummy), target))
    plan = make_plan(FACTS, config(**dummy, speculation=drafts), target)

    told = as_json(plan)
    drafter = told["drafter_weight_bytes"]
    # Embedding and head, plus two layers.
    assert 2 * FACTS.vocab_size * 512 * 2 < drafter < 1.1 * 2 * FACTS.vocab_size * 512 * 2
    assert told["weight_bytes"] - plain["weight_bytes"] == drafter
    # Keys and values of 128 tokens in two layers with four heads of 64 numbers.
    assert told["block_bytes"] - plain["block_bytes"] == 2 * 2 * 4 * 64 * 2 * 128 + FLAGS
    assert told["num_blocks"] < plain["num_blocks"]
    assert f"{drafter / 2**30:.2f} of them for the drafter" in as_text(plan)


def write_small_drafter(folder: Path) -> str:
    small = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": FACTS.vocab_size,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps(small))
    method = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    return json.dumps(method)


def test_logits_of_drafts_are_counted() -> None:
    method = {"method": "ngram", "num_speculative_tokens": 5}
    drafts = SpeculationConfig(speculative_config=json.dumps(method))
    target = Target(device="gaudi2")

    plain = as_json(make_plan(FACTS, config(), target))
    told = as_json(make_plan(FACTS, config(speculation=drafts), target))

    # Logits of 5 further tokens per sequence, in float32, four copies.
    added = 5 * plain["max_num_seqs"] * FACTS.vocab_size * 4 * 4
    assert told["activation_bytes"] - plain["activation_bytes"] == added


def test_the_last_of_two_stages_holds_the_drafter(tmp_path: Path) -> None:
    drafts = SpeculationConfig(speculative_config=write_small_drafter(tmp_path))
    stages = on_cards(1, 2, load_format="dummy")
    target = Target(device="gaudi2")

    plain = make_plan(FACTS, stages, target).card
    card = make_plan(FACTS, replace(stages, speculation=drafts), target).card

    # Keys and values of 128 tokens in two layers with four heads of 64 numbers.
    assert card.stage.is_last
    assert card.drafter.block_bytes == 2 * 2 * 4 * 64 * 2 * 128 + FLAGS
    assert card.block_bytes == plain.block_bytes + card.drafter.block_bytes
    first = _plan_stage(FACTS, card.demand, Stage(0, 2))
    assert first.drafter == NO_DRAFTER
    assert first.block_bytes == plain.block_bytes - FLAGS


def test_suggested_changes_count_the_drafter_on_its_cards(tmp_path: Path) -> None:
    drafts = SpeculationConfig(speculative_config=write_small_drafter(tmp_path))
    settings = config(speculation=drafts, load_format="dummy")
    demand = make_plan(FACTS, settings, Target(device="gaudi2")).card.demand

    single, two = (plan_card(FACTS, replace(demand, num_cards=n)).drafter for n in (1, 2))

    assert two.block_bytes - FLAGS == (single.block_bytes - FLAGS) // 2
    assert two.weight_bytes < 0.6 * single.weight_bytes


def test_slots_of_adapters_are_counted() -> None:
    lora = LoRAConfig(enable_lora=True, max_loras=16, max_lora_rank=64)
    target = Target(device="gaudi2")

    plain = as_json(make_plan(FACTS, config(), target))
    plan = make_plan(FACTS, config(lora=lora), target)

    told = as_json(plan)
    assert told["adapter_bytes"] > 2**30
    assert told["free_bytes"] == plain["free_bytes"] - told["adapter_bytes"]
    assert told["num_blocks"] < plain["num_blocks"]
    assert f"adapters        {told['adapter_bytes'] / 2**30:>8.2f}  of all slots" in as_text(plan)


def test_the_plan_names_what_host_memory_and_files_hold() -> None:
    sizes = OffloadConfig(
        swap_space=1, kv_offloading_size=8, kv_offloading_dir="kv", kv_offloading_dir_size=64
    )
    target = Target(device="gaudi2")

    plain = as_json(make_plan(FACTS, config(), target))
    plan = make_plan(FACTS, config(offload=sizes), target)
    half = as_json(make_plan(FACTS, replace(on_cards(2), offload=sizes), target))["offload"]

    # 16 MiB per block plus flags: 9 GiB of host memory; each file also has a header.
    told = as_json(plan)
    offload = told["offload"]
    assert (offload["host_blocks"], offload["host_tokens"]) == (575, 575 * 128)
    assert (offload["file_blocks"], offload["file_tokens"]) == (4095, 4095 * 128)
    assert "host memory         8.98  575 blocks, 73600 tokens" in as_text(plan)
    assert "files              63.99  4095 blocks, 524160 tokens" in as_text(plan)
    # Staging buffers for loads of 1, 4 and 16 blocks, and two for stores of 16 blocks.
    assert offload["staging_bytes"] == 53 * told["block_bytes"]
    assert told["free_bytes"] == plain["free_bytes"] - offload["staging_bytes"]
    # Each of two cards keeps half of a block and has its own --swap-space.
    assert (half["host_blocks"], half["file_blocks"]) == (639, 4095)
    assert plain["offload"] is None and "host memory" not in as_text(
        make_plan(FACTS, config(), target)
    )


def test_host_memory_that_holds_too_few_blocks_is_noted() -> None:
    small = config(offload=OffloadConfig(swap_space=0.02))

    plan = make_plan(FACTS, small, Target(device="gaudi2"))

    assert "have room for 1 KV blocks of 16777472 bytes, too few for a server" in plan.notes[0]
    assert "preempted requests" in as_text(plan) and "evicted" not in as_text(plan)


def test_weights_in_host_memory_leave_room_for_blocks() -> None:
    target = Target(device="gaudi2")
    plain = as_json(make_plan(FACTS, config(), target))

    plan = make_plan(FACTS, config(offload=OffloadConfig(cpu_offload_gb=5)), target)

    told = as_json(plan)
    layer = sum(layer_bytes(FACTS, num_cards=1, width=2)) // FACTS.num_layers
    # 5 GiB hold 12.3 layers of 416 MiB; two of these layers are on the card at a time.
    assert told["host_weight_bytes"] == 12 * layer
    assert plain["weight_bytes"] - told["weight_bytes"] == 10 * layer
    assert told["free_bytes"] - plain["free_bytes"] == 10 * layer
    assert told["num_blocks"] > plain["num_blocks"] and plain["host_weight_bytes"] == 0
    assert f"two layers at a time, {12 * layer / 2**30:.2f} GiB in host memory" in as_text(plan)


def test_weights_quantized_at_load_are_counted_at_their_quantized_size() -> None:
    layers = 32 * (2 * 4096 + 2 * 1024 + 3 * 14336) * 4096
    outputs = 32 * (3 * 4096 + 2 * 1024 + 2 * 14336)

    plain, narrow = (
        make_plan(FACTS, config(quantization=name), Target(device="gaudi3")).card.weight_bytes
        for name in (None, "fp8")
    )

    # One byte instead of two per weight, and a float32 scale per output.
    assert plain - narrow == layers - 4 * outputs
    assert narrow < 0.6 * plain


def test_the_head_of_a_plan_has_the_formats_of_weights_and_kv_cache() -> None:
    heads = [
        as_text(make_plan(FACTS, settings, Target(device="gaudi3"))).partition("\n")[0]
        for settings in (
            config(quantization="fp8"),
            config(cache=CacheConfig(kv_cache_dtype="fp8")),
        )
    ]

    assert heads[0].endswith("weights fp8, KV cache bfloat16, activations bfloat16")
    assert heads[1].endswith("weights bfloat16, KV cache fp8, activations bfloat16")


def test_a_plan_refuses_load_time_quantization_that_gaudi_lacks() -> None:
    target = Target(device="gaudi3")

    with pytest.raises(ConfigError, match=r"bitsandbytes .* gaudi3: .* on cpu only; use fp8"):
        make_plan(FACTS, config(quantization="bitsandbytes"), target)
    with pytest.raises(
        ConfigError, match=r"quantization is gptq, and .* loading \(--quantization fp8\)$"
    ):
        make_plan(FACTS, config(quantization="gptq"), target)

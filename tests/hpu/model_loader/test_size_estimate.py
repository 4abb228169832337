"""Sizes computed from a config, compared with real decoders and the guide's numbers."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import load_decoder
from tiny_models import COMMON, FAMILIES, make_tiny

from config.errors import ConfigError
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from config.model.split import check_split
from config.parallel import Stage
from hpu.model_loader.size_estimate import (
    context_bytes,
    count_active_parameters,
    count_parameters,
    kv_block_bytes,
    kv_cache_sizes,
    weight_bytes,
)
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model
from hpu.runner.kv_cache import block_bytes, cache_sizes
from hpu.worker.card_plan import CardDemand, plan_card

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def tiny(folder: Path, family: str, **overrides: Any) -> ModelConfig:
    """Model config of a tiny model of `family`, without weights."""
    fields = {**COMMON, **FAMILIES[family], "architectures": [ARCHITECTURES[family]], **overrides}
    (folder / "config.json").write_text(json.dumps(fields))
    return read_model_config(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}],
    ids=["plain", "tied with biases"],
)
def test_the_parameters_equal_the_real_decoder(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    facts = tiny(tmp_path, family, **overrides)

    model = build_model(facts, ModelBuild(dtype=torch.float32, device=torch.device("cpu")))

    assert count_parameters(facts) == sum(p.numel() for p in model.parameters())
    held = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    assert weight_bytes(facts, num_cards=1, width=4, length=512) == held * 4
    assert kv_block_bytes(facts, num_cards=1, width=4, block_size=16) == block_bytes(
        model, 16, torch.float32
    )


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("deepseek_v3", {}),
        ("phimoe", {}),
    ],
)
def test_the_parameters_of_a_stage_equal_its_decoder(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    facts = tiny(tmp_path, family, num_hidden_layers=3, **overrides)

    for rank in range(2):
        stage = Stage(rank, 2)
        model = build_model(
            facts, ModelBuild(dtype=torch.float32, device=torch.device("cpu"), stage=stage)
        )

        assert count_parameters(facts, stage=stage) == sum(p.numel() for p in model.parameters())
        assert kv_block_bytes(
            facts, num_cards=1, width=4, block_size=16, stage=stage
        ) == block_bytes(model, 16, torch.float32)


def test_configs_that_differ_in_a_field_of_their_family_have_their_own_sizes(
    tmp_path: Path,
) -> None:
    """The list of tensors is cached by the config."""
    found = []
    for rank in (16, 24):
        facts = tiny(tmp_path, "deepseek_v3", q_lora_rank=rank)
        model = build_model(facts, ModelBuild(dtype=torch.float32, device=torch.device("cpu")))
        assert count_parameters(facts) == sum(p.numel() for p in model.parameters())
        found.append(facts)

    assert found[0] != found[1]
    assert all(field.compare for field in fields(ModelConfig))


def test_the_parameters_of_a_tied_checkpoint_equal_its_decoder(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path, tie_word_embeddings=True)

    facts = read_model_config(str(folder))

    model = build_model(facts, ModelBuild(dtype=torch.float32, device=torch.device("cpu")))
    assert count_parameters(facts) == sum(p.numel() for p in model.parameters())


def test_an_8b_model_has_the_published_sizes() -> None:
    facts = ModelConfig(
        "8b", "LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, max_position=131072
    )

    parameters = count_parameters(facts)

    assert parameters == 8_030_261_248
    assert kv_block_bytes(facts, num_cards=1, width=2, block_size=128) == 16 << 20
    assert kv_block_bytes(facts, num_cards=8, width=2, block_size=128) == 2 << 20
    # Each of the 8 KV heads is on two cards.
    assert kv_block_bytes(facts, num_cards=16, width=2, block_size=128) == 2 << 20


MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForCausalLM"],
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 10485760,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
}
PHI_35_MOE = {
    "architectures": ["PhimoeForCausalLM"],
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("fields", "billions"),
    [
        (MIXTRAL_8X7B, 46.7),
        (QWEN3_30B_A3B, 30.5),
        (GPT_OSS_20B, 20.9),
        # Without the vision tower.
        (LLAMA_4_SCOUT, 107.8),
        (PHI_35_MOE, 41.9),
    ],
    ids=["8x7B", "30B-A3B", "gpt-oss", "llama4", "phimoe"],
)
def test_mixtures_of_experts_have_the_published_sizes(
    fields: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))

    parameters = count_parameters(read_model_config(str(tmp_path)))

    assert round(parameters / 1e9, 1) == billions


DEEPSEEK_R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def test_deepseek_r1_has_the_published_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1))
    facts = read_model_config(str(tmp_path), allow_quantized=True)

    assert round(count_parameters(facts) / 1e9) == 671
    assert round(count_active_parameters(facts) / 1e9) == 37
    for num_cards in (1, 8):
        # Latents of 512 + 64 numbers in two bytes, in the 61 layers of each card.
        block = kv_block_bytes(facts, num_cards=num_cards, width=2, block_size=128)
        assert block == 128 * 576 * 2 * 61
    # A decode multiplies by copies of each head's matrices from the latent to its key and value.
    plain = replace(facts, quantization=None)
    held = weight_bytes(plain, num_cards=8, width=2, length=1) // 2 - 2 * 64
    assert held - count_parameters(facts, 8) == 61 * 128 // 8 * 512 * (128 + 128)


def test_deepseek_r1_in_fp8_fits_eight_gaudi_3_and_not_four(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1))
    facts = read_model_config(str(tmp_path))
    demand = CardDemand(
        device="gaudi3",
        num_cards=8,
        width=2,
        kv_width=2,
        max_model_len=32768,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        block_size=128,
        utilization=0.9,
        graph_reserved=0.1,
        slices=(8192, 4096),
    )

    for distributes_experts in (False, True):
        eight = plan_card(facts, replace(demand, distributes_experts=distributes_experts))

        # 671 billion weights; embedding, head, latents and routers are in bfloat16.
        assert 671e9 / 8 < eight.weight_bytes < 92e9
        assert eight.fits and eight.sequences(4096) > 64
    assert not plan_card(facts, replace(demand, num_cards=4)).fits


def test_mla_prompts_are_estimated_with_the_keys_and_values_of_all_heads(tmp_path: Path) -> None:
    facts = tiny(tmp_path, "deepseek_v2")
    short = {**LONG, "num_tokens": 2048, "max_model_len": 8000}

    taken = context_bytes(facts, **short, slices=None)

    # Keys of two heads with 24 entries; values are padded to the same size.
    assert taken == 2048 * 2048 * 4 + 2048 * 8000 * 2 + 2 * 8000 * (2 * 2 * 24 * 2)


HEADS_12_3 = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16}


def test_experts_are_divided_but_not_the_router(tmp_path: Path) -> None:
    facts = tiny(tmp_path, "qwen3_moe")
    router = 2 * 4 * 64
    experts = 2 * 4 * 3 * 48 * 64

    whole, half = count_parameters(facts), count_parameters(facts, 2)

    norms = 5 * 64 + 2 * 6 * 16
    assert whole > experts + router + norms
    # Each head has a row in the norms.
    assert half == (whole - router - 5 * 64) // 2 + router + 5 * 64


NINE_HEADS = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "intermediate_size": 144,
}


@pytest.mark.parametrize(
    ("family", "num_cards", "overrides", "words"),
    [
        (
            "llama",
            8,
            {},
            r"has 4 query heads, and 8 .* does not divide them: it works with 1, 2, 4",
        ),
        ("llama", 2, NINE_HEADS, "has 9 query heads, and 2 .* works with 1, 3, 9"),
        (
            "llama",
            4,
            HEADS_12_3,
            "has 3 KV heads, and 4 .* does not divide them, nor is it a multiple of them: "
            "it works with 1$",
        ),
        ("llama", 2, {"intermediate_size": 129}, "has 129 inner features, and 2"),
        ("mixtral", 2, {"intermediate_size": 129}, "has 129 inner features in an expert, and 2"),
        (
            "qwen2_moe",
            2,
            {"shared_expert_intermediate_size": 81},
            "has 81 inner features in the shared expert, and 2",
        ),
        ("deepseek_v3", 3, {}, "has 4 query heads, and 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_both_numbers(
    family: str, num_cards: int, overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    facts = tiny(tmp_path, family, **overrides)

    with pytest.raises(ConfigError, match=words):
        check_split(facts, num_cards)


def test_experts_that_are_distributed_may_have_any_inner_size(tmp_path: Path) -> None:
    facts = tiny(tmp_path, "mixtral", intermediate_size=129)

    check_split(facts, 4, distributes_experts=True)

    other = tiny(tmp_path, "mixtral", num_local_experts=6)
    with pytest.raises(ConfigError, match=r"has 6 experts, and 4 .* works with 1, 2$"):
        check_split(other, 4, distributes_experts=True)


def test_shards_of_the_vocabulary_are_rounded_up(tmp_path: Path) -> None:
    facts = tiny(tmp_path, "llama", vocab_size=321)

    check_split(facts, 2)

    even = count_parameters(tiny(tmp_path, "llama", vocab_size=322), 2)
    assert count_parameters(facts, 2) == even


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    facts = tiny(tmp_path, "llama", architectures=["OwnForCausalLM"])

    with pytest.raises(ConfigError, match="is a OwnForCausalLM, which is not supported"):
        count_parameters(facts)


LONG = {"num_cards": 2, "width": 2, "num_tokens": 8192, "max_model_len": 131072, "block_size": 128}
HEADS_16_8 = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
KV = 2 * 4 * 128 * 2
"""Bytes of a token's keys and values for half of the heads."""


def test_unsliced_attention_is_estimated_with_a_mask_and_a_copy_of_keys_and_values(
    tmp_path: Path,
) -> None:
    facts = tiny(tmp_path, "llama", **HEADS_16_8)

    taken = context_bytes(facts, **LONG, slices=None)

    # The new tokens' mask in float32 and all tokens' mask in two bytes; keys and values are
    # gathered once and concatenated once.
    assert taken == 8192 * 8192 * 4 + 8192 * 131072 * 2 + 2 * 131072 * KV


def test_sliced_attention_memory_does_not_grow_with_new_times_cached_tokens(tmp_path: Path) -> None:
    facts = tiny(tmp_path, "llama", **{**HEADS_16_8, "num_attention_heads": 128})

    taken = context_bytes(facts, **LONG, slices=(8192, 4096))

    # A mask over one slice, one row of it over the context, and keys and values of a slice; plus,
    # in float32 for 64 heads, the outputs of all new tokens and of four slices.
    masks = (4096 * 4096 + 131072) * (4 + 2)
    assert taken == masks + 2 * 4096 * KV + (8192 + 4 * 4096) * 64 * 128 * 4
    longer = context_bytes(facts, **{**LONG, "max_model_len": 262144}, slices=(8192, 4096))
    assert longer - taken == 131072 * (4 + 2)


def test_a_context_below_the_threshold_is_not_sliced(tmp_path: Path) -> None:
    facts = tiny(tmp_path, "llama", **HEADS_16_8)
    short = {**LONG, "num_tokens": 2048, "max_model_len": 8000}

    joined = context_bytes(facts, **short, slices=None)

    assert context_bytes(facts, **short, slices=(8192, 4096)) == joined


def test_a_windowed_prompt_is_estimated_with_a_mask_over_its_blocks(tmp_path: Path) -> None:
    facts = tiny(tmp_path, "mistral", **HEADS_16_8, sliding_window=4096)

    taken = context_bytes(facts, **LONG, slices=(8192, 4096))

    seen = 4096 + 128 + 8192
    float32 = 8192 * 8192 * 4 + 8192 * (4096 + 128) * 4
    assert taken == float32 + 8192 * seen * 2 + 2 * seen * KV


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "llama"])
def test_windows_take_the_estimated_memory(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    facts, model = read_model_config(str(folder)), load_decoder(folder)

    estimated = kv_cache_sizes(facts, num_cards=1, width=4, block_size=8, num_seqs=6)

    assert estimated == cache_sizes(model, 8, torch.float32, num_rings=8)

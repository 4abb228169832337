"""Recurrent and hybrid families compared with transformers in float32: chunks, padding, batches,
preemption."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference, random_prompts
from paged_harness import PagedHarness, load_decoder
from releases import transformers_before
from tiny_models import make_tiny

from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.read_config import read_model_config
from config.model.split import check_split
from hpu.layers.metadata import TextAttentionInputs
from hpu.model_loader.size_estimate import kv_block_bytes, state_bytes
from hpu.models.base import ModelBuild
from hpu.models.registry import build_body
from hpu.runner.kv_cache import block_bytes
from hpu.worker.card_plan import CardDemand, plan_card

pytestmark = pytest.mark.skipif(
    transformers_before("5"), reason="an older transformers spells these configs differently"
)

LINEAR, FULL = "linear_attention", "full_attention"
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite: no experts, rope, two groups, biases, three layers": (
        "granitemoehybrid",
        {
            "num_hidden_layers": 3,
            "layer_types": [LINEAR, FULL, LINEAR],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
        },
    ),
    "granite: attention first, kernel of 3 without bias, heads of 32": (
        "granitemoehybrid",
        {
            "layer_types": [FULL, LINEAR],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 24,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "num_key_value_heads": 1,
        },
    ),
    "granite: attention alone": ("granitemoehybrid", {"layer_types": [FULL, FULL]}),
    "qwen3_next: four layers by the interval, one MLP, biases": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "layer_types": None,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2: three layers, biases, kernel of 4, derived inner size": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", FULL, "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2: layers by index, kernel of 2, one KV head": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": None,
            "full_attn_idxs": [1],
            "conv_L_cache": 2,
            "num_key_value_heads": 1,
        },
    ),
    "lfm2_moe: no expert bias, all layers with experts": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    ),
    "qwen3_next: no experts, one key head, kernel of 2": (
        "qwen3_next",
        {
            "num_experts": 0,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 2,
            "num_key_value_heads": 1,
        },
    ),
}


@pytest.mark.parametrize("name", VARIATIONS)
@torch.inference_mode()
def test_greedy_tokens_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIATIONS[name]
    folder = make_tiny(family, tmp_path, **overrides)
    prompts = random_prompts(1, 90)

    found = greedy_by_pages(load_decoder(folder), prompts, 24)

    assert_same_as_transformers(found, prompts, load_reference(folder), 1e-3)


@pytest.fixture(scope="module", params=["granitemoehybrid", "qwen3_next", "lfm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@torch.inference_mode()
def test_twelve_concurrent_requests_give_the_tokens_of_single_requests(folder: Path) -> None:
    model = load_decoder(folder)
    prompts = random_prompts(1, 2, 3, 4, 5, 17, 31, 32, 33, 64, 65, 90)
    expected = [greedy_by_pages(model, [prompt], 6)[0] for prompt in prompts]

    found = greedy_by_pages(model, prompts, 6)

    for (tokens, logits), (expected_tokens, expected_logits) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        assert (logits - expected_logits).abs().max() < 1e-3


@torch.inference_mode()
def test_a_long_prefill_equals_its_chunks(folder: Path) -> None:
    (prompt,) = random_prompts(300)
    chunked, whole = (PagedHarness(load_decoder(folder)) for _ in range(2))

    parts = [chunked.prefill({3: prompt[i : i + 70]})[3] for i in range(0, 300, 70)]
    found = whole.prefill({0: prompt}, pad_rows=2, pad_query=50)[0]

    torch.testing.assert_close(found, torch.cat(parts), atol=1e-3, rtol=0)
    for layer, other in zip(chunked.states, whole.states, strict=True):
        for state, same in zip(layer, other, strict=True):
            torch.testing.assert_close(state[3], same[0], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_preempted_and_new_requests_begin_with_an_empty_state(folder: Path) -> None:
    first, second = random_prompts(23, 9)
    rig = PagedHarness(load_decoder(folder))
    expected = rig.prefill({0: first})[0]
    rig.prefill({1: second})
    rig.decode({0: 5, 1: 6})
    rig.preempt(0)
    # Fill the caches with remains of an earlier request.
    for layer in rig.states:
        for state in layer:
            state[0] = torch.nan

    found = rig.prefill({0: first}, pad_rows=1)[0]

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_padding_changes_no_logit_and_its_state_is_finite(folder: Path) -> None:
    prompts = dict(enumerate(random_prompts(21, 7)))
    bare, padded = PagedHarness(load_decoder(folder)), PagedHarness(load_decoder(folder))
    bare.prefill(prompts)
    padded.prefill(prompts, pad_rows=3, pad_query=9, pad_blocks=4)

    expected = bare.decode({0: 5, 1: 6})
    found = padded.decode({0: 5, 1: 6}, pad_rows=6, pad_blocks=9)

    for row in prompts:
        torch.testing.assert_close(found[row], expected[row], atol=1e-4, rtol=0)
    for layer in padded.states:
        for state in layer:
            assert state[padded.pad_state].isfinite().all()
            assert state[2 : padded.pad_state].isnan().all(), "other rows are not written"


@torch.inference_mode()
def test_hidden_states_of_whole_texts_equal_a_prefill(folder: Path) -> None:
    facts = read_model_config(str(folder))
    model = load_decoder(folder)
    (prompt,) = random_prompts(20)
    expected = PagedHarness(model).prefill({0: prompt})[0]
    body = build_body(
        facts, ModelBuild(dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    )
    body.load_state_dict(model.state_dict(), strict=False)

    positions = torch.arange(24).unsqueeze(0)
    tokens = torch.tensor([[*prompt, 0, 0, 0, 0]])
    inputs = TextAttentionInputs(positions, torch.zeros_like(positions), torch.tensor([20]))
    hidden = body(tokens, inputs)

    torch.testing.assert_close(model.logits(hidden[0, :20]), expected, atol=1e-4, rtol=0)


def test_recurrent_layers_need_states_and_no_blocks(folder: Path) -> None:
    facts, model = read_model_config(str(folder)), load_decoder(folder)

    (spec,) = model.state_specs()
    assert len(model.attention_layers) == 1
    blocks = kv_block_bytes(facts, num_cards=1, width=4, block_size=16)
    assert block_bytes(model, 16, torch.float32) == blocks
    assert state_bytes(facts, width=4, num_seqs=6) == 8 * spec.num_bytes


def test_a_plan_counts_the_states_on_each_card(folder: Path) -> None:
    facts = read_model_config(str(folder))
    demand = CardDemand(
        device="gaudi2",
        num_cards=2,
        width=2,
        kv_width=2,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        block_size=16,
        utilization=0.9,
        graph_reserved=0.1,
    )

    two, single = (plan_card(facts, replace(demand, num_cards=count)) for count in (2, 1))

    recurrent = sum(state.state_elements for state in decoder_spec(facts).states) * 4
    assert two.state_bytes == state_bytes(facts, width=2, num_seqs=4, num_cards=2)
    assert single.state_bytes - two.state_bytes > 6 * recurrent // 2


@pytest.mark.parametrize(
    ("family", "overrides", "num_cards", "words"),
    [
        (
            "granitemoehybrid",
            {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 4, "num_attention_heads": 8},
            8,
            "",
        ),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 24, "mamba_d_head": 8, "mamba_n_groups": 3, "hidden_size": 96},
            2,
            "has 3 groups of its Mamba layers .* and 2 .* nor is it a multiple of them: it works "
            "with 1$",
        ),
        ("qwen3_next", {}, 4, ""),
        (
            "qwen3_next",
            {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
            2,
            "has 3 key heads of its linear attention, and 2",
        ),
        (
            "qwen3_next",
            {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
            2,
            "has 3 value heads of its linear attention, and 2",
        ),
        ("lfm2", {}, 4, ""),
        (
            "lfm2",
            {"hidden_size": 63, "num_attention_heads": 6, "head_dim": 16},
            2,
            "has 63 channels of its short convolutions, and 2",
        ),
    ],
)
def test_sizes_that_cards_cannot_divide_are_refused_with_both_numbers(
    family: str, overrides: dict[str, Any], num_cards: int, words: str, tmp_path: Path
) -> None:
    facts = read_model_config(str(make_tiny(family, tmp_path, **overrides)))

    if not words:
        check_split(facts, num_cards)
        return
    with pytest.raises(ConfigError, match=words):
        check_split(facts, num_cards)


@pytest.mark.parametrize(
    ("family", "changes", "error"),
    [
        ("granitemoehybrid", {"layer_types": [LINEAR, "wide"]}, "has unknown kinds .'wide'."),
        ("granitemoehybrid", {"layer_types": [LINEAR]}, "has 1 entries, it must have 2"),
        ("granitemoehybrid", {"layer_types": [LINEAR, LINEAR]}, "has no attention layer"),
        ("granitemoehybrid", {"mamba_n_heads": 7}, "is 7 and mamba_d_head is 16, .* 128"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "must divide mamba_n_heads, 8"),
        ("granitemoehybrid", {"mamba_d_conv": 1}, "mamba_d_conv in .* must be at least 2"),
        ("granitemoehybrid", {"time_step_limit": [0.1, 1.0]}, "which is not supported"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "it must be rope or nope"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "must divide linear_num_value_heads, 4"),
        (
            "lfm2",
            {"layer_types": ["conv", "linear_attention"]},
            "unknown kinds .'linear_attention'.",
        ),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache in .* must be at least 2"),
        (
            "lfm2",
            {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 0},
            "block_ffn_dim_multiplier in .* above 0",
        ),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": [2]},
            "full_attn_idxs in .* .2., it must list layers from 0 to 1",
        ),
        ("qwen3_next", {"num_experts": -1}, "num_experts in .* is -1"),
    ],
)
def test_contradictory_configs_are_refused_with_the_fields(
    family: str, changes: dict[str, Any], error: str, tmp_path: Path
) -> None:
    file = make_tiny(family, tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    with pytest.raises(ConfigError, match=error):
        decoder_spec(read_model_config(str(tmp_path)))


def test_names_of_published_granite_configs_are_read(tmp_path: Path) -> None:
    file = make_tiny("granitemoehybrid", tmp_path) / "config.json"
    expected = decoder_spec(read_model_config(str(tmp_path)))
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "layer_types": ["mamba", "attention"]}))

    assert decoder_spec(read_model_config(str(tmp_path))) == expected

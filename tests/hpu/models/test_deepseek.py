"""MLA and the routers of DeepSeek compared with transformers, in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference, random_prompts
from paged_harness import load_decoder
from tiny_models import COMMON, FAMILIES, make_tiny

from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.read_config import read_model_config

pytestmark = pytest.mark.skipif(
    "deepseek_v2" not in FAMILIES, reason="the installed transformers does not know them"
)

NEW_TOKENS = 32
TOLERANCE = 1e-3
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}

VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2-Lite: no latent of queries, no groups, values wider than keys": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 40,
            "num_hidden_layers": 3,
            "n_routed_experts": 5,
        },
    ),
    "V2: yarn, values narrower than keys, seven heads": (
        "deepseek_v2",
        {
            "rope_parameters": YARN,
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "v_head_dim": 12,
            "first_k_dense_replace": 0,
        },
    ),
    "V2: groups that the method ignores, biases": (
        "deepseek_v2",
        {"topk_method": "greedy", "attention_bias": True, "mlp_bias": True},
    ),
    "V3: yarn, no latent of queries, two dense layers, tied": (
        "deepseek_v3",
        {
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "q_lora_rank": None,
            "first_k_dense_replace": 2,
            "num_hidden_layers": 3,
            "v_head_dim": 20,
            "tie_word_embeddings": True,
        },
    ),
    "V3: Kimi K2, one group, halves rotated, a latent of odd size": (
        "deepseek_v3",
        {
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 7,
            "rope_interleave": False,
            "kv_lora_rank": 27,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
}


@pytest.mark.parametrize("name", VARIATIONS)
@torch.inference_mode()
def test_greedy_tokens_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIATIONS[name]
    folder = make_tiny(family, tmp_path, seed=2, **overrides)
    prompts = random_prompts(1, 23, 90)

    found = greedy_by_pages(load_decoder(folder), prompts, NEW_TOKENS)

    assert_same_as_transformers(found, prompts, load_reference(folder), TOLERANCE)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"topk_method": "best"}, "topk_method .* is 'best', it must be one of greedy, group_lim"),
        ({"scoring_func": "tanh"}, "scoring_func .* is 'tanh', it must be one of softmax, sigmoid"),
        (
            {"head_dim": 16},
            "applies rope to 16 dimensions of a head .*, it must be qk_rope_head_dim, 8",
        ),
        ({"kv_lora_rank": 0}, "kv_lora_rank .* is 0, it must be at least 1"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_its_field(
    overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    names = {"architectures": ["DeepseekV3ForCausalLM"]}
    fields = {**COMMON, **FAMILIES["deepseek_v3"], **names, **overrides}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    with pytest.raises(ConfigError, match=words):
        decoder_spec(read_model_config(str(tmp_path)))


def test_moe_layer_freq_counts_layers_from_0(tmp_path: Path) -> None:
    names = {"architectures": ["DeepseekV2ForCausalLM"]}
    layers = {"num_hidden_layers": 5, "moe_layer_freq": 2, "first_k_dense_replace": 1}
    fields = {**COMMON, **FAMILIES["deepseek_v2"], **names, **layers}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    spec = decoder_spec(read_model_config(str(tmp_path)))

    # The published code counts this way: layer_idx % moe_layer_freq == 0.
    kinds = [layer.feed_forward for layer in spec.layers]
    assert kinds == ["mlp", "mlp", "moe", "mlp", "moe"]

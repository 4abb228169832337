"""A model that runs transformers' own code on the strict emulated card."""

from pathlib import Path
from typing import Any

import pytest
from releases import transformers_before
from strict_card import assert_nothing_compiles_after_warmup
from tiny_models import make_tiny

from config.execution import ExecutionConfig

SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "head_dim": 16,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
}
"""The last two layers share the keys and values of the first two."""
THEIRS = "transformers"
FIELDS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "starcoder2": {"sliding_window": 9},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "gemma4_text": {**SHARED, "global_head_dim": 32},
    "gemma3n_text": {
        **SHARED,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
}


@pytest.mark.skipif(transformers_before("5.18"), reason="needs the interfaces of 5.18")
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((family, "hpu-graphs") for family in FIELDS),
        # Slow: starcoder2 below covers the same attention and MLP, with a window.
        pytest.param("gpt_neox", "torch-compile", marks=pytest.mark.slow),
        pytest.param("starcoder2", "torch-compile", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "torch-compile", marks=pytest.mark.slow),
        pytest.param("gemma4_text", "torch-compile", marks=pytest.mark.slow),
        pytest.param("gemma3n_text", "torch-compile", marks=pytest.mark.slow),
    ],
)
def test_the_card_gives_the_tokens_of_the_cpu_and_compiles_nothing_after_warm_up(
    family: str, mode: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **FIELDS[family])

    assert_nothing_compiles_after_warmup(folder, ExecutionConfig(mode=mode), model_impl=THEIRS)

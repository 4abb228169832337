"""Sliding windows of Qwen models whose config.json does not say whether the window is used."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from config.model.read_config import read_model_config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe"])
@pytest.mark.parametrize("switch", [{}, {"use_sliding_window": True}], ids=["unsaid", "used"])
def test_the_window_equals_transformers(tmp_path: Path, kind: str, switch: dict[str, bool]) -> None:
    fields = {**SIZES, "sliding_window": 64, **switch}
    theirs = getattr(transformers, f"{kind}Config")(**fields)
    architecture = {"architectures": [f"{kind}ForCausalLM"], "model_type": theirs.model_type}
    Path(tmp_path, "config.json").write_text(json.dumps({**architecture, **fields}))

    ours = read_model_config(str(tmp_path))

    assert ours.sliding_window == (theirs.sliding_window or None)
    if ours.sliding_window is not None and kind in ("Qwen2", "Qwen3"):
        assert list(ours.layer_types) == theirs.layer_types

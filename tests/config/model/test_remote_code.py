"""Checkpoints that need their own Python code are refused before the weights are read."""

import json
from pathlib import Path

import pytest

from config.engine import EngineConfig
from config.errors import ConfigError
from config.startup_checks import check_model_config


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("Phi3VForCausalLM", "phi3_v"), ("Phi4MMForCausalLM", "phi4mm")],
)
def test_code_of_a_checkpoint_is_refused_in_one_sentence(
    architecture: str, model_type: str, tmp_path: Path
) -> None:
    """Phi-3.5 vision as published, with other sizes, and Phi-4-multimodal in its first form."""
    fields = {
        "architectures": [architecture],
        "model_type": model_type,
        "auto_map": {"AutoModelForCausalLM": f"modeling_{model_type}.{architecture}"},
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "img_processor": {"name": "clip_vision_model"},
        "embd_layer": {"embedding_cls": "image"},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))

    with pytest.raises(ConfigError) as raised:
        check_model_config(EngineConfig(str(tmp_path)), str(tmp_path))

    assert str(raised.value) == (
        f"{tmp_path} is a {architecture}, which has neither a native implementation nor one in "
        "transformers: its code is in the checkpoint (auto_map in config.json), and code in a "
        "checkpoint is never run"
    )

"""PaliGemma is refused: its text model attends to the whole prompt bidirectionally."""

import json
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.model.read_config import read_model_config


def test_paligemma_saved_by_transformers_4_is_refused(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma2",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
    }
    whole = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "image_token_index": 100,
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    Path(tmp_path, "config.json").write_text(json.dumps(whole))

    with pytest.raises(ConfigError, match=r"PaliGemma.* bidirectional attention"):
        read_model_config(str(tmp_path))

"""Context length: max_position_embeddings and the RoPE scaling, with both field names of the
scaling."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from config.model.context_length import default_context_length, max_context_length
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from config.startup_checks import choose_max_model_len

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"


def _read(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return read_model_config(str(folder))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("positions", "rope", "default", "longest"),
    [
        (64, {"rope_type": "yarn", "factor": 4, ORIGINAL: 64}, 256, 256),
        (64, {"rope_type": "yarn", "factor": 4.0}, 256, 256),
        # Positions already include the scaling, or are rounded up as in Qwen3.
        (256, {"rope_type": "yarn", "factor": 4, ORIGINAL: 64}, 256, 256),
        (80, {"rope_type": "yarn", "factor": 4, ORIGINAL: 64}, 256, 256),
        (256, {"rope_type": "yarn", ORIGINAL: 64}, 256, 256),
        (64, {"rope_type": "dynamic", "factor": 2.0}, 128, 128),
        (64, {"rope_type": "linear", "factor": 2.5}, 160, 160),
        (256, {"rope_type": "linear", "factor": 4.0, ORIGINAL: 64}, 256, 256),
        (256, {"rope_type": "llama3", "factor": 4.0, ORIGINAL: 64, **LLAMA3}, 256, 256),
        (256, {"rope_type": "longrope", ORIGINAL: 64, **FACTORS}, 64, 256),
        (256, {"rope_type": "longrope", "factor": 4.0, **FACTORS}, 256, 256),
        (64, {"rope_type": "default", "factor": 4.0}, 64, 64),
        (2**20, {"rope_type": "linear", "factor": 1000.0}, 2**24, 2**24),
    ],
)
def test_a_rope_factor_extends_the_context(
    tmp_path: Path, name: str, positions: int, rope: dict[str, Any], default: int, longest: int
) -> None:
    facts = _read(tmp_path, max_position_embeddings=positions, **{name: rope})

    assert (default_context_length(facts), max_context_length(facts)) == (default, longest)
    assert choose_max_model_len(None, facts) == default
    assert choose_max_model_len(longest, facts) == longest
    with pytest.raises(ConfigError, match=rf"is {longest + 1}, .* {longest} tokens"):
        choose_max_model_len(longest + 1, facts)


def test_longrope_defaults_to_its_original_length_and_allows_the_extended_length(
    tmp_path: Path,
) -> None:
    rope = {"type": "su", **FACTORS}

    facts = _read(tmp_path, max_position_embeddings=256, rope_scaling=rope, **{ORIGINAL: 64})

    assert (default_context_length(facts), max_context_length(facts)) == (64, 256)


@pytest.mark.parametrize("scaled", [FULL, SLIDING])
def test_the_context_length_follows_the_layer_type_with_a_rope_factor(
    tmp_path: Path, scaled: str
) -> None:
    ropes: dict[str, dict[str, Any]] = {FULL: {"rope_theta": 1e4}, SLIDING: {"rope_theta": 1e4}}
    ropes[scaled] = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}

    facts = _read(tmp_path, sliding_window=8, layer_types=[FULL, SLIDING], rope_parameters=ropes)

    assert max_context_length(facts) == 256


def test_the_rope_factor_of_gemma_3_does_not_extend_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 8.0}

    facts = _read(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        head_dim=16,
        max_position_embeddings=512,
        rope_scaling=rope,
    )

    assert max_context_length(facts) == 512


def test_the_error_names_the_source_of_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4, ORIGINAL: 64}

    with pytest.raises(
        ConfigError,
        match=r"is 300, the checkpoint was made for 256 tokens \(original_max_position_embeddings "
        r"64 times the yarn factor 4\): set --max-model-len to 256 or less",
    ):
        choose_max_model_len(300, _read(tmp_path, rope_scaling=rope))


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"model_max_length": 512, "rope_theta": 10000.0}, 512),
        ({"model_max_length": 512}, 64),
        ({"model_max_length": 32}, 32),
        ({"model_max_length": 512, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1024),
        ({"max_sequence_length": 48}, 48),
        ({"max_sequence_length": 48, "seq_length": 40}, 40),
        ({"seq_length": 128}, 64),
        # Tokenizers write this number for no limit.
        ({"model_max_length": 10**30, "rope_theta": 10000.0}, 64),
        ({"model_max_length": None, "max_seq_length": -1}, 64),
    ],
)
def test_the_context_length_is_read_from_alternative_fields(
    tmp_path: Path, fields: dict[str, Any], longest: int
) -> None:
    assert max_context_length(_read(tmp_path, **fields)) == longest

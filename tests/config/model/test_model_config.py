"""read_model_config: both spellings of config.json, and errors for unsupported models."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from config.model.model_config import ModelConfig, RopeConfig, RopeScaling
from config.model.read_config import read_model_config

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def _read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """Read LLAMA with `changes`; None removes a field."""
    raw = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(str(folder))


def test_omitted_fields_have_the_usual_defaults(tmp_path: Path) -> None:
    config = _read(tmp_path)

    assert config == ModelConfig(
        *(str(tmp_path), "LlamaForCausalLM", 320, 64, 128, 2, 4, 4, 16, 512), fields=config.fields
    )


def test_the_old_and_the_new_spelling_of_rope_are_equivalent(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }

    old = _read(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = _read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})

    assert replace(old, fields=new.fields) == new
    assert new.rope.theta == 5e5
    assert new.rope.scaling == RopeScaling("llama3", factor=8.0, original_max_position=128)


def test_the_default_rope_type_means_no_scaling(tmp_path: Path) -> None:
    config = _read(
        tmp_path,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 7.0,
            "partial_rotary_factor": 0.75,
        },
    )

    assert (config.rope.theta, config.rope.partial) == (7.0, 0.75)
    assert config.rope.scaling is None


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_the_factor_of_longrope_is_computed_from_the_lengths(tmp_path: Path, name: str) -> None:
    rope = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

    config = _read(tmp_path, rope_scaling=rope, original_max_position_embeddings=64)

    assert config.rope.scaling == RopeScaling(
        "longrope",
        factor=8.0,
        original_max_position=64,
        short_factor=(1.0,) * 8,
        long_factor=(2.0,) * 8,
    )


@pytest.mark.parametrize(
    ("fields", "window", "types"),
    [
        ({"sliding_window": 9}, 9, (SLIDING, SLIDING)),
        ({"sliding_window": 9, "use_sliding_window": False}, None, ()),
        ({"sliding_window": 9, "max_window_layers": 1}, 9, (FULL, SLIDING)),
        (
            {"sliding_window": 9, "layer_types": [SLIDING, FULL]},
            9,
            (SLIDING, FULL),
        ),
        ({"sliding_window": 9, "sliding_window_pattern": 2}, 9, (SLIDING, FULL)),
        ({}, None, ()),
    ],
)
def test_windows_are_read_for_each_layer(
    tmp_path: Path, fields: dict[str, Any], window: int | None, types: tuple[str, ...]
) -> None:
    config = _read(tmp_path, **fields)

    assert (config.sliding_window, config.layer_types) == (window, types)


@pytest.mark.parametrize(
    ("fields", "types", "rotated"),
    [
        ({"attention_chunk_size": 8}, (CHUNKED, CHUNKED), ()),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0]}, (CHUNKED, FULL), (True, False)),
        ({"attention_chunk_size": 8, "layer_types": [FULL, CHUNKED]}, (FULL, CHUNKED), ()),
        ({"no_rope_layer_interval": 2}, (), (True, False)),
        ({"no_rope_layer_interval": 2, "no_rope_layers": [0, 1]}, (), (False, True)),
        ({"no_rope_layers": []}, (), ()),
    ],
)
def test_attention_chunks_and_layers_without_rope_are_read_for_each_layer(
    tmp_path: Path, fields: dict[str, Any], types: tuple[str, ...], rotated: tuple[bool, ...]
) -> None:
    config = _read(tmp_path, **fields)

    assert (config.layer_types, config.rope_layers) == (types, rotated)


LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_theta": 5e3}}},
        {"rope_theta": 1e6, "rope_scaling": LINEAR, "rope_local_base_freq": 5e3},
    ],
)
def test_sliding_window_layers_may_have_their_own_rope_parameters(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    config = _read(tmp_path, **fields)

    assert config.rope == RopeConfig(1e6, RopeScaling("linear", factor=8.0))
    assert config.local_rope == RopeConfig(5e3)


@pytest.mark.parametrize("kinds", [(FULL, SLIDING), (FULL,), (SLIDING,)])
def test_equal_rope_parameters_of_all_layers_are_merged(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    config = _read(tmp_path, rope_parameters={kind: {"rope_theta": 5e3} for kind in kinds})

    assert (config.rope, config.local_rope) == (RopeConfig(5e3), None)


def test_end_tokens_and_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "do_sample": True}

    config = _read(tmp_path, generation, eos_token_id=4)

    assert config.eos_token_ids == (5, 6, 4)
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 20.0}


@pytest.mark.parametrize("name", ["max_new_tokens", "max_tokens"])
@pytest.mark.parametrize("limit", [256, 0, -1])
def test_an_output_limit_comes_from_the_generation_config(
    tmp_path: Path, name: str, limit: int
) -> None:
    defaults = _read(tmp_path, {name: limit}).generation_defaults

    assert defaults == ({name: float(limit)} if limit > 0 else {})


def test_end_tokens_are_read_from_the_config_if_no_other_file_names_them(tmp_path: Path) -> None:
    assert _read(tmp_path, {}, eos_token_id=4).eos_token_ids == (4,)


@pytest.mark.parametrize("fields", [{"dtype": "float16"}, {"torch_dtype": "float16"}])
def test_the_dtype_is_read_in_both_spellings(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert _read(tmp_path, **fields).dtype == "float16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size in .* is '64', it must be a int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in .* is 0, it must be at least 1"),
        (
            {"n_layer": 3, "num_layers": 2},
            "has two numbers of layers, 2 and 3, which must be equal",
        ),
        ({"num_key_value_heads": 3}, "4 query heads, it must be a multiple of its 3 KV heads"),
        ({"hidden_size": 66}, "has hidden_size 66, it must be a multiple of its 4 heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps in .* is 'small', it must be a finite number"),
        ({"architectures": []}, r"architectures in .* is \[\], it must name one model"),
        ({"text_config": {}}, "more than a text model"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"an unsupported quantization \(hqq\): use one of",
        ),
        ({"dtype": "float8"}, "dtype in .* is float8"),
        ({"sliding_window": 0}, "sliding_window in .* is 0"),
        ({"sliding_window": 5, "layer_types": ["full_attention"]}, "has 1 entries, it must have 2"),
        ({"sliding_window": 5, "layer_types": ["a", "a"]}, r"unknown kinds \['a'\]"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor in .* is 1.5"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor in .* is 0"),
        (
            {"rope_parameters": {"main": {}}},
            "must be the parameters of one rope, or of one rope for each of full",
        ),
        (
            {"rope_parameters": {SLIDING: {}, CHUNKED: {"rope_theta": 7.0}}},
            "between windowed and chunked",
        ),
        (
            {"sliding_window": 5, "layer_types": [FULL, CHUNKED]},
            "which requires attention_chunk_size",
        ),
        (
            {"attention_chunk_size": 5, "layer_types": [FULL, SLIDING]},
            "which requires sliding_window",
        ),
        (
            {"sliding_window": 5, "attention_chunk_size": 5},
            "a sliding window and attention chunks, it must have layer_",
        ),
        ({"attention_chunk_size": 0}, "attention_chunk_size in .* is 0"),
        ({"no_rope_layers": [1]}, "must have a 0 or a 1 for each of 2 layers"),
        ({"no_rope_layers": [1, "a"]}, "must have a 0 or a 1 for each of 2 layers"),
        ({"clip_qkv": 0}, "clip_qkv in .* is 0, it must be above 0"),
        ({"eos_token_id": "end"}, "eos_token_id of .* is 'end'"),
    ],
)
def test_unsupported_model_features_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _read(tmp_path, **fields)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json"):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("[]", "is a list")])
def test_a_config_other_than_an_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual_multiplier": -1e308}, "residual_multiplier in .* is -1e.308, .* -3.40282e.38"),
        ({"residual_multiplier": 1e38}, "residual_multiplier in .* is 1e.38, .* at most 65504"),
        ({"logits_scaling": 65505}, "logits_scaling in .* is 65505, it must be at most 65504"),
        ({"embedding_multiplier": -7e4}, "is -70000, it must be at least -65504"),
        ({"logits_scaling": 1e-320}, "is 9.99989e-321, it must be 0, or at least 1e-30 from 0"),
        ({"attention_multiplier": -1}, "attention_multiplier in .* is -1, it must be above 0"),
        ({"clip_qkv": 1e39}, "clip_qkv in .* is 1e.39, it must be from -3.40282e.38 to 3.40282e"),
        ({"rope_theta": 10**400}, "rope_theta in .* is 1000.*0, it must be from -3.40282e.38"),
        ({"other": {"deep": [[0], [1e39]]}}, "deep in .* is 1e.39, it must be from -3.40282e.38"),
        ({"vision_config": {"scale": -(10**39)}}, "scale in .* is -1000.*, it must be from"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1e30], "factor": 2.0}},
            "short_factor in .* is 1e.30, it must be at most 65504",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [None], "factor": 2.0}},
            "short_factor in .* has null",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _read(tmp_path, **changes)


def test_an_infinite_limit_and_the_largest_numbers_are_read(tmp_path: Path) -> None:
    config = _read(
        tmp_path, time_step_limit=[0.0, math.inf], residual_multiplier=65504, mask_value=-3.4e38
    )

    assert config.residual_multiplier == 65504

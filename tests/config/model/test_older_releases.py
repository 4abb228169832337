"""config.json as saved by transformers 4.51 and 4.57, compared with the file of version 5.

The model configs come from checkpoints that these releases saved. The names and shapes of the
tensors of all these text models are equal in the three releases.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from releases import transformers_before
from tiny_models import COMMON, FAMILIES
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config

if transformers_before("5.18"):
    pytest.skip("compares with the fields of transformers 5", allow_module_level=True)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPE: dict[str, Any] = {"rope_parameters": {**YARN, "rope_theta": 30000.0}}
HALF: dict[str, Any] = {
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 20000.0},
        "partial_rotary_factor": 0.5,
    }
}
TWO_ROPES: dict[str, Any] = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
    }
}
WINDOWS = {"sliding_window": 9, "num_hidden_layers": 6}


class Form(NamedTuple):
    """How a release before 5 saves a family, apart from the RoPE fields and the data type."""

    model_type: str
    given: Mapping[str, Any] = {}
    """Fields of the model."""
    absent: tuple[str, ...] = ()
    """Fields that the release does not write."""
    written: Mapping[str, Any] = {}
    """Fields with other names or values."""


FORMS: dict[str, Form] = {
    **{name: Form(name, ROPE) for name in ("llama", "mistral", "granite", "deepseek_v3")},
    **{name: Form(name) for name in ("olmoe", "granitemoe", "granitemoeshared", "phimoe")},
    **{name: Form(name) for name in ("ernie4_5_moe", "minimax_m2", "deepseek_v2", "olmo2")},
    **{name: Form(name, {"head_dim": 16, **HALF}) for name in ("glm", "glm4")},
    **{name: Form(name, HALF) for name in ("glm4_moe", "stablelm", "phi", "nemotron")},
    **{name: Form(name) for name in ("starcoder2", "falcon", "cohere", "exaone4", "qwen3_next")},
    "mixtral": Form("mixtral", {"head_dim": 16, **ROPE}),
    "phi3: partial": Form("phi3", HALF),
    "gpt_oss": Form("gpt_oss", absent=("swiglu_alpha",), written={"router_aux_loss_coef": 0.9}),
    "qwen2, 4.51": Form(
        "qwen2",
        ROPE,
        ("layer_types",),
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen2: a window in the upper layers, 4.51": Form(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        ("layer_types",),
    ),
    "qwen3, 4.51": Form(
        "qwen3", ROPE, ("layer_types",), {"use_sliding_window": False, "sliding_window": 4096}
    ),
    "qwen2_moe": Form("qwen2_moe", {}, ("layer_types",), {"sliding_window": None}),
    "qwen3_moe": Form("qwen3_moe", ROPE, ("num_local_experts",), {"num_experts": 4}),
    "gemma": Form("gemma", {"head_dim": 16}, written={"hidden_activation": None}),
    "gemma2, 4.51": Form(
        "gemma2",
        {"head_dim": 16, **WINDOWS},
        ("layer_types",),
        {"cache_implementation": "hybrid"},
    ),
    "gemma3, 4.51": Form(
        "gemma3_text",
        {"head_dim": 16, **WINDOWS, **TWO_ROPES},
        ("layer_types", "_sliding_window_pattern"),
        {"sliding_window_pattern": 6},
    ),
    "gemma3, 4.57": Form("gemma3_text", {"head_dim": 16, **WINDOWS, **TWO_ROPES}),
    "cohere2, 4.51": Form(
        "cohere2",
        WINDOWS,
        ("layer_types", "_sliding_window_pattern"),
        {"sliding_window_pattern": 4},
    ),
    "cohere2, 4.57": Form("cohere2", WINDOWS, written={"_sliding_window_pattern": 4}),
    "smollm3": Form("smollm3", {"num_hidden_layers": 4}),
    "llama4, 4.51": Form(
        "llama4_text",
        {},
        ("layer_types", "no_rope_layer_interval"),
        {"attn_temperature_tuning": 4, "cache_implementation": "hybrid"},
    ),
    "llama4, 4.57": Form("llama4_text", absent=("no_rope_layer_interval",)),
    "granitemoehybrid": Form("granitemoehybrid", written={"layer_types": ["mamba", "attention"]}),
    "lfm2": Form("lfm2", absent=("full_attn_idxs",)),
    "gpt_neox": Form(
        "gpt_neox",
        HALF,
        ("is_decoder",),
        {"rotary_pct": 0.5, "rotary_emb_base": 20000, "partial_rotary_factor": 0.5},
    ),
}


def as_before_5(config: dict[str, Any], form: Form) -> dict[str, Any]:
    """The config.json of the same model, in the form before 5."""
    kept = {name: value for name, value in config.items() if name not in form.absent}
    rope = dict(kept.pop("rope_parameters"))
    if "full_attention" in rope:
        kept["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    kept["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        kept["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kept["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return {**kept, "torch_dtype": kept.pop("dtype"), **form.written}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(str(folder))


@pytest.mark.parametrize("name", FORMS)
def test_an_older_config_form_gives_the_same_model_config(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    if form.model_type not in CONFIG_MAPPING:
        pytest.skip("the installed transformers has no such model")
    given = {**COMMON, **FAMILIES.get(form.model_type, {}), **form.given, "dtype": "float32"}
    config = AutoConfig.for_model(form.model_type, **given).to_dict()
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[form.model_type]]
    older = as_before_5(config, form)

    expected, found = read(tmp_path, config), read(tmp_path, older)

    for field in fields(ModelConfig):
        if field.name != "fields":
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert decoder_spec(found) == decoder_spec(expected)
    assert older.keys() != config.keys() and "rope_parameters" not in older

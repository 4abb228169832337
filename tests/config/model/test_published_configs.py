"""config.json in the form in which makers of models publish it, with the fields that matter: every
architecture of docs/models.md is read, in the forms of its checkpoints (a wrapper with images,
nested fields, older names, FP8)."""

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from releases import transformers_before

from config.errors import ConfigError
from config.model.architectures import ARCHITECTURES, decoder_spec
from config.model.context_length import max_context_length
from config.model.decoder_spec import LayerSpec
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig
from config.model.multimodal.text_defaults import TEXT_DEFAULTS
from config.model.multimodal.text_part import TEXT_MODELS, text_part
from config.model.read_config import read_model_config

PUBLISHED = [
    json.loads(line)
    for line in Path(__file__).with_name("published_configs.jsonl").read_text().splitlines()
]


def kind(layer: LayerSpec) -> str:
    """The layer in one word for each property that is not the usual one."""
    words = [
        layer.attention,
        f"window {layer.window}" * bool(layer.window),
        f"chunk {layer.chunk}" * bool(layer.chunk),
        f"rope {layer.rope}" * (layer.rope != "default"),
        "blocks" * layer.indexed,
        "experts" * (layer.feed_forward == "moe"),
    ]
    return ", ".join(word for word in words if word)


def summary(facts: ModelConfig) -> dict[str, Any]:
    """What the table compares."""
    rope, moe = facts.rope, facts.moe
    found: dict[str, Any] = {
        "architecture": facts.architecture,
        "heads": [facts.num_heads, facts.num_kv_heads, facts.head_dim],
        "sizes": [facts.hidden_size, facts.intermediate_size, facts.vocab_size],
        "context": max_context_length(facts),
        "rope": [rope.theta, rope.partial, None if rope.scaling is None else rope.scaling.kind],
        "tied": facts.tie_word_embeddings,
        "layers": facts.num_layers,
    }
    if moe is not None:
        found["experts"] = [moe.num_experts, moe.top_k, moe.inner_size, moe.shared_size]
    if facts.quantization is not None:
        found["quantization"] = facts.quantization.method
    if facts.vision is not None:
        found["images"] = facts.vision.image_token_id
    if facts.architecture in ARCHITECTURES:
        found["layers"] = dict(Counter(kind(layer) for layer in decoder_spec(facts).layers))
    return found


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry["name"])
def test_a_published_config_is_read(entry: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))

    assert summary(read_model_config(str(tmp_path))) == entry["expected"]


def test_the_table_has_every_architecture() -> None:
    assert set(ARCHITECTURES) <= {entry["expected"]["architecture"] for entry in PUBLISHED}


def described(folder: Path, **text: Any) -> ModelConfig:
    """The facts of a whole model with the text_config `text`."""
    whole = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    return read_model_config(str(folder))


def test_fields_that_text_config_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    """transformers leaves out what has the value of the class of the text model."""
    if transformers_before("5.18"):
        pytest.skip("other values in an older release")
    from transformers import CONFIG_MAPPING

    for model_type in TEXT_DEFAULTS:
        config = CONFIG_MAPPING[model_type]
        # Ropes have defaults of their own; a tied head is a fact of the whole model.
        defaults = {
            name: entry.default
            for name, entry in config.__dataclass_fields__.items()
            if isinstance(entry.default, (bool, int, float, str, list))
            and name not in ("dtype", "model_type", "rope_parameters", "tie_word_embeddings")
        }
        theta = getattr(config, "default_theta", None)
        if isinstance(theta, float):
            defaults["rope_theta"] = theta

        short, full = (
            described(tmp_path, **{**given, "model_type": model_type}) for given in ({}, defaults)
        )

        for field in fields(ModelConfig):
            if field.name not in ("eos_token_ids", "fields"):
                name = f"{model_type}: {field.name}"
                assert (name, getattr(short, field.name)) == (name, getattr(full, field.name))
        if short.architecture in ARCHITECTURES:
            assert decoder_spec(short) == decoder_spec(full), model_type


def test_a_text_model_that_is_not_built_in_is_named_with_its_neighbours() -> None:
    whole = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "qwen4_text"},
    }

    with pytest.raises(
        ConfigError,
        match=rf"text_config in config\.json has the model_type 'qwen4_text', .* is not built in: "
        rf"the nearest of the {len(TEXT_MODELS)} .* are qwen3, ",
    ):
        text_part(Fields(whole, Path("config.json")))


def test_a_text_model_without_model_type_is_known_by_its_architecture() -> None:
    raw = json.loads(
        json.dumps(next(entry for entry in PUBLISHED if entry["name"] == "DeepSeek-OCR"))
    )
    text = raw["config"]["language_config"]
    assert "model_type" not in text

    text["architectures"] = ["NobodysForCausalLM"]

    with pytest.raises(ConfigError, match=r"language_config in .* has the model_type None"):
        text_part(Fields(raw["config"], Path("config.json")))


def test_a_null_in_text_config_is_no_absent_field(tmp_path: Path) -> None:
    """A Mistral has a window where config.json does not say that it has none."""
    assert described(tmp_path, model_type="mistral").sliding_window == 4096
    assert described(tmp_path, model_type="mistral", sliding_window=None).sliding_window is None


def test_another_name_of_a_field_counts_before_the_value_of_transformers(tmp_path: Path) -> None:
    """transformers 5 saves the number of experts of a Qwen3 so."""
    facts = described(tmp_path, model_type="qwen3_moe", num_local_experts=16, n_layers=3)

    assert facts.moe is not None and facts.moe.num_experts == 16
    assert facts.num_layers == 3


TEXT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a text model that is not built in": (
        "MiniMaxM9ForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "minimax_m9_text"}},
        r"model_type 'minimax_m9_text', .* not built in: .* are minimax_m2, ",
    ),
    "parts of its own": (
        "Qwen4OmniMoeForConditionalGeneration",
        {"writer_config": {"text_config": TEXT}},
        r"has no hidden_size, and a Qwen4Omni.* not built in; .* are .*Qwen3OmniMoeForConditional",
    ),
    "an encoder of audio": (
        "UltravoxModel",
        {"text_config": {**TEXT, "model_type": "llama"}, "audio_config": {}},
        r"with more than a text model, .* docs/models\.md (are \w+|lists the \d+ architectures)",
    ),
    "an encoder and a decoder": (
        "T5ForConditionalGeneration",
        {"is_encoder_decoder": True},
        r"with an encoder and a decoder, .* docs/models\.md (are \w+|lists the \d+ architectures)",
    ),
    "speech": (
        "WhisperForConditionalGeneration",
        {"is_encoder_decoder": True},
        r"with an encoder and a decoder, which is not supported; speech is not served$",
    ),
    "other names of fields": (
        "Mamba2ForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2},
        r"has no num_attention_heads, and a Mamba2ForCausalLM is not built in; the nearest",
    ),
}


@pytest.mark.parametrize(("name", "rest", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_with_its_neighbours(
    name: str, rest: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = {"image_token_id": 5, "vision_config": {}} if "MiniMax" in name else {}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **whole, **rest}))

    with pytest.raises(ConfigError, match=message) as error:
        read_model_config(str(tmp_path))

    assert "\n" not in str(error.value)

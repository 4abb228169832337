"""Every architecture of docs/models.md is read from config.json as published: wrappers with images,
nested fields, older names, FP8. The table keeps only fields that affect the result."""

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
    """The layer as a string: a word for each unusual property."""
    words = [
        layer.attention,
        f"window {layer.window}" * bool(layer.window),
        f"chunk {layer.chunk}" * bool(layer.chunk),
        f"rope {layer.rope}" * (layer.rope != "default"),
        "blocks" * layer.indexed,
        "experts" * (layer.feed_forward == "moe"),
    ]
    return ", ".join(word for word in words if word)


def summary(model_config: ModelConfig) -> dict[str, Any]:
    """Fields that the table compares."""
    rope, moe = model_config.rope, model_config.moe
    found: dict[str, Any] = {
        "architecture": model_config.architecture,
        "heads": [model_config.num_heads, model_config.num_kv_heads, model_config.head_dim],
        "sizes": [
            model_config.hidden_size,
            model_config.intermediate_size,
            model_config.vocab_size,
        ],
        "context": max_context_length(model_config),
        "rope": [rope.theta, rope.partial, None if rope.scaling is None else rope.scaling.kind],
        "tied": model_config.tie_word_embeddings,
        "layers": model_config.num_layers,
    }
    if moe is not None:
        found["experts"] = [moe.num_experts, moe.top_k, moe.inner_size, moe.shared_size]
    if model_config.quantization is not None:
        found["quantization"] = model_config.quantization.method
    if model_config.vision is not None:
        found["images"] = model_config.vision.image_token_id
    if model_config.architecture in ARCHITECTURES:
        found["layers"] = dict(Counter(kind(layer) for layer in decoder_spec(model_config).layers))
    return found


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry["name"])
def test_a_published_config_is_read(entry: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))

    assert summary(read_model_config(str(tmp_path))) == entry["expected"]


def test_the_table_has_every_architecture() -> None:
    assert set(ARCHITECTURES) <= {entry["expected"]["architecture"] for entry in PUBLISHED}


def described(folder: Path, **text: Any) -> ModelConfig:
    """Model config of a multimodal checkpoint whose text_config is `text`."""
    whole = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    return read_model_config(str(folder))


def test_omitted_text_config_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """transformers omits fields that have the default value of the text model's class."""
    if transformers_before("5.18"):
        pytest.skip("other values in an older release")
    from transformers import CONFIG_MAPPING

    for model_type in TEXT_DEFAULTS:
        config = CONFIG_MAPPING[model_type]
        # RoPE parameters have their own defaults; tied embeddings are a field of the outer config.
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


def test_the_error_for_an_unsupported_text_model_names_the_nearest_models() -> None:
    whole = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "qwen4_text"},
    }

    with pytest.raises(
        ConfigError,
        match=rf"text_config in config\.json has the model_type 'qwen4_text', .* is not supported: "
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


def test_a_null_in_text_config_differs_from_an_absent_field(tmp_path: Path) -> None:
    """A Mistral has a window unless config.json explicitly disables it."""
    assert described(tmp_path, model_type="mistral").sliding_window == 4096
    assert described(tmp_path, model_type="mistral", sliding_window=None).sliding_window is None


def test_an_alternative_field_name_takes_precedence_over_the_default_of_transformers(
    tmp_path: Path,
) -> None:
    """transformers 5 saves the number of experts of a Qwen3 under this name."""
    facts = described(tmp_path, model_type="qwen3_moe", num_local_experts=16, n_layers=3)

    assert facts.moe is not None and facts.moe.num_experts == 16
    assert facts.num_layers == 3


NEAREST = r"(are \w+|lists the \d+ supported architectures)"
TEXT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a text model that is not supported": (
        "MiniMaxM9ForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "minimax_m9_text"}},
        r"model_type 'minimax_m9_text', .* not supported: .* are minimax_m2, ",
    ),
    "parts of its own": (
        "Qwen4OmniMoeForConditionalGeneration",
        {"writer_config": {"text_config": TEXT}},
        r"a Qwen4Omni.* not supported, .* no hidden_size; .* are .*Qwen3OmniMoeForConditional",
    ),
    "an encoder of audio": (
        "UltravoxModel",
        {"text_config": {**TEXT, "model_type": "llama"}, "audio_config": {}},
        rf"with more than a text model, .* docs/models\.md {NEAREST}",
    ),
    "an encoder and a decoder": (
        "T5ForConditionalGeneration",
        {"is_encoder_decoder": True},
        rf"with an encoder and a decoder, .* docs/models\.md {NEAREST}",
    ),
    "speech": (
        "WhisperForConditionalGeneration",
        {"is_encoder_decoder": True},
        r"with an encoder and a decoder, which is not supported; speech models are not supported$",
    ),
    "other names of fields": (
        "Mamba2ForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2},
        r"^a Mamba2ForCausalLM is not supported, and .* has no num_attention_heads; the nearest",
    ),
}


@pytest.mark.parametrize(("name", "rest", "message"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_model_is_refused_with_similar_models(
    name: str, rest: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = {"image_token_id": 5, "vision_config": {}} if "MiniMax" in name else {}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **whole, **rest}))

    with pytest.raises(ConfigError, match=message) as error:
        read_model_config(str(tmp_path))

    assert "\n" not in str(error.value)

"""--hf-overrides: fields that replace fields of the checkpoint's config.json."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.checkpoint.facts import model_facts
from config.checkpoint.hf_overrides import merged, with_overrides
from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.context_length import max_context_length
from config.model.read_config import read_model_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
YARN = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_overrides_apply_to_the_checkpoint_without_modifying_it(
    folder: Path, tmp_path: Path
) -> None:
    text, cache = json.dumps(YARN), str(tmp_path / "cache")

    found = Path(resolve(EngineConfig(str(folder), cache_dir=cache, hf_overrides=text)))

    assert max_context_length(read_model_config(str(found))) == 256
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert max_context_length(read_model_config(str(folder))) == 64
    assert resolve(EngineConfig(str(folder), cache_dir=cache, hf_overrides=text)) == str(found)
    assert resolve(EngineConfig(str(folder), cache_dir=cache)) == str(folder)


def test_changed_files_or_overrides_give_another_folder(folder: Path, tmp_path: Path) -> None:
    cache, text = str(tmp_path / "cache"), json.dumps(YARN)
    folders = {with_overrides(str(folder), text, cache)}

    folders.add(with_overrides(str(folder), '{"rope_theta": 500}', cache))
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    folders.add(with_overrides(str(folder), text, cache))

    assert len(folders) == 3
    assert read_model_config(with_overrides(str(folder), text, cache)).eos_token_ids == (7,)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an empty config": lambda folder: os.truncate(folder / "config.json", 0),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "a file instead": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_made_again(
    name: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, text = str(tmp_path / "cache"), json.dumps(YARN)
    made = Path(with_overrides(str(folder), text, cache))
    DAMAGES[name](made)

    assert with_overrides(str(folder), text, cache) == str(made)
    assert max_context_length(read_model_config(str(made))) == 256
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert f"{made} is damaged, and is made again" in caplog.text


def test_a_plan_applies_the_overrides(folder: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    (folder / "model.safetensors").unlink()

    for model in (folder, folder / "config.json"):
        facts = model_facts(str(model), cache_dir=cache, hf_overrides=json.dumps(YARN))
        assert (facts.path, max_context_length(facts)) == (str(model), 256)


def test_model_part_configs_are_merged_and_other_objects_replaced() -> None:
    config: dict[str, Any] = {
        "text_config": {"hidden_size": 64, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "quantization_config": {"bits": 4, "group_size": 64},
        "vision_config": None,
    }

    found = merged(
        config,
        {
            "text_config": {"rope_scaling": {"type": "yarn"}},
            "quantization_config": {"bits": 8},
            "vision_config": {"depth": 2},
        },
    )

    assert found == {
        "text_config": {"hidden_size": 64, "rope_scaling": {"type": "yarn"}},
        "quantization_config": {"bits": 8},
        "vision_config": {"depth": 2},
    }
    assert config["text_config"]["rope_scaling"] == {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize("text", ["{", "[1]", "5", "null"])
def test_overrides_other_than_an_object_are_refused(text: str, folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--hf-overrides is .*, (it must be a JSON object|which is not JSON: )"
    ):
        resolve(EngineConfig(str(folder), hf_overrides=text))


def test_a_lone_surrogate_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has a lone surrogate at"):
        resolve(EngineConfig(str(folder), hf_overrides='{"x": "\\ud800"}'))


def test_a_field_of_another_type_is_refused_and_leaves_no_folder(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"

    with pytest.raises(ConfigError) as raised:
        with_overrides(str(folder), '{"num_hidden_layers": "two"}', str(cache))

    assert "num_hidden_layers" in str(raised.value)
    assert f"{folder}/config.json is 'two', it must be a int" in str(raised.value)
    assert list((cache / "hf-overrides").iterdir()) == []


def test_the_error_names_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    with pytest.raises(ConfigError, match=r"the overridden config\.json cannot be written"):
        with_overrides(str(folder), json.dumps(YARN), str(tmp_path / "cache"))

"""Unlisted models of transformers: which of them are served with images."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from strict_card import STRICT
from tiny_vision import make_tiny_vision
from two_prompts import working

from config.errors import ConfigError
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from hpu.backends.cpu import CpuBackend
from hpu.multimodal.select import served_facts
from hpu.multimodal.towers.merge_trial import image_merge_error


def read(name: str, folder: Path, architecture: str = "") -> ModelConfig:
    make_tiny_vision(name, folder, weights=False)
    if architecture:
        file = folder / "config.json"
        fields = json.loads(file.read_text())
        file.write_text(json.dumps({**fields, "architectures": [architecture]}))
    return read_model_config(str(folder))


@pytest.mark.parametrize(
    "name", ["llava_onevision", "lighton_ocr", "idefics2", "got_ocr2", "llava"]
)
def test_models_that_replace_image_token_rows_pass_the_merge_trial(
    name: str, tmp_path: Path
) -> None:
    assert image_merge_error(read(name, tmp_path)) == ""


def test_a_listed_model_is_not_marked_as_unlisted(tmp_path: Path) -> None:
    config = read("llava", tmp_path)
    assert config.vision is not None and not config.vision.is_unlisted


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        # Tokens around an image also have embeddings from the tower.
        ("ovis2", "cannot be run .* has no attribute 'visual_indicator_features'"),
        ("qwen2_vl", "positions with three axes"),
        ("gemma3", r"need token_type_ids beside the image embeddings"),
        ("mllama", "has no method that returns the image embeddings"),
    ],
)
def test_models_that_use_images_differently_fail_the_merge_trial_with_the_reason(
    name: str, reason: str, tmp_path: Path
) -> None:
    assert re.search(reason, image_merge_error(read(name, tmp_path)))


def test_a_card_with_fixed_shapes_serves_only_text_and_logs_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_vision("lighton_ocr", tmp_path)

    with working(tmp_path, device="hpu-emulator", emulator=STRICT) as rig:
        rig.admit(0, [5, 6, 7])
        rig.prefill({0: None})
        rig.step()

        assert rig.ready.encoder_cache_tokens == 0
        assert len(rig.free(0)) == 1
    assert "Images are not served" in caplog.text and "has no fixed shapes" in caplog.text


def test_the_reason_why_images_are_not_served_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read("ovis2", tmp_path)

    facts = served_facts(config, CpuBackend(1), is_native=True)

    assert facts.vision is None and config.vision is not None
    assert "Images are not served" in caplog.text and "Ovis2ForCond" in caplog.text


@pytest.mark.parametrize("is_unlisted", [True, False])
def test_a_model_unknown_to_transformers_is_read_as_its_text_model(
    is_unlisted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If `is_unlisted` is false, VISION_FAMILIES has the model, and the installed transformers is
    too old for it."""
    config = read("lighton_ocr", tmp_path, "NobodyKnowsForConditionalGeneration")
    assert config.vision is not None
    vision = replace(config.vision, is_unlisted=is_unlisted)

    facts = served_facts(replace(config, vision=vision), CpuBackend(1), is_native=True)

    assert facts.architecture == "Qwen3ForCausalLM" and facts.vision is None
    assert "has no NobodyKnowsForConditionalGeneration" in caplog.text


def test_an_unknown_text_model_is_an_error(tmp_path: Path) -> None:
    make_tiny_vision("lighton_ocr", tmp_path, weights=False)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    fields["text_config"]["model_type"] = "nobody"
    file.write_text(json.dumps(fields))

    with pytest.raises(ConfigError, match=r"text_config .* has the model_type 'nobody'"):
        read_model_config(str(tmp_path))

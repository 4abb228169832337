"""rope_scaling together with rope_parameters in config.json, compared with transformers in
float32."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference, random_prompts
from paged_harness import load_decoder
from releases import transformers_before
from tiny_models import make_tiny

from gaudiserve import LLM

ORIGINAL = "original_max_position_embeddings"
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"type": "yarn", "factor": 4.0, ORIGINAL: 64},
    "yarn, the original length outside": {"rope_type": "yarn", "factor": 4.0},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        ORIGINAL: 64,
    },
    "no scaling": {"rope_type": "default"},
}


def _checkpoint(folder: Path, scaling: dict[str, Any], theta: float, **more: Any) -> Path:
    """A checkpoint of transformers 5 to which a user added `scaling`."""
    make_tiny("llama", folder, max_position_embeddings=256)
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    file.write_text(json.dumps({**raw, "rope_scaling": scaling, **more}))
    return folder


@pytest.mark.skipif(transformers_before("5"), reason="transformers 4 has no rope_parameters")
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500.0])
@torch.inference_mode()
def test_tokens_equal_transformers(name: str, theta: float, tmp_path: Path) -> None:
    outside = {ORIGINAL: 32} if "outside" in name else {}
    folder = _checkpoint(tmp_path, SCALINGS[name], theta, **outside)
    prompts = random_prompts(67)

    found = greedy_by_pages(load_decoder(folder), prompts, 16)

    assert_same_as_transformers(found, prompts, load_reference(folder), 1e-3)


def test_the_log_names_fields_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _checkpoint(tmp_path, SCALINGS["yarn"], 500.0)

    with caplog.at_level(logging.WARNING), LLM(str(folder), device="cpu", dtype="float32"):
        pass

    (line,) = [text for text in caplog.messages if "differ: rope_scaling is used" in text]
    assert line.endswith("rope_type 'default', rope_theta 500.0")

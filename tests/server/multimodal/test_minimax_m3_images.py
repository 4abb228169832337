"""Images of MiniMax-M3 compared with the functions of transformers, whose class needs
torchvision."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import picture

from config.errors import ConfigError
from server.multimodal.families.base import ProcessorFiles
from server.multimodal.families.registry import prompt_form
from server.multimodal.image_processor import minimax_m3_processor

PACKAGE = "transformers.models.minimax_m3_vl"
IMAGE = "]<]image[>["


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    if "torchvision" not in sys.modules:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["torchvision.transforms.v2"].functional = None  # type: ignore[attr-defined]  # a stand-in
    module = f"{PACKAGE}.image_processing_minimax_m3_vl"
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"an older transformers lacks it: {error}")
    monkeypatch.delitem(sys.modules, module)
    return found


@pytest.mark.parametrize("size", [(60, 45), (1600, 900), (33, 7), (28, 280), (2000, 300)])
@pytest.mark.parametrize("options", [{}, {"size": [672, 672]}, {"max_pixels": 28 * 28 * 16}])
def test_patches_and_text_equal_transformers(
    options: dict[str, Any], size: tuple[int, int], theirs: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "minimax_m3_vl"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    image = picture(*size)

    arrays = minimax_m3_processor(options)(images=[image], return_tensors="np")
    text = prompt_form(ProcessorFiles.read(tmp_path, IMAGE)).text(arrays)

    kind = theirs.MiniMaxM3VLImageProcessor
    limits = {"min_pixels": kind.size["shortest_edge"], "max_pixels": kind.size["longest_edge"]}
    limits["max_pixels"] = options.get("max_pixels", limits["max_pixels"])
    height, width = theirs.smart_resize(size[1], size[0], 28, **limits)
    assert arrays["image_grid_thw"].tolist() == [[1, height // 14, width // 14]]
    pixels = np.asarray(image.resize((width, height), kind.resample), np.float32) / 255
    normed = (pixels - np.array(kind.image_mean)) / np.array(kind.image_std)
    whole = torch.from_numpy(normed).permute(2, 0, 1)[None].float()
    expected = kind.patchify(None, whole, 14, 2, 2)[0][0].numpy()
    assert np.allclose(arrays["pixel_values"], expected, atol=1e-5)
    processing = importlib.import_module(f"{PACKAGE}.processing_minimax_m3_vl")
    form = processing.MiniMaxM3VLProcessor
    names = ("IMAGE_TOKEN", "VISION_START_TOKEN", "VISION_END_TOKEN")
    self = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2))
    for name in names:
        setattr(self, name, getattr(form, name))
    given = {"image_grid_thw": torch.from_numpy(np.asarray(arrays["image_grid_thw"]))}
    assert text == form.replace_image_token(self, given, 0)


@pytest.mark.parametrize("fields", [{"max_pixels": "many"}, {"size": {"shortest_edge": -4}}])
def test_a_wrong_size_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a positive integer"):
        minimax_m3_processor(fields)

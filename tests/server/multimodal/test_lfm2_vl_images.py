"""Images of LFM2-VL compared with the functions of transformers, whose class needs torchvision."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import picture

from config.errors import ConfigError
from server.multimodal.families.base import ProcessorFiles
from server.multimodal.families.lfm2_vl import Lfm2VlImageProcessor, best_grid, grids
from server.multimodal.families.registry import prompt_form
from server.multimodal.image_processor import ImageProcessor
from server.multimodal.messages import Setup

MODULE = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
FIELDS = {"encoder_patch_size": 4, "tile_size": 32, "max_image_tokens": 16, "min_image_tokens": 4}
SIZES = [(1, 1), (640, 480), (33, 7), (2000, 300), (513, 1024), (90, 1800), (724, 725), (100, 100)]


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    pytest.importorskip("transformers.image_processing_backends")
    if "torchvision" in sys.modules:
        yield importlib.import_module(MODULE)
        return
    stand_ins = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    with pytest.MonkeyPatch.context() as patch:
        for name in stand_ins:
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[stand_ins[-1]].functional = None  # type: ignore[attr-defined]  # a stand-in
        yield importlib.import_module(MODULE)
    del sys.modules[MODULE]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_sizes_and_grids_equal_transformers(size: tuple[int, int], theirs: Any) -> None:
    width, height = size
    kind = theirs.Lfm2VlImageProcessor
    limits = {"max_image_tokens": 256, "encoder_patch_size": 16, "downsample_factor": 2}
    own = Lfm2VlImageProcessor({})

    is_large = kind._is_image_too_large(None, height, width, **limits, max_pixels_tolerance=2.0)
    assert own._is_large(size) == is_large
    fitted = kind.smart_resize(None, height, width, min_image_tokens=64, **limits)
    assert own.fitted(size) == fitted
    ratios = kind._target_ratios.__wrapped__(None, 2, 10)
    assert {grid[0] * grid[1] for grid in grids(2, 10)} == {ratio[0] * ratio[1] for ratio in ratios}
    expected = theirs.find_closest_aspect_ratio(width / height, ratios, width, height, 512)
    assert best_grid(size, grids(2, 10), 512) == expected


@pytest.mark.parametrize("size", [(60, 45), (200, 90), (30, 260)])
@pytest.mark.parametrize("options", [{}, {"use_thumbnail": False}, {"do_image_splitting": False}])
def test_patches_and_text_equal_transformers(
    options: dict[str, Any], size: tuple[int, int], theirs: Any, tmp_path: Path
) -> None:
    fields = {**FIELDS, **options}
    image = picture(*size)

    arrays = Lfm2VlImageProcessor(fields)(images=[image])

    rows, columns = arrays["image_rows"][0], arrays["image_cols"][0]
    shapes, mask = arrays["spatial_shapes"], arrays["pixel_attention_mask"]
    assert mask.sum(-1).tolist() == shapes.prod(-1).tolist()
    # The last tile is the whole image, unless the image is split and has no thumbnail.
    is_cut = rows * columns > 1
    has_whole = not is_cut or fields.get("use_thumbnail", True)
    assert len(shapes) == (rows * columns if is_cut else 0) + has_whole
    if has_whole:
        height, width = (4 * shapes[-1]).tolist()
        whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.float32)
        pixels = torch.from_numpy(whole / 127.5 - 1).permute(2, 0, 1)[None]
        expected = theirs.convert_image_to_patches(pixels, 4)[0].numpy()
        found = arrays["pixel_values"][-1]
        assert np.allclose(found[: len(expected)], expected, atol=1e-6)
        assert not found[len(expected) :].any()
    assert_text(fields, arrays, tmp_path)


def assert_text(fields: dict[str, Any], arrays: dict[str, Any], folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    (folder / "config.json").write_text('{"model_type": "lfm2_vl"}')
    form = prompt_form(ProcessorFiles.read(folder, "<image>"))
    kind = importlib.import_module("transformers.models.lfm2_vl.processing_lfm2_vl").Lfm2VlProcessor
    values = {"downsample_factor": 2, "use_thumbnail": True, **fields}
    self = SimpleNamespace(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
        image_processor=SimpleNamespace(**values),
    )
    rows, columns = arrays["image_rows"][0], arrays["image_cols"][0]
    tokens = (arrays["spatial_shapes"].prod(-1) // 4).tolist()

    found = form.text(arrays)

    given = (rows, columns, tokens[0], tokens[-1], values["use_thumbnail"], True)
    assert found == kind._build_image_tokens(self, *given)
    assert found.count("<image>") == sum(tokens)


@pytest.mark.parametrize("model_type", ["lfm2_vl", "lfm2-vl"])
def test_a_processed_image_has_the_inputs_of_the_tower(model_type: str, tmp_path: Path) -> None:
    """transformers 4.57 writes the second name, which published files have."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(FIELDS))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    answer = ImageProcessor(Setup(str(tmp_path), "<image>", {})).process(picture(200, 90))

    names = {tensor.name for tensor in answer.tensors}
    assert names == {"pixel_values", "spatial_shapes", "pixel_attention_mask"}
    assert answer.text.startswith("<|image_start|><|img_row_1_col_1|><image>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"min_tiles": 5, "max_tiles": 4},
            "min_tiles of the image processor is 5, it must be at most max",
        ),
        (
            {"tile_size": 500},
            "tile_size in preprocessor_config.json is 500, .* multiple of 32",
        ),
        ({"max_tiles": "ten"}, "max_tiles in preprocessor_config.json is 'ten'"),
    ],
)
def test_the_error_names_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lfm2VlImageProcessor(fields)

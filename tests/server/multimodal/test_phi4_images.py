"""Phi-4-multimodal's images: the tiles, masks and counts of transformers' image processor, with
torch functions in place of torchvision's."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import picture
from torch import Tensor
from torch.nn.functional import interpolate, pad

from config.errors import ConfigError
from server.multimodal.phi4_images import Phi4ImageProcessor

SIZES = [(300, 200), (448, 448), (449, 448), (1000, 333), (120, 900), (1500, 1000)]
MODULE = "transformers.models.phi4_multimodal.image_processing_phi4_multimodal"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' class, imported with a fake torchvision that has the functions that
    `_preprocess` calls."""
    # Import this first, so that it is loaded without torchvision.
    importlib.import_module("transformers.image_processing_backends")
    functional: Any = ModuleType("functional")
    functional.resize = lambda image, size: interpolate(
        image[None], size=size, mode="bilinear", antialias=True
    )[0]
    functional.pad = lambda image, sides, fill: pad(
        image, (sides[0], sides[2], sides[1], sides[3]), value=fill[0]
    )
    transforms: Any = ModuleType("v2")
    transforms.functional = functional
    for name, module in (
        ("torchvision", ModuleType("torchvision")),
        ("torchvision.transforms", ModuleType("transforms")),
        ("torchvision.transforms.v2", transforms),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    found = importlib.import_module(MODULE).Phi4MultimodalImageProcessor
    # Remove the module, so that other tests do not find it.
    monkeypatch.delitem(sys.modules, MODULE)
    return found


def by_transformers(kind: Any, image: Image.Image, side: int, most: int) -> Any:
    def normalized(pixels: Tensor, *given: Any) -> Tensor:
        return (pixels.float() - 127.5) / 127.5

    def squared(pixels: Tensor, size: Any, **options: Any) -> Tensor:
        return interpolate(pixels[None], size=(size.height, size.width), mode="bicubic")[0]

    self = SimpleNamespace(rescale_and_normalize=normalized, resize=squared)
    for name in ("find_closest_aspect_ratio", "dynamic_preprocess", "pad_to_max_num_crops",
                 "pad_mask_to_max_num_crops"):  # fmt: skip
        setattr(self, name, getattr(kind, name).__get__(self))
    return kind._preprocess(
        self,
        [torch.from_numpy(np.array(image)).permute(2, 0, 1)],
        do_resize=True,
        size=SimpleNamespace(height=side, width=side),
        resample=None,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        patch_size=14,
        dynamic_hd=most,
        return_tensors=None,
    )


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize(("side", "most"), [(448, 36), (448, 4), (56, 36)])
def test_images_equal_transformers(
    theirs: Any, size: tuple[int, int], side: int, most: int
) -> None:
    image = picture(*size)
    fields = {"size": {"height": side, "width": side}, "dynamic_hd": most}

    found = Phi4ImageProcessor(fields)(images=[image])

    expected = by_transformers(theirs, image, side, most)
    for name in ("image_attention_mask", "image_sizes"):
        assert np.array_equal(found[name], expected[name])
    pixels, expected_pixels = found["image_pixel_values"], expected["image_pixel_values"].numpy()
    assert pixels.shape == expected_pixels.shape and pixels.dtype == np.float32
    # Pillow and torch sometimes round a resized pixel differently by one gray level, which cubic
    # interpolation may amplify.
    levels = np.abs(pixels - expected_pixels) * 127.5
    assert levels.max() < 1.4 and levels.mean() < 0.3
    # transformers counts 256 patches, 16 rows and one separator for any crop size.
    half = side // 28
    assert found["num_img_tokens"][0] - half * (half + 1) == (
        expected["num_img_tokens"][0] - 16 * 17
    )


def test_an_image_with_an_extreme_aspect_ratio_is_refused() -> None:
    processor = Phi4ImageProcessor({"size": {"height": 56, "width": 56}})

    with pytest.raises(
        ValueError, match="its aspect ratio is too large: it would be resized to 2016 x 4"
    ):
        processor(images=[Image.new("RGB", (2240, 5))])


def test_crops_other_than_squares_are_refused() -> None:
    with pytest.raises(ConfigError, match="height and width must be equal"):
        Phi4ImageProcessor({"size": {"height": 56, "width": 28}})

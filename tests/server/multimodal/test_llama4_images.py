"""Llama 4's images: the canvases of transformers' examples, and the order of tiles."""

import numpy as np
import pytest
from PIL import Image
from tiny_vision import picture

from config.errors import ConfigError
from server.multimodal.llama4_images import Llama4ImageProcessor, best_fit, canvases, fitted


def test_canvases_equal_the_examples_of_transformers() -> None:
    four = canvases(4, 224)

    assert {(h // 224, w // 224) for h, w in four} == {
        *((1, 4), (2, 2), (4, 1), (1, 3), (3, 1), (1, 2), (2, 1), (1, 1)),
    }
    assert four.index((448, 448)) + 1 == four.index((224, 224))


@pytest.mark.parametrize(
    ("size", "to_max", "expected"),
    [
        ((200, 300), False, (224, 448)),
        ((1000, 1000), False, (448, 448)),
        ((50, 50), False, (224, 224)),
        ((50, 50), True, (448, 448)),
        ((100, 900), False, (224, 896)),
    ],
)
def test_the_best_canvas_is_chosen(
    size: tuple[int, int], to_max: bool, expected: tuple[int, int]
) -> None:
    assert best_fit(size, canvases(4, 224), to_max=to_max) == expected


def test_the_resized_image_keeps_its_aspect_ratio_and_is_rounded_down() -> None:
    assert fitted((200, 300), (450, 200)) == (133, 200)
    assert fitted((800, 600), (450, 1300)) == (450, 337)


def test_tiles_are_ordered_by_rows_and_the_whole_image_is_last() -> None:
    image = Image.new("RGB", (112, 112))
    for index in range(4):
        shade = (60 * index, 0, 255)
        corner = (index % 2 * 56, index // 2 * 56)
        image.paste(shade, (*corner, corner[0] + 56, corner[1] + 56))
    processor = Llama4ImageProcessor({"size": {"height": 56, "width": 56}, "max_patches": 4})

    found = processor(images=[image])

    tiles = found["pixel_values"]
    assert found["aspect_ratios"] == [(2, 2)] and tiles.shape == (5, 3, 56, 56)
    assert tiles.dtype == np.float32
    for index in range(4):
        assert np.allclose(tiles[index, 0], 60 * index / 127.5 - 1, atol=1e-6)
        assert np.allclose(tiles[index, 2], 1)
    assert np.allclose(tiles[4, 0, 10, 10], -1) and np.allclose(
        tiles[4, 0, 50, 50], 180 / 127.5 - 1
    )


def test_a_small_image_is_one_tile_padded_with_black() -> None:
    processor = Llama4ImageProcessor({"size": {"height": 56, "width": 56}, "max_patches": 4})

    tiles = processor(images=[picture(56, 20)])["pixel_values"]

    assert tiles.shape == (1, 3, 56, 56)
    assert np.all(tiles[0, :, 20:] == -1) and np.any(tiles[0, :, :20] > -1)


def test_tiles_other_than_squares_are_refused() -> None:
    with pytest.raises(ConfigError, match="height and width must be equal"):
        Llama4ImageProcessor({"size": {"height": 56, "width": 28}})

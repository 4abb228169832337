"""Port of transformers' Llama4ImageProcessor without torchvision: tiles of equal size on the
best-fitting canvas and, after several tiles, the whole image as a tile."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from config.json_text import Json
from server.multimodal.processor_fields import channels, processor_fields, resampling, side

Size = tuple[int, int]
"""(height, width)"""
MAX_TILES = 256
"""Limit on the tiles of an image; published checkpoints have 16."""


class Llama4ImageProcessor:
    """Callable like the image processors of transformers, for Pillow images."""

    def __init__(self, fields: Json) -> None:
        """`fields`: preprocessor_config.json with overrides. Raises ConfigError."""
        read = processor_fields(fields)
        self._side = side(read, 336)
        self._to_max = read.get("resize_to_max_canvas", bool, False)
        self._mean = channels(read, "image_mean", 0.5)
        self._deviation = channels(read, "image_std", 0.5, above=0.0)
        self._resample = resampling(read)
        self._canvases = canvases(read.count("max_patches", 16, maximum=MAX_TILES), self._side)

    def __call__(self, images: Sequence[Image.Image], **options: Any) -> dict[str, Any]:
        """Preprocess an image to pixel_values (tiles, 3, side, side) and aspect_ratios (rows and
        columns of tiles)."""
        (image,) = images
        canvas = best_fit((image.height, image.width), self._canvases, to_max=self._to_max)
        target = canvas
        if not self._to_max:
            # An image smaller than a tile is scaled up to a tile at most.
            target = (
                min(max(image.height, self._side), canvas[0]),
                min(max(image.width, self._side), canvas[1]),
            )
        height, width = fitted((image.height, image.width), target)
        whole = Image.new("RGB", (canvas[1], canvas[0]))
        whole.paste(image.resize((width, height), self._resample))
        rows, columns = canvas[0] // self._side, canvas[1] // self._side
        pixels = self._normalized(whole).reshape(3, rows, self._side, columns, self._side)
        tiles = pixels.transpose(1, 3, 0, 2, 4).reshape(-1, 3, self._side, self._side)
        if len(tiles) > 1:
            small = image.resize((self._side, self._side), self._resample)
            tiles = np.concatenate([tiles, self._normalized(small)[None]])
        return {"pixel_values": tiles, "aspect_ratios": [(rows, columns)]}

    def _normalized(self, image: Image.Image) -> np.ndarray[Any, np.dtype[Any]]:
        pixels = np.asarray(image, np.float32) / 255
        normalized: np.ndarray[Any, np.dtype[Any]] = (pixels - self._mean) / self._deviation
        return np.transpose(normalized, (2, 0, 1))


def canvases(max_tiles: int, side: int) -> list[Size]:
    """All canvas sizes of up to `max_tiles` tiles, grouped by aspect ratio."""
    by_ratio: dict[float, list[Size]] = {}
    for count in range(max_tiles, 0, -1):
        for rows in (divisor for divisor in range(1, count + 1) if count % divisor == 0):
            columns = count // rows
            by_ratio.setdefault(rows / columns, []).append((rows * side, columns * side))
    return [size for sizes in by_ratio.values() for size in sizes]


def best_fit(size: Size, choices: Sequence[Size], *, to_max: bool) -> Size:
    """The canvas to which an image of `size` is scaled with the smallest factor of at least 1; if
    every factor is below 1, or with `to_max`, with the largest factor. Ties go to the smallest
    canvas."""
    sides = np.array(choices, np.float32)
    scales = np.min(sides / np.array(size, np.float32), axis=1)
    larger = scales[scales >= 1]
    scale = larger.min() if len(larger) and not to_max else scales.max()
    return min(
        (choice for choice, candidate in zip(choices, scales, strict=True) if candidate == scale),
        key=lambda choice: choice[0] * choice[1],
    )


def fitted(size: Size, target: Size) -> Size:
    """The largest size within `target` that keeps the aspect ratio."""
    (height, width), (most_height, most_width) = size, target
    by_height, by_width = most_height / height, most_width / width
    if by_width < by_height:
        return max(min(math.floor(height * by_width), most_height), 1), most_width
    return most_height, max(min(math.floor(width * by_height), most_width), 1)

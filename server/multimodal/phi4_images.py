"""Port of transformers' Phi4MultimodalImageProcessor without torchvision: the whole image as a
tile, then crops of equal size in rows and columns, padded with white."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from config.json_text import Json
from server.multimodal.processor_fields import channels, processor_fields, side

Floats = np.ndarray[Any, np.dtype[np.float32]]
MAX_CROPS = 256
"""Limit on the crops of an image; published checkpoints have 36."""
MIN_SIDE = 10
"""Minimum pixels of the shorter side of a resized image."""
_SHARPNESS = -0.75
"""Coefficient `a` of the cubic convolution kernel, as in torch."""


class Phi4ImageProcessor:
    """Callable like the image processors of transformers, for Pillow images."""

    def __init__(self, fields: Json) -> None:
        """`fields`: preprocessor_config.json with overrides. Raises ConfigError."""
        read = processor_fields(fields)
        self._side = side(read, 448)
        self._patch = read.count("patch_size", 14, maximum=self._side)
        self._most = read.count("dynamic_hd", 36, maximum=MAX_CROPS)
        self._mean = channels(read, "image_mean", 0.5)
        self._deviation = channels(read, "image_std", 0.5, above=0.0)

    def __call__(self, images: Sequence[Image.Image], **options: Any) -> dict[str, Any]:
        """Preprocess an image to image_pixel_values (1, tiles, 3, side, side); image_sizes (1, 2),
        height and width including padding; image_attention_mask (1, tiles, rows, columns), 0 for
        padding patches; and num_img_tokens, the number of its embeddings."""
        (image,) = images
        columns, rows = self._grid(image.width, image.height)
        width, height = columns * self._side, rows * self._side
        padded, mask = self._padded(image, width, height)
        pixels = np.transpose(np.asarray(padded, np.float32), (2, 0, 1))
        mean, deviation = (
            channels[:, None, None] * 255 for channels in (self._mean, self._deviation)
        )
        pixels = ((pixels - mean) / deviation).astype(np.float32)
        whole = resized(pixels, self._side, self._side)
        tiles = _crops(pixels, rows, columns)
        num_patches = self._side // self._patch
        masks = _crops(mask[None], rows, columns)[:, 0]
        seen = mask_rows(masks[:, ::2, ::2], rows, columns)
        half = -(-num_patches // 2)
        count = half * (half + 1) + 1 + int(seen.sum()) + int(seen[:, 0].sum())
        all_masks = np.concatenate([np.ones((1, num_patches, num_patches), np.float32), masks])
        return {
            "image_pixel_values": np.concatenate([whole[None], tiles])[None],
            "image_sizes": np.array([[height, width]], np.int64),
            "image_attention_mask": all_masks[None],
            "num_img_tokens": [count],
        }

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows) of crops."""
        columns, rows = math.ceil(width / self._side), math.ceil(height / self._side)
        if columns * rows <= self._most:
            return columns, rows
        return closest_grid(width, height, self._side, self._most)

    def _padded(self, image: Image.Image, width: int, height: int) -> tuple[Image.Image, Floats]:
        """The image resized and padded to width x height pixels without distortion, and the mask of
        its patches."""
        by_width, by_height = width / image.width, height / image.height
        if by_width < by_height:
            size = (width, int(image.height * by_width))
        else:
            size = (int(image.width * by_height), height)
        if min(size) < MIN_SIDE:
            raise ValueError(
                f"its aspect ratio is too large: it would be resized to {size[0]} x {size[1]}"
            )
        mask = np.ones((height // self._patch, width // self._patch), np.float32)
        right, below = (width - size[0]) // self._patch, (height - size[1]) // self._patch
        mask[:, mask.shape[1] - right :] = 0
        mask[mask.shape[0] - below :] = 0
        padded = Image.new("RGB", (width, height), (255, 255, 255))
        padded.paste(image.resize(size, Image.Resampling.BILINEAR))
        return padded, mask


def closest_grid(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """(columns, rows) of at most `most` crops whose aspect ratio is closest to the image's. A later
    grid wins a tie if the image has more than half of the grid's pixels."""
    # Grids with the same number of crops keep the order of the set, as in transformers.
    grids = sorted(
        {
            (i, j)
            for n in range(1, most + 1)
            for i in range(1, n + 1)
            for j in range(1, n + 1)
            if 1 <= i * j <= most
        },
        key=lambda grid: grid[0] * grid[1],
    )
    best, least = (1, 1), float("inf")
    for grid in grids:
        difference = abs(width / height - grid[0] / grid[1])
        fills = width * height > 0.5 * side * side * grid[0] * grid[1]
        if difference < least or (difference == least and fills):
            best, least = grid, difference
    return best


def mask_rows(masks: Floats, rows: int, columns: int) -> Floats:
    """Arrange crops (crops, height, width) as in the image: (rows * height, columns * width)."""
    _, height, width = masks.shape
    grid = np.swapaxes(masks.reshape(rows, columns, height, width), 1, 2)
    return np.reshape(grid, (rows * height, columns * width))


def resized(pixels: Floats, height: int, width: int) -> Floats:
    """Resize (channels, height, width) with bicubic interpolation as in torch, without
    antialiasing."""
    down = _taps(pixels.shape[1], height)
    across = _taps(pixels.shape[2], width)
    found = sum(weights[:, None] * pixels[:, places] for places, weights in zip(*down, strict=True))
    found = sum(weights * found[:, :, places] for places, weights in zip(*across, strict=True))
    return np.asarray(found, np.float32)


def _taps(source: int, target: int) -> tuple[Any, Any]:
    """Source indices (4, target) of each target pixel, and their weights (4, target)."""
    centers = ((np.arange(target) + 0.5) * (source / target) - 0.5).astype(np.float32)
    first = np.floor(centers).astype(np.int64)
    distances = np.abs(centers - first + np.array([[1.0], [0.0], [-1.0], [-2.0]], np.float32))
    near = ((_SHARPNESS + 2) * distances - (_SHARPNESS + 3)) * distances**2 + 1
    far = ((_SHARPNESS * (distances - 5)) * distances + 8 * _SHARPNESS) * distances - 4 * _SHARPNESS
    places = np.clip(first + np.arange(-1, 3)[:, None], 0, source - 1)
    return places, np.where(distances <= 1, near, far).astype(np.float32)


def _crops(grid: Floats, rows: int, columns: int) -> Floats:
    """(channels, rows * height, columns * width) to (rows * columns, channels, height, width)."""
    channels, height, width = grid.shape
    parts = grid.reshape(channels, rows, height // rows, columns, width // columns)
    shape = (rows * columns, channels, height // rows, width // columns)
    return np.reshape(np.transpose(parts, (1, 3, 0, 2, 4)), shape)

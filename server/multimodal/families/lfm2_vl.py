"""LFM2-VL: a large image is cut into tiles of equal size in rows and columns, optionally followed
by the whole image. The prompt text, and a port of transformers' Lfm2VlImageProcessor without
torchvision."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from config.errors import ConfigError
from config.json_text import Json
from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles
from server.multimodal.processor_fields import (
    MAX_IMAGE_TOKENS,
    MAX_SIDE,
    channels,
    processor_fields,
    resampling,
)

Size = tuple[int, int]
"""(width, height), or (columns, rows)."""
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

MAX_TILES = 100
"""Limit on the tiles of an image; published checkpoints have 10. Listing the grids takes
cubic time."""

_COUNTS: Mapping[str, tuple[int, int]] = {
    "downsample_factor": (2, MAX_SIDE),
    "min_tiles": (2, MAX_TILES),
    "max_tiles": (10, MAX_TILES),
    "min_image_tokens": (64, MAX_IMAGE_TOKENS),
    "max_image_tokens": (256, MAX_IMAGE_TOKENS),
    "encoder_patch_size": (16, MAX_SIDE),
    "tile_size": (512, MAX_SIDE),
}
"""Field -> (default, maximum)."""


class Lfm2VlForm(NoGrid):
    """Prompt text of LFM2-VL. If the image has several tiles, a token with row and column precedes
    each tile, and a token precedes the whole image. With use_image_special_tokens false, the text
    has only image tokens."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        self._factor = files.count("downsample_factor", files.config.get("downsample_factor"), 2)
        self._has_marks = files.flag("use_image_special_tokens", True)
        self._start = files.token("image_start_token", "<|image_start|>")
        self._end = files.token("image_end_token", "<|image_end|>")
        self._thumbnail = files.token("image_thumbnail_token", "<|img_thumbnail|>")

    def text(self, arrays: Arrays) -> str:
        shapes = np.asarray(arrays["spatial_shapes"])
        tokens = [self.mark * int(count) for count in shapes.prod(-1) // self._factor**2]
        if not self._has_marks:
            return "".join(tokens)
        rows, columns = (int(arrays[name][0]) for name in ("image_rows", "image_cols"))
        marks = [
            f"<|img_row_{row + 1}_col_{column + 1}|>"
            for row in range(rows)
            for column in range(columns)
        ]
        marks = [*marks, self._thumbnail] if len(marks) > 1 else [""]
        # Without a thumbnail, the last mark has no tile.
        body = "".join(mark + tile for mark, tile in zip(marks, tokens, strict=False))
        return f"{self._start}{body}{self._end}"


class Lfm2VlImageProcessor:
    """Callable like the image processors of transformers, for Pillow images. Each tile becomes a
    list of patches."""

    def __init__(self, fields: Json) -> None:
        """`fields`: preprocessor_config.json with overrides. Raises ConfigError."""
        read = processor_fields(fields)
        numbers = {
            name: read.count(name, default, maximum=maximum)
            for name, (default, maximum) in _COUNTS.items()
        }
        self._patch, self._tile = numbers["encoder_patch_size"], numbers["tile_size"]
        # Sides are multiples of the side of the square of patches that is merged into a token.
        self._unit = self._patch * numbers["downsample_factor"]
        if self._tile % self._unit:
            raise ConfigError(
                f"tile_size in {read.file} is {self._tile}, it must be a multiple of {self._unit}"
            )
        self._min_pixels = numbers["min_image_tokens"] * self._unit**2
        self._max_pixels = numbers["max_image_tokens"] * self._unit**2
        self._tolerance = read.number("max_pixels_tolerance", 2.0, above=0.0)
        low, high = numbers["min_tiles"], numbers["max_tiles"]
        self._grids = grids(low, high)
        self._splits = read.get("do_image_splitting", bool, True) and not low == high == 1
        self._has_thumbnail = read.get("use_thumbnail", bool, True)
        self._mean = channels(read, "image_mean", 0.5)
        self._deviation = channels(read, "image_std", 0.5, above=0.0)
        self._resample = resampling(read)

    def __call__(self, images: Sequence[Image.Image], **options: object) -> Json:
        """Preprocess an image to pixel_values (tiles, patches, numbers), padded to the tile with
        most patches; spatial_shapes (tiles, 2) in patches; pixel_attention_mask (tiles, patches);
        and image_rows and image_cols of tiles. The last tile may be the whole image."""
        (image,) = images
        columns = rows = 1
        tiles: list[Image.Image] = []
        if self._splits and self._is_large(image.size):
            columns, rows = best_grid(image.size, self._grids, self._tile)
            side = self._tile
            whole = image.resize((columns * side, rows * side), self._resample)
            tiles = [
                whole.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
                for y in range(rows)
                for x in range(columns)
            ]
        if not tiles or (self._has_thumbnail and len(tiles) > 1):
            tiles.append(image.resize(self.fitted(image.size), self._resample))
        patches = [self._patches(tile) for tile in tiles]
        counts = [len(patch) for patch in patches]
        pixels = np.zeros((len(tiles), max(counts), patches[0].shape[1]), np.float32)
        for tile, own in zip(pixels, patches, strict=True):
            tile[: len(own)] = own
        shapes = [(tile.height // self._patch, tile.width // self._patch) for tile in tiles]
        return {
            "pixel_values": pixels,
            "spatial_shapes": np.array(shapes, np.int64),
            "pixel_attention_mask": np.arange(max(counts)) < np.array(counts)[:, None],
            "image_rows": [rows],
            "image_cols": [columns],
        }

    def fitted(self, size: Size) -> Size:
        """Size to which the whole image is resized: an image that is not cut into tiles, or the
        thumbnail."""
        (width, height), unit = size, self._unit
        new = tuple(max(unit, round(side / unit) * unit) for side in size)
        if new[0] * new[1] > self._max_pixels:
            shrinks = math.sqrt(height * width / self._max_pixels)
            new = tuple(max(unit, math.floor(side / shrinks / unit) * unit) for side in size)
        elif new[0] * new[1] < self._min_pixels:
            grows = math.sqrt(self._min_pixels / (height * width))
            new = tuple(math.ceil(side * grows / unit) * unit for side in size)
        return new[0], new[1]

    def _is_large(self, size: Size) -> bool:
        width, height = (max(self._patch, round(side / self._unit) * self._unit) for side in size)
        return width * height > self._max_pixels * self._tolerance

    def _patches(self, image: Image.Image) -> Array:
        """(patches, values), row by row; each patch has its pixels row by row, with the channels
        last."""
        pixels = (np.asarray(image, np.float32) / 255 - self._mean) / self._deviation
        rows, columns = image.height // self._patch, image.width // self._patch
        grid = pixels.reshape(rows, self._patch, columns, self._patch, 3)
        patches: Array = grid.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
        return patches.astype(np.float32)


def grids(low: int, high: int) -> list[Size]:
    """All grids of `low` to `high` tiles, by increasing number of tiles. Raises ConfigError."""
    if low > high:
        raise ConfigError(
            f"min_tiles of the image processor is {low}, it must be at most max_tiles, {high}"
        )
    sizes = {
        (columns, rows)
        for count in range(low, high + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if low <= columns * rows <= high
    }
    return sorted(sizes, key=lambda size: size[0] * size[1])


def best_grid(size: Size, choices: Sequence[Size], side: int) -> Size:
    """The grid whose aspect ratio is closest to the image's. If several grids are equally close,
    the last grid whose area the image fills by more than half, or else the first grid."""
    width, height = size
    best, difference = (1, 1), math.inf
    for columns, rows in choices:
        own = abs(width / height - columns / rows)
        fills = width * height > 0.5 * side * side * columns * rows
        if own < difference or (own == difference and fills):
            best, difference = (columns, rows), own
    return best


FORMS: Mapping[str, MakeForm] = {
    # transformers 4.57 writes lfm2-vl.
    **dict.fromkeys(("Lfm2VlProcessor", "lfm2_vl", "lfm2-vl"), Lfm2VlForm),
}

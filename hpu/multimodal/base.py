"""Tower: a vision tower. Tiles, Patches and WholeImages: implementations of a tower in fixed
shapes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.base import WeightMap

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


Shapes = tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
"""Shapes and dtypes of a tower's inputs; dtype None: integers."""


class Tiles(Protocol):
    """A tower whose images consist of tiles of equal size."""

    shapes: Shapes
    """Inputs of `features` for a single tile."""
    is_for_all_devices: bool
    """Whether this implementation also runs on devices that do not compile, which otherwise run the
    forward pass of transformers."""

    @property
    def separators(self) -> Tensor | None:
        """(n, hidden) embeddings that separate the embeddings of tiles (row ends, for example) and
        are equal for all images; None if the model has no separators."""
        ...

    def features(self, *inputs: Tensor) -> Tensor:
        """Embeddings (n, rows, hidden) of n tiles. Inputs: (n, ...) each, on the device."""
        ...

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Inputs of `features` for the tiles of an image, on the host. Raises RuntimeError for
        images that the tower does not support."""
        ...

    def layout(self, tensors: Mapping[str, Tensor], num_tiles: int, num_rows: int) -> Integers:
        """Indices of the image's embeddings, in order, among the embeddings of all its tiles; -1
        for the first separator, -2 for the second."""
        ...


PAD_SEGMENT = -1
"""Segment id of padding patches, which attend only to each other."""

MASKED = -1e30
"""Added to the attention scores of masked patches. Finite in bfloat16 and float32, because a row
may be masked completely."""


def segment_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask (n, n) for `segments` (n): patches attend to patches of the same segment."""
    return torch.where(segments.unsqueeze(1) == segments, 0.0, MASKED).to(dtype)


class PatchInput(NamedTuple):
    """An input that a tower reads for each patch."""

    shape: tuple[int, ...]
    is_index: bool = True
    """Whether the input holds integers; if False, numbers in the dtype of the tower."""
    padding: int = 0


Prepared = tuple[Mapping[str, Tensor], Integers]
"""Host tensors of an image, and its rows of the cache."""


def in_squares(grid: Tensor, side: int) -> Tensor:
    """Reorder (rows, columns, n) to (rows * columns, n), square by square of `side` x `side`."""
    rows, columns, width = grid.shape
    squares = grid.reshape(rows // side, side, columns // side, side, width)
    return squares.transpose(1, 2).reshape(-1, width)


class Patches(Protocol):
    """A tower whose images have a varying number of patches."""

    merged: int
    """Patches per embedding."""
    dtype: torch.dtype
    inputs: tuple[PatchInput, ...]
    """Inputs of `features`."""

    def features(self, *inputs: Tensor) -> Tensor:
        """Embeddings (n / merged, k * hidden), where k is VisionFacts.embeddings_per_row. Inputs:
        (n, ...) each for n patches, on the device."""
        ...

    def parts(self, tensors: Mapping[str, Tensor], rows: Integers) -> list[Prepared]:
        """Split an image into parts that do not attend to each other, each with its rows. A tower
        that does not separate parts returns the image unchanged."""
        return [(tensors, rows)]

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Integers]:
        """Inputs of `features` for an image, on the host, and the index in the image of each
        embedding that `features` returns. Raises RuntimeError for images that the tower does not
        support."""
        ...


class WholeImages(Protocol):
    """A tower whose images all have the same shape and are not divided."""

    shapes: Shapes
    """Inputs of `features`."""

    def features(self, *inputs: Tensor) -> Tensor:
        """Embeddings (rows, k * hidden) of an image, on the device; k as in Patches.features."""
        ...

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Inputs of `features`, on the host. Raises RuntimeError for images that the tower does not
        support."""
        ...


class Tower(nn.Module):
    """A vision tower and its projector, filled from a checkpoint and replicated on every rank.
    Exactly one of `tiles`, `patches` and `whole_images` returns an object on a device that compiles
    each shape."""

    weight_map: WeightMap
    dtype: torch.dtype

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Embeddings (rows, n * hidden) of an image, where n is VisionFacts.embeddings_per_row.
        `tensors`: outputs of the image processor, by the names of the tower's arguments."""
        raise NotImplementedError

    def tiles(self) -> Tiles | None:
        """Tile implementation; None unless images consist of tiles of equal size."""
        return None

    def patches(self) -> Patches | None:
        """Patch implementation; None unless the number of patches varies between images."""
        return None

    def whole_images(self) -> WholeImages | None:
        """Whole-image implementation; None unless all images have the same shape."""
        return None


class ImageEncoder(Protocol):
    """Runs a tower and writes the embeddings to the cache."""

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """Compile the encoder, on a device that compiles. `on_capture` receives the bytes of each
        graph."""
        return

    def encode(self, images: list[Prepared]) -> None:
        """Write the embeddings of the images to their rows. For an image that the encoder cannot
        run, raises RuntimeError or writes NaN (OwnShapes)."""
        ...

"""Tower: what makes embeddings of images."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.base import WeightMap

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


Shapes = tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
"""Of inputs of a tower, and their dtypes; None: integers."""


class Tiles(Protocol):
    """A tower whose images consist of tiles of one size."""

    shapes: Shapes
    """Of the inputs of `features`, for one tile."""
    is_for_all_devices: bool
    """Images are computed by it on a CPU too, where others run the forward pass of transformers."""

    @property
    def separators(self) -> Tensor | None:
        """(n, hidden): embeddings between those of tiles, which are the same for all images: ends
        of rows, for example. None: there are none."""
        ...

    def features(self, *inputs: Tensor) -> Tensor:
        """(n, ...) each on the device, for n tiles, to (n, rows, hidden)."""
        ...

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The inputs of `features` for the tiles of one image, on the host. RuntimeError for other
        images."""
        ...

    def layout(self, tensors: Mapping[str, Tensor], num_tiles: int, num_rows: int) -> Integers:
        """Of the embeddings of its tiles, numbered through, those that the image has, in order; -1
        for the first of the separators, -2 for the second."""
        ...


PAD_SEGMENT = -1
"""Of patches that are padding: they see each other alone."""

MASKED = -1e30
"""Is added to the scores of what is not seen. Not infinite: a row may see nothing."""


def segment_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, n) of `segments` (n): patches of one segment see each other."""
    return torch.where(segments.unsqueeze(1) == segments, 0.0, MASKED).to(dtype)


class PatchInput(NamedTuple):
    """What a tower reads of each patch."""

    shape: tuple[int, ...]
    is_index: bool = True
    """Integers; else numbers in the dtype of the tower."""
    padding: int = 0


class Patches(Protocol):
    """A tower whose images have any number of patches."""

    merged: int
    """Patches of one embedding."""
    dtype: torch.dtype
    inputs: tuple[PatchInput, ...]
    """Of `features`."""

    def features(self, *inputs: Tensor) -> Tensor:
        """(n, ...) each on the device, for n patches, to (n / merged, n * hidden)."""
        ...

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Integers]:
        """The inputs of `features` on the host, for one image; and for each embedding that it
        gives, which of the image's it is. RuntimeError for other images."""
        ...


class WholeImages(Protocol):
    """A tower whose images have one shape, and are not divided."""

    shapes: Shapes
    """Of the inputs of `features`."""

    def features(self, *inputs: Tensor) -> Tensor:
        """Of one image, on the device: (rows, n * hidden)."""
        ...

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The inputs of `features` on the host. RuntimeError for other images."""
        ...


class Tower(nn.Module):
    """A vision tower and its projector, which a checkpoint fills. Each rank has the whole of it.
    One of `tiles`, `patches` and `whole_images` is set, for a device that compiles each shape."""

    weight_map: WeightMap
    dtype: torch.dtype

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(rows, n * hidden) of one image, n being VisionFacts.embeddings_per_row, from
        what its image processor gives, by the names of the tower's arguments."""
        raise NotImplementedError

    def tiles(self) -> Tiles | None:
        """Set where images consist of tiles of one size."""
        return None

    def patches(self) -> Patches | None:
        """Set where images have any number of patches."""
        return None

    def whole_images(self) -> WholeImages | None:
        """Set where images have one shape."""
        return None

"""Tower: what makes embeddings of images."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.base import WeightMap

NEWLINE = -1
"""In Tiles.layout: the embedding that ends a row of an image."""
TILED = frozenset(("gemma3", "idefics3", "internvl", "llava", "llava_next", "smolvlm"))
"""model_type of the models whose images consist of tiles of one size, which devices need that
compile each shape."""

PATCHED = frozenset(("qwen2_vl", "qwen2_5_vl"))
"""Likewise, of those whose images have any number of patches."""

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Tiles(Protocol):
    """A tower whose images consist of tiles of one size."""

    shape: tuple[int, int, int]
    """Channels, height and width."""
    dtype: torch.dtype

    @property
    def newline(self) -> Tensor | None:
        """(hidden): the embedding that ends a row, where there is one."""
        ...

    def features(self, pixels: Tensor) -> Tensor:
        """(n, *shape) on the device to (n, rows, hidden)."""
        ...

    def pixels(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tiles (n, *shape) of one image, on the host. RuntimeError for other images."""
        ...

    def layout(self, tensors: Mapping[str, Tensor], num_tiles: int, num_rows: int) -> Integers:
        """Of the embeddings of its tiles, numbered through, those that the image has, in order; and
        NEWLINE."""
        ...


class Patches(Protocol):
    """A tower whose images have any number of patches."""

    merged: int
    """Patches of one embedding."""
    width: int
    """Numbers of a patch."""
    dtype: torch.dtype

    def features(
        self, pixels: Tensor, positions: Tensor, segments: Tensor, windows: Tensor
    ) -> Tensor:
        """(n, width), (n, 2), (n) and (n) on the device to (n / merged, hidden). Patches with the
        same number in `segments` see each other, in some layers those with the same in
        `windows`."""
        ...

    def prepare(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Integers]:
        """The inputs of `features` on the host, for one image; and for each embedding that it
        gives, which of the image's it is. RuntimeError for other images."""
        ...


class Tower(nn.Module):
    """A vision tower and its projector, which a checkpoint fills. Each rank has the whole of it."""

    weight_map: WeightMap
    dtype: torch.dtype

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(embeddings, hidden) of one image, from what its image processor gives, by the names of
        the tower's arguments."""
        raise NotImplementedError

    def tiles(self) -> Tiles | None:
        """Set for a model that is TILED."""
        return None

    def patches(self) -> Patches | None:
        """Set for a model that is PATCHED."""
        return None

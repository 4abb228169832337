"""PatchEncoder: images of any number of patches on a device that compiles each shape, one image in
a launch, padded to a fixed number of patches."""

import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.multimodal.base import Integers, Patches
from hpu.multimodal.device_launches import DeviceLaunches
from hpu.multimodal.encoder_cache import EncoderCache
from hpu.multimodal.tile_encoder import Prepared, check_count

logger = logging.getLogger(__name__)

DEFAULT_SIZES = (256, 576, 1024, 1600, 3136, 6400, 12544)
"""Patches in a launch."""


class PatchEncoder:
    """Runs each image in the smallest of `sizes` that holds it, and each time of a video as an
    image: they do not see each other. A larger image than all of them runs in a multiple of the
    largest, which compiles when it comes first."""

    def __init__(
        self,
        patches: Patches,
        cache: EncoderCache,
        backend: Backend,
        sizes: tuple[int, ...],
        *,
        multiplier: float,
        captures: bool,
    ) -> None:
        """`sizes`: empty for DEFAULT_SIZES. `multiplier`: of all embeddings."""
        self._patches = patches
        self._cache = cache
        merged, index = patches.merged, backend.index_dtype
        self._sizes = sorted({-(-size // merged) * merged for size in sizes or DEFAULT_SIZES})
        self._launches = DeviceLaunches(
            patches.features,
            lambda size: tuple(
                ((size, *one.shape), index if one.is_index else patches.dtype)
                for one in patches.inputs
            ),
            cache,
            backend,
            multiplier=multiplier,
            captures=captures,
        )

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """As TileEncoder.warm_up."""
        for size in reversed(self._sizes):
            self._launches.warm_up(size, on_capture)
        self._launches.end()

    def encode(self, images: list[Prepared]) -> None:
        """As TileEncoder.encode."""
        for tensors, rows in (one for image in images for one in _times(*image)):
            given, order = self._patches.prepare(tensors)
            check_count(len(order), rows)
            count = len(order) * self._patches.merged
            size = next((one for one in self._sizes if one >= count), 0)
            if not size:
                size = -(-count // self._sizes[-1]) * self._sizes[-1]
                logger.warning(
                    "An image of %d patches is larger than the largest of --multimodal-buckets, "
                    "%d: its launch may be compiled now",
                    count,
                    self._sizes[-1],
                )
            padded = tuple(
                _padded(one, size, form.padding)
                for one, form in zip(given, self._patches.inputs, strict=True)
            )
            target = np.full(size // self._patches.merged, self._cache.pad_row, np.int64)
            target[: len(order)] = rows[order]
            self._launches.launch(size, padded, target)
        self._launches.end()


def _times(tensors: Mapping[str, Tensor], rows: Integers) -> list[Prepared]:
    """An image, or each time of a video."""
    if "image_grid_thw" not in tensors:
        return [(tensors, rows)]
    grid = tensors["image_grid_thw"].view(1, 3)
    time = int(grid[0, 0])
    if time == 1 or len(rows) % time or len(tensors["pixel_values"]) % time:
        return [(tensors, rows)]
    one = torch.cat((torch.ones_like(grid[:, :1]), grid[:, 1:]), dim=1)
    pixels = tensors["pixel_values"].chunk(time)
    return [
        ({"pixel_values": part, "image_grid_thw": one}, own)
        for part, own in zip(pixels, np.split(rows, time), strict=True)
    ]


def _padded(tensor: Tensor, size: int, value: int) -> Tensor:
    padding = torch.full((size - len(tensor), *tensor.shape[1:]), value, dtype=tensor.dtype)
    return torch.cat((tensor, padding))

"""PatchEncoder: encodes images with any number of patches on a device that compiles each shape, one
part of an image per launch and rank, padded to a fixed number of patches."""

import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from hpu.multimodal.base import Integers, Patches, Prepared
from hpu.multimodal.device_launches import DeviceLaunches, LaunchOptions
from hpu.multimodal.tile_encoder import check_count

logger = logging.getLogger(__name__)

_Sized = tuple[int, Mapping[str, Tensor], Integers]
"""Launch size in patches, tensors and rows of an image."""

DEFAULT_SIZES = (256, 576, 1024, 1600, 3136, 6400, 12544)
"""Patches per launch."""


class PatchEncoder:
    """Runs each image in the smallest of `sizes` that holds it, or that holds the largest image of
    the launch if several ranks encode an image each. Parts of an image that do not attend to each
    other run like separate images, if the tower separates them (`Patches.parts`): frames of a
    video, tiles of an image. An image that exceeds all sizes runs in a multiple of the largest
    size, which compiles at its first use."""

    def __init__(self, patches: Patches, sizes: tuple[int, ...], options: LaunchOptions) -> None:
        """`sizes`: empty for DEFAULT_SIZES."""
        self._group = options.group
        self._patches = patches
        self._pad_row = options.cache.pad_row
        merged = patches.merged
        self._sizes = sorted({-(-size // merged) * merged for size in sizes or DEFAULT_SIZES})
        self._launches = DeviceLaunches(
            patches.features,
            lambda size: tuple(
                ((size, *form.shape), None if form.is_index else patches.dtype)
                for form in patches.inputs
            ),
            options,
        )

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """See TileEncoder.warm_up."""
        for size in reversed(self._sizes):
            self._launches.warm_up(size, on_capture)
        self._launches.end()

    def encode(self, images: list[Prepared]) -> None:
        """See TileEncoder.encode. Each of several ranks encodes a part (see `Patches.parts`) in a
        launch, in the order of decreasing size."""
        sized = [
            (self._size(rows), tensors, rows)
            for tensors, rows in (part for image in images for part in self._patches.parts(*image))
        ]
        sized.sort(key=lambda piece: piece[0], reverse=True)
        for begin in range(0, len(sized), self._group.size):
            self._encode_together(sized[begin : begin + self._group.size])
        self._launches.end()

    def _encode_together(self, images: list[_Sized]) -> None:
        """Encode one image per rank, in a single launch."""
        size = images[0][0]
        target = np.full((self._group.size, size // self._patches.merged), self._pad_row)
        padded: tuple[Tensor, ...] = ()
        for rank, (_, tensors, rows) in enumerate(images):
            given, order = self._patches.prepare(tensors)
            check_count(len(order), rows)
            target[rank, : len(order)] = rows[order]
            if rank == self._group.rank:
                padded = tuple(
                    _padded(tensor, size, form.padding)
                    for tensor, form in zip(given, self._patches.inputs, strict=True)
                )
        self._launches.launch(size, padded, target.ravel())

    def _size(self, rows: Integers) -> int:
        count = len(rows) * self._patches.merged
        size = next((size for size in self._sizes if size >= count), 0)
        if not size:
            size = -(-count // self._sizes[-1]) * self._sizes[-1]
            logger.warning(
                "An image of %d patches is larger than the largest of --multimodal-buckets, "
                "%d: its launch may be compiled now",
                count,
                self._sizes[-1],
            )
        return size


def _padded(tensor: Tensor, size: int, value: int) -> Tensor:
    padding = torch.full((size - len(tensor), *tensor.shape[1:]), value, dtype=tensor.dtype)
    return torch.cat((tensor, padding))

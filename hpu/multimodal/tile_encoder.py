"""TileEncoder: encodes tiled images on a device that compiles each shape, in launches of a fixed
number of tiles."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpu.multimodal.base import Integers, Prepared, Tiles
from hpu.multimodal.device_launches import DeviceLaunches, LaunchOptions

SEPARATORS_AT_ONCE = 64
"""Rows per write of a separator embedding."""

DEFAULT_SIZES = (1, 2, 4, 8)
"""Tiles per launch."""


class TileEncoder:
    """Divides tiles into launches of `sizes`, largest first; only the last launch has padding. With
    several ranks, each rank encodes an equal number of tiles of a launch, including padding."""

    def __init__(self, tiles: Tiles, sizes: tuple[int, ...], options: LaunchOptions) -> None:
        """`sizes`: empty for DEFAULT_SIZES."""
        self._group = options.group
        self._tiles = tiles
        self._pad_row = options.cache.pad_row
        self._sizes = sorted(sizes or DEFAULT_SIZES, reverse=True)
        self._num_rows = 0
        """Embeddings per tile; known after the warm-up."""
        self._launches = DeviceLaunches(
            lambda *inputs: tiles.features(*inputs).flatten(0, 1),
            lambda size: tuple(((size, *shape), dtype) for shape, dtype in tiles.shapes),
            options,
        )
        separators = tiles.separators
        self._separators = [
            (separator * options.multiplier).expand(SEPARATORS_AT_ONCE, -1).contiguous()
            for separator in (() if separators is None else separators)
        ]

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """Run each launch size, and capture it if launches are captured. `on_capture` receives the
        bytes of each graph."""
        for size in self._sizes:
            self._num_rows = self._launches.warm_up(size, on_capture) // size
        for embeddings in self._separators:
            self._write_separator(embeddings, np.full(1, self._pad_row))
        self._launches.end()

    def encode(self, images: list[Prepared]) -> None:
        """Write the embeddings of the images to their rows, without waiting for the results. Raises
        RuntimeError for an image that the tower does not support, or whose embeddings and rows
        differ in number."""
        inputs, targets = [], []
        ends: list[list[Integers]] = [[] for _ in self._separators]
        for tensors, rows in images:
            tiles = self._tiles.prepare(tensors)
            layout = self._tiles.layout(tensors, len(tiles[0]), self._num_rows)
            check_count(len(layout), rows)
            # Embeddings that the image does not use go to the padding row.
            target = np.full(len(tiles[0]) * self._num_rows, self._pad_row, np.int64)
            is_tile = layout >= 0
            target[layout[is_tile]] = rows[is_tile]
            inputs.append(tiles)
            targets.append(target)
            for number, own in enumerate(ends):
                own.append(rows[layout == -1 - number])
        joined = tuple(torch.cat(parts) for parts in zip(*inputs, strict=True))
        self._encode_tiles(joined, np.concatenate(targets))
        for embeddings, parts in zip(self._separators, ends, strict=True):
            self._write_separator(embeddings, np.concatenate(parts))
        self._launches.end()

    def _encode_tiles(self, inputs: tuple[Tensor, ...], target: Integers) -> None:
        num_ranks, done, count = self._group.size, 0, len(inputs[0])
        while done < count:
            left = count - done
            size = next((size for size in self._sizes if size * num_ranks <= left), self._sizes[-1])
            own = done + self._group.rank * size
            parts = tuple(_padded(tensor[own : own + size], size) for tensor in inputs)
            end = done + num_ranks * size
            rows = np.full(num_ranks * size * self._num_rows, self._pad_row, np.int64)
            real = target[done * self._num_rows : end * self._num_rows]
            rows[: len(real)] = real
            self._launches.launch(size, parts, rows)
            done = end

    def _write_separator(self, embeddings: Tensor, rows: Integers) -> None:
        for begin in range(0, len(rows), SEPARATORS_AT_ONCE):
            part = np.full(SEPARATORS_AT_ONCE, self._pad_row, np.int64)
            own = rows[begin : begin + SEPARATORS_AT_ONCE]
            part[: len(own)] = own
            self._launches.write(embeddings, part)


def _padded(tensor: Tensor, size: int) -> Tensor:
    if len(tensor) == size:
        return tensor
    out = tensor.new_zeros(size, *tensor.shape[1:])
    out[: len(tensor)] = tensor
    return out


def check_count(found: int, rows: Integers) -> None:
    """Raise RuntimeError unless `found` equals the number of rows."""
    if found != len(rows):
        raise RuntimeError(
            f"the vision tower returned {found} embeddings of an image, the plan has {len(rows)}"
        )

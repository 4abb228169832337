"""TileEncoder: images of tiles on a device that compiles each shape, in launches of a fixed number
of tiles."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.multimodal.base import NEWLINE, Integers, Tiles
from hpu.multimodal.device_launches import DeviceLaunches
from hpu.multimodal.encoder_cache import EncoderCache

NEWLINES_AT_ONCE = 64
"""Rows that one copy of the embedding at the end of a row is written to."""

DEFAULT_SIZES = (1, 2, 4, 8)
"""Tiles in a launch."""

Prepared = tuple[Mapping[str, Tensor], Integers]
"""The tensors of an image on the host, and its rows of the cache."""


class TileEncoder:
    """Cuts tiles into launches of `sizes`, the largest first; only the last launch has padding."""

    def __init__(
        self,
        tiles: Tiles,
        cache: EncoderCache,
        backend: Backend,
        sizes: tuple[int, ...],
        *,
        multiplier: float,
        captures: bool,
    ) -> None:
        """`sizes`: empty for DEFAULT_SIZES. `multiplier`: of all embeddings."""
        self._tiles = tiles
        self._cache = cache
        self._sizes = sorted(sizes or DEFAULT_SIZES, reverse=True)
        self._num_rows = 0
        """Embeddings of a tile; known after the warm-up."""
        self._launches = DeviceLaunches(
            lambda pixels: tiles.features(pixels).flatten(0, 1),
            lambda size: (((size, *tiles.shape), tiles.dtype),),
            cache,
            backend,
            multiplier=multiplier,
            captures=captures,
        )
        newline = tiles.newline
        self._newlines: Tensor | None = None
        if newline is not None:
            self._newlines = (newline * multiplier).expand(NEWLINES_AT_ONCE, -1).contiguous()

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """Run each size, and capture it where launches are. `on_capture` gets the bytes of each
        graph."""
        for size in self._sizes:
            self._num_rows = self._launches.warm_up(size, on_capture) // size
        if self._newlines is not None:
            self._write_newlines(np.full(1, self._cache.pad_row))
        self._launches.end()

    def encode(self, images: list[Prepared]) -> None:
        """Write the embeddings of the images to their rows; does not wait for the device.
        RuntimeError where an image has another number of embeddings than rows."""
        pixels, targets, newlines = [], [], [np.empty(0, np.int64)]
        for tensors, rows in images:
            tiles = self._tiles.pixels(tensors)
            layout = self._tiles.layout(tensors, len(tiles), self._num_rows)
            check_count(len(layout), rows)
            # What the image leaves out is written where padding is.
            target = np.full(len(tiles) * self._num_rows, self._cache.pad_row, np.int64)
            is_tile = layout != NEWLINE
            target[layout[is_tile]] = rows[is_tile]
            pixels.append(tiles)
            targets.append(target)
            newlines.append(rows[~is_tile])
        self._encode_tiles(torch.cat(pixels), np.concatenate(targets))
        ends = np.concatenate(newlines)
        if len(ends):
            self._write_newlines(ends)
        self._launches.end()

    def _encode_tiles(self, pixels: Tensor, target: Integers) -> None:
        done = 0
        while done < len(pixels):
            left = len(pixels) - done
            size = next((one for one in self._sizes if one <= left), self._sizes[-1])
            part = torch.zeros(size, *self._tiles.shape, dtype=pixels.dtype)
            real = pixels[done : done + size]
            part[: len(real)] = real
            rows = np.full(size * self._num_rows, self._cache.pad_row, np.int64)
            own = target[done * self._num_rows : (done + size) * self._num_rows]
            rows[: len(own)] = own
            self._launches.launch(size, (part,), rows)
            done += size

    def _write_newlines(self, rows: Integers) -> None:
        assert self._newlines is not None
        for begin in range(0, len(rows), NEWLINES_AT_ONCE):
            part = np.full(NEWLINES_AT_ONCE, self._cache.pad_row, np.int64)
            own = rows[begin : begin + NEWLINES_AT_ONCE]
            part[: len(own)] = own
            self._launches.write(self._newlines, part)


def check_count(found: int, rows: Integers) -> None:
    """RuntimeError unless there are as many embeddings as rows."""
    if found != len(rows):
        raise RuntimeError(
            f"the vision tower makes {found} embeddings of an image, the plan says {len(rows)}"
        )

"""CrossInputs: the image tiles that each token of a launch attends to, in a model with
cross-attention layers."""

from typing import NamedTuple

import numpy as np

from config.model.multimodal.vision import VisionFacts
from hpu.launch_inputs import (
    DecodeArrays,
    DraftArrays,
    FeatureArrays,
    Field,
    Integers,
    LaunchArrays,
    LaunchFeature,
    PrefillArrays,
    Tokens,
)
from hpu.multimodal.cross.cache import CrossCache
from hpu.protocol import ImagePlacement, Launch, NewRequest

TILES, SPANS = "cross_tiles", "cross_spans"


class _Tiles(NamedTuple):
    """Tiles of the images of a request, ordered by position."""

    tiles: Integers
    """Cache rows: the real tiles of all images, then the padding tiles of all images."""
    offsets: Integers
    """Token position of each image."""
    first: Integers
    """For each image, the first index into `tiles` that later tokens attend to. Images without text
    between them are attended to together."""
    end: Integers
    """For each image, the end (exclusive) of the range that starts at `first`."""

    def spans(self, positions: Integers) -> Integers:
        """Tile ranges (2, n) for tokens at `positions`, in the format of `cross_metadata`."""
        image = np.searchsorted(self.offsets, positions, side="right") - 1
        found = np.stack((self.first[image], self.end[image]))
        # Tokens before the first image.
        found[:, image < 0] = [[-1], [len(self.tiles)]]
        return found


class CrossInputs(LaunchFeature):
    """Images of the live requests, by request index."""

    def __init__(self, facts: VisionFacts, cache: CrossCache, max_tiles: int) -> None:
        """`max_tiles`: maximum number of tiles of a request."""
        self._max_tiles = max_tiles
        tiles = Field(TILES, f"B {max_tiles}", pad=cache.pad_row)
        self._fields = tiles, Field(SPANS, "2 B Q")
        self._token_id = facts.image_token_id
        self._cache = cache
        self._images: dict[int, list[ImagePlacement]] = {}
        self._tiles: dict[int, _Tiles] = {}
        """Tiles of requests that a launch has read."""

    def fields(self, phase: int) -> tuple[Field, ...]:
        return self._fields

    def add_request(self, new: NewRequest, tokens: Tokens) -> None:
        """See LaunchFeature.add_request. Raises RuntimeError for a placement that is not a single
        image token."""
        for image in new.images:
            found = tokens[image.offset : image.offset + 1].tolist()
            if image.length != 1 or found != [self._token_id]:
                raise RuntimeError(
                    f"an image has {image.length} tokens from {image.offset} on, {found}, it must "
                    f"have 1 token, {self._token_id}"
                )
        if new.images:
            self._images[new.req_index] = new.images

    def remove_request(self, req_index: int) -> None:
        self._images.pop(req_index, None)
        self._tiles.pop(req_index, None)

    def fill_prefill(self, launch: Launch, arrays: PrefillArrays) -> None:
        self.clear(arrays)
        if not self._images:
            return
        for row, req_index in enumerate(launch.req_indices):
            start, count = int(arrays.context_lens[row]), int(arrays.query_lens[row])
            self._fill(req_index, row, np.arange(start, start + count), arrays.features)

    def fill_decode(self, rows: list[int], arrays: DecodeArrays | DraftArrays) -> None:
        assert isinstance(arrays, DecodeArrays), "positions are on the device"
        self.clear(arrays)
        if not self._images:
            return
        for row, req_index in enumerate(rows):
            self._fill(req_index, row, arrays.positions[row].astype(np.int64), arrays.features)

    def fill_dummy(self, arrays: LaunchArrays) -> None:
        # Each token attends to all tile entries, including padding; every entry is tile 0.
        spans = arrays.features[SPANS]
        arrays.features[TILES][:] = 0
        spans[0], spans[1] = 0, self._max_tiles

    def _fill(self, req_index: int, row: int, positions: Integers, out: FeatureArrays) -> None:
        if req_index not in self._images:
            return
        request = self._tiles.get(req_index)
        if request is None:
            request = self._tiles[req_index] = self._read(self._images[req_index])
        count = len(request.tiles)
        if count > self._max_tiles:
            raise RuntimeError(
                f"a request has {count} tiles of images, a launch takes at most {self._max_tiles}"
            )
        out[TILES][row, :count] = request.tiles
        out[SPANS][:, row, : len(positions)] = request.spans(positions)

    def _read(self, images: list[ImagePlacement]) -> _Tiles:
        cache = self._cache
        own = [cache.rows(image.content) for image in images]
        counts = np.array([cache.num_visible(image.content) for image in images], np.int64)
        visible = [rows[:count] for rows, count in zip(own, counts, strict=True)]
        padding = [rows[count:] for rows, count in zip(own, counts, strict=True)]
        offsets = np.array([image.offset for image in images], np.int64)
        end: Integers = np.cumsum(counts)
        begin: Integers = end - counts
        # First image of each image's run of adjacent images.
        is_first = np.diff(offsets, prepend=-2) != 1
        run = np.maximum.accumulate(np.where(is_first, np.arange(len(images)), 0))
        return _Tiles(np.concatenate([*visible, *padding]), offsets, begin[run], end)

"""CrossInputs: the image tiles that each token of a launch attends to, in a model with
cross-attention layers."""

from typing import NamedTuple, Protocol

import numpy as np

from config.model.multimodal.vision import VisionFacts
from hpu.multimodal.cross.cache import CrossCache
from hpu.multimodal.image_inputs import Array, Integers, Tokens
from hpu.protocol import ImagePlacement, Launch, NewRequest


class CrossArrays(Protocol):
    """Host arrays of a launch that tile inputs are written to or computed from."""

    @property
    def positions(self) -> Array: ...
    @property
    def cross_tiles(self) -> Array | None: ...
    @property
    def cross_spans(self) -> Array | None: ...


class CrossPrefillArrays(CrossArrays, Protocol):
    """Host arrays of a prefill."""

    @property
    def query_lens(self) -> Array: ...
    @property
    def context_lens(self) -> Array: ...


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


class CrossInputs:
    """Images of the live requests, by request index."""

    def __init__(self, facts: VisionFacts, cache: CrossCache) -> None:
        self._token_id = facts.image_token_id
        self._cache = cache
        self._images: dict[int, list[ImagePlacement]] = {}
        self._tiles: dict[int, _Tiles] = {}
        """Tiles of requests whose images are encoded."""

    def add_request(self, new: NewRequest, tokens: Tokens) -> None:
        """See ImageBuffers.add_request. Raises RuntimeError for a placement that is not a single
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
        """Drop the images of a request."""
        self._images.pop(req_index, None)
        self._tiles.pop(req_index, None)

    def fill_prefill(self, launch: Launch, out: CrossPrefillArrays) -> None:
        """Write the tile ranges of a prefill. Called after its other arrays are filled."""
        self._clear(out)
        if not self._images:
            return
        for row, req_index in enumerate(launch.req_indices):
            start, count = int(out.context_lens[row]), int(out.query_lens[row])
            self._fill(req_index, row, np.arange(start, start + count), out)

    def fill_decode(self, req_indices: list[int], out: CrossArrays) -> None:
        """Write the tile ranges of a decode whose rows are `req_indices`."""
        self._clear(out)
        if not self._images:
            return
        for row, req_index in enumerate(req_indices):
            self._fill(req_index, row, out.positions[row].astype(np.int64), out)

    def _clear(self, out: CrossArrays) -> None:
        assert out.cross_tiles is not None and out.cross_spans is not None
        out.cross_tiles[:] = self._cache.pad_row
        out.cross_spans[:] = 0

    def _fill(self, req_index: int, row: int, positions: Integers, out: CrossArrays) -> None:
        if req_index not in self._images:
            return
        request = self._tiles.get(req_index)
        if request is None:
            request = self._tiles[req_index] = self._read(self._images[req_index])
        assert out.cross_tiles is not None and out.cross_spans is not None
        count = len(request.tiles)
        if count > out.cross_tiles.shape[1]:
            raise RuntimeError(
                f"a request has {count} tiles of images, a launch takes at most "
                f"{out.cross_tiles.shape[1]}"
            )
        out.cross_tiles[row, :count] = request.tiles
        out.cross_spans[:, row, : len(positions)] = request.spans(positions)

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

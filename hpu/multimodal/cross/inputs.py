"""CrossInputs: which tiles of images the tokens of a launch see, in a model whose layers read
images in place of tokens."""

from typing import NamedTuple, Protocol

import numpy as np

from config.model.multimodal.vision import VisionFacts
from hpu.multimodal.cross.cache import CrossCache
from hpu.multimodal.image_inputs import Array, Integers, Tokens
from hpu.protocol import ImagePlacement, Launch, NewRequest


class CrossArrays(Protocol):
    """Those of the host arrays of a launch that tiles are written to, or placed by."""

    @property
    def positions(self) -> Array: ...
    @property
    def cross_tiles(self) -> Array | None: ...
    @property
    def cross_spans(self) -> Array | None: ...


class CrossPrefillArrays(CrossArrays, Protocol):
    """Of a prefill."""

    @property
    def query_lens(self) -> Array: ...
    @property
    def context_lens(self) -> Array: ...


class _Tiles(NamedTuple):
    """Of the images of a request, in the order of their positions."""

    tiles: Integers
    """Rows of the cache: those that are no padding, of all images, then the padding of all."""
    offsets: Integers
    """The token of each image."""
    first: Integers
    """Of each image: the first of `tiles` that tokens behind it see. Images without text between
    them are seen together."""
    end: Integers
    """Likewise, the one behind the last."""

    def spans(self, positions: Integers) -> Integers:
        """(2, n) of tokens at these positions, as `cross_metadata` takes them."""
        image = np.searchsorted(self.offsets, positions, side="right") - 1
        found = np.stack((self.first[image], self.end[image]))
        # In front of the first image.
        found[:, image < 0] = [[-1], [len(self.tiles)]]
        return found


class CrossInputs:
    """The images of live requests, by request index."""

    def __init__(self, facts: VisionFacts, cache: CrossCache) -> None:
        self._token_id = facts.image_token_id
        self._cache = cache
        self._images: dict[int, list[ImagePlacement]] = {}
        self._tiles: dict[int, _Tiles] = {}
        """Of requests whose images are encoded."""

    def add_request(self, new: NewRequest, tokens: Tokens) -> None:
        """As ImageInputs.add_request. RuntimeError for a placement that is no image token."""
        for image in new.images:
            found = tokens[image.offset : image.offset + 1].tolist()
            if image.length != 1 or found != [self._token_id]:
                raise RuntimeError(
                    f"an image has {image.length} tokens from {image.offset} on, {found}, it has "
                    f"one, {self._token_id}"
                )
        if new.images:
            self._images[new.req_index] = new.images

    def remove_request(self, req_index: int) -> None:
        """Forget its images."""
        self._images.pop(req_index, None)
        self._tiles.pop(req_index, None)

    def fill_prefill(self, launch: Launch, out: CrossPrefillArrays) -> None:
        """Write which tiles the tokens of a prefill see, after its other arrays."""
        self._clear(out)
        if not self._images:
            return
        for row, req_index in enumerate(launch.req_indices):
            start, count = int(out.context_lens[row]), int(out.query_lens[row])
            self._fill(req_index, row, np.arange(start, start + count), out)

    def fill_decode(self, req_indices: list[int], out: CrossArrays) -> None:
        """Likewise, of a decode with a row of each of these requests."""
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
                f"a request has {count} tiles of images, launches have {out.cross_tiles.shape[1]}"
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
        # The first image of the run of neighbours that each one is in.
        is_first = np.diff(offsets, prepend=-2) != 1
        run = np.maximum.accumulate(np.where(is_first, np.arange(len(images)), 0))
        return _Tiles(np.concatenate([*visible, *padding]), offsets, begin[run], end)

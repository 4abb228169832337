"""ImageInputs: which tokens of a launch take embeddings of images, which of them see each other in
both directions, and the positions with three axes that images give."""

from typing import NamedTuple, Protocol

import numpy as np

from config.model.multimodal.vision import VisionFacts
from hpu.multimodal.encoder_cache import EncoderCache
from hpu.protocol import ImagePlacement, Launch, NewRequest

NO_IMAGE = -1
"""In `image_rows` and `image_ids`: text, or padding."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64] | np.dtype[np.int32]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Tokens = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


class PrefillImages(Protocol):
    """Those of the host arrays of a prefill that images are written to, or placed by."""

    @property
    def positions(self) -> Array: ...
    @property
    def query_lens(self) -> Array: ...
    @property
    def context_lens(self) -> Array: ...
    @property
    def image_rows(self) -> Array | None: ...
    @property
    def image_ids(self) -> Array | None: ...
    @property
    def rope_positions(self) -> Array | None: ...


class DecodeImages(Protocol):
    """As PrefillImages, of a decode."""

    @property
    def positions(self) -> Array: ...
    @property
    def rope_positions(self) -> Array | None: ...


class _Request(NamedTuple):
    """Of the image tokens of a request, in the order of their positions."""

    contents: tuple[bytes, ...]
    counts: tuple[int, ...]
    """Image tokens of each content."""
    positions: Integers
    owners: Integers
    """Index of the content."""
    ranks: Integers
    """Row among the embeddings of the image."""
    runs: Integers
    """A number for each run of tokens that follow each other."""
    rope_positions: Integers
    """(3, length): positions up to the end of the last image; empty without axes."""
    rope_offset: int
    """Of the positions behind them."""


class ImageInputs:
    """The images of live requests, by request index."""

    def __init__(self, facts: VisionFacts, max_num_reqs: int, cache: EncoderCache | None) -> None:
        """`cache`: None where embeddings of tokens are not read, as on a later pipeline stage."""
        self._facts = facts
        self._cache = cache
        self._requests: dict[int, _Request] = {}
        self._rope_offsets = np.zeros(max_num_reqs, np.int64)

    def add_request(self, new: NewRequest, tokens: Tokens) -> None:
        """Keep the images of a new request, if it has any."""
        if new.images:
            request = _read(new.images, tokens, self._facts)
            self._requests[new.req_index] = request
            self._rope_offsets[new.req_index] = request.rope_offset

    def remove_request(self, req_index: int) -> None:
        """Forget them."""
        self._requests.pop(req_index, None)
        self._rope_offsets[req_index] = 0

    def fill_prefill(self, launch: Launch, out: PrefillImages) -> None:
        """Write what a prefill reads of images, after its other arrays."""
        if out.image_rows is not None:
            out.image_rows[:] = NO_IMAGE
        if out.image_ids is not None:
            out.image_ids[:] = NO_IMAGE
        if out.rope_positions is not None:
            out.rope_positions[:] = out.positions
        if not self._requests:
            return
        batch, query = out.positions.shape
        is_merged = len(out.query_lens) > batch
        first, num_runs = 0, 0
        for index, req_index in enumerate(launch.req_indices):
            start, count = int(out.context_lens[index]), int(out.query_lens[index])
            request = self._requests.get(req_index)
            if request is not None:
                self._fill(request, start, count, first, num_runs, out)
                num_runs += len(request.runs)
            first += count if is_merged else query

    def fill_decode(self, req_indices: list[int], out: DecodeImages) -> None:
        """Write the rotated positions of a decode with a row of each of these requests."""
        if out.rope_positions is None:
            return
        out.rope_positions[:] = out.positions
        offsets = self._rope_offsets[np.asarray(req_indices, np.int64)]
        out.rope_positions[: len(offsets), 0] += offsets

    def _fill(
        self,
        request: _Request,
        start: int,
        count: int,
        first: int,
        first_run: int,
        out: PrefillImages,
    ) -> None:
        """Write the tokens start .. start + count - 1 of a request, which are those from `first` on
        in the launch."""
        begin, end = np.searchsorted(request.positions, [start, start + count])
        at = first + request.positions[begin:end] - start
        if out.image_rows is not None and self._cache is not None and len(at):
            owners, ranks = request.owners[begin:end], request.ranks[begin:end]
            rows = np.empty(len(at), np.int64)
            for owner in np.unique(owners).tolist():
                content, expected = request.contents[owner], request.counts[owner]
                own = self._cache.rows(content)
                if len(own) != expected:
                    raise RuntimeError(
                        f"image {content.hex()} has {len(own)} embeddings, and takes the places of "
                        f"{expected} tokens"
                    )
                rows[owners == owner] = own[ranks[owners == owner]]
            out.image_rows.reshape(-1)[at] = rows
        if out.image_ids is not None:
            out.image_ids.reshape(-1)[at] = first_run + request.runs[begin:end]
        if out.rope_positions is not None:
            axes = out.rope_positions.reshape(3, -1)
            known = request.rope_positions[:, start : start + count]
            middle = first + known.shape[1]
            axes[:, first:middle] = known
            axes[:, middle : first + count] += request.rope_offset


def _read(images: list[ImagePlacement], tokens: Tokens, facts: VisionFacts) -> _Request:
    """RuntimeError for placements that overlap, or are not within the tokens."""
    last = 0
    found: list[Integers] = []
    for image in images:
        end = image.offset + image.length
        if not last <= image.offset < end <= len(tokens):
            raise RuntimeError(
                f"an image is at tokens {image.offset} to {end}, behind {last} and of {len(tokens)}"
            )
        last = end
        own = tokens[image.offset : end]
        is_image = own == facts.image_token_id
        if facts.video_token_id is not None:
            is_image |= own == facts.video_token_id
        found.append(image.offset + np.flatnonzero(is_image))
    counts = tuple(map(len, found))
    if not all(counts):
        raise RuntimeError(f"images take the places of {counts} tokens, each takes at least one")
    positions = np.concatenate(found)
    axes: Integers = np.empty((3, 0), np.int64)
    offset = 0
    if facts.uses_mrope:
        axes = _axes(images, found, last)
        offset = int(axes.max()) + 1 - last
    return _Request(
        contents=tuple(image.content for image in images),
        counts=counts,
        positions=positions,
        owners=np.repeat(np.arange(len(counts)), counts),
        ranks=np.concatenate([np.arange(count) for count in counts]),
        runs=np.cumsum(np.diff(positions, prepend=-2) != 1),
        rope_positions=axes,
        rope_offset=offset,
    )


def _axes(images: list[ImagePlacement], tokens: list[Integers], length: int) -> Integers:
    """(3, length): time, height and width of the first tokens, up to the last image. Tokens of text
    count up by one on all axes, and those of an image have their places in its grid; behind it the
    largest of these counts on (Wang et al., Qwen2-VL, 2024). Transformers 5 counts on from height
    and width alone; its earlier releases, with which the models were trained, did not. The two
    differ for a video whose time axis is the longest. Where text is between the times of a video,
    each of them is like an image."""
    axes = np.zeros((3, length), np.int64)
    done = following = 0
    for image, at in zip(images, tokens, strict=True):
        time, height, width = image.grid
        if time * height * width != len(at):
            raise RuntimeError(
                f"an image has a grid of {time} x {height} x {width} and {len(at)} tokens"
            )
        runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)
        if len(runs) > 1:
            time //= len(runs)
        if any(len(run) != time * height * width for run in runs):
            raise RuntimeError(
                f"an image has a grid of {image.grid}, and its tokens are in {len(runs)} parts of "
                f"{sorted({len(run) for run in runs})}"
            )
        places = np.indices((time, height, width)).reshape(3, -1)
        if time > 1:
            # In the precision of transformers.
            places[0] = places[0].astype(np.float32) * np.float32(image.time_step)
        for run in runs:
            first = int(run[0])
            axes[:, done:first] = following + np.arange(first - done)
            following += first - done
            done = first + len(run)
            axes[:, first:done] = following + places
            following += int(places.max()) + 1
    axes[:, done:] = following + np.arange(length - done)
    return axes

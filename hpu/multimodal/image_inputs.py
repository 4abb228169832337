"""ImageInputs: the tokens of a launch that are replaced by image embeddings, image tokens with
bidirectional attention, and the M-RoPE positions of images."""

import itertools
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
from hpu.multimodal.encoder_cache import EncoderCache
from hpu.protocol import PREFILL, ImagePlacement, Launch, NewRequest

ROWS, IDS, ROPE_POSITIONS = "image_rows", "image_ids", "rope_positions"

NO_IMAGE = -1
"""Value of `image_rows` and `image_ids` for text and padding."""


class _Request(NamedTuple):
    """Image tokens of a request, ordered by position."""

    contents: tuple[bytes, ...]
    counts: tuple[int, ...]
    """Image tokens of each content."""
    positions: Integers
    owners: Integers
    """Index into `contents` of each image token."""
    ranks: Integers
    """Index among the image's embeddings of each image token."""
    runs: Integers
    """Id of the run of consecutive image tokens of each image token."""
    rope_positions: Integers
    """(3, length) positions up to the end of the last image; empty without M-RoPE."""
    rope_offset: int
    """Offset of the rotary positions of tokens after the last image."""


class ImageInputs(LaunchFeature):
    """Images of the live requests, by request index."""

    def __init__(self, facts: VisionFacts, max_num_reqs: int, cache: EncoderCache | None) -> None:
        """`cache`: None if this rank does not embed tokens, as on a later pipeline stage."""
        self._facts = facts
        self._cache = cache
        self._requests: dict[int, _Request] = {}
        self._rope_offsets = np.zeros(max_num_reqs, np.int64)

    def fields(self, phase: int) -> tuple[Field, ...]:
        has_axes = self._facts.uses_mrope
        if phase != PREFILL:
            return (Field(ROPE_POSITIONS, "B 1"),) if has_axes else ()
        found = (
            Field(ROWS, "B Q", pad=NO_IMAGE),
            Field(IDS, "B Q", pad=NO_IMAGE),
            Field(ROPE_POSITIONS, "3 B Q"),
        )
        is_read = (self._cache is not None, self._facts.whole_images, has_axes)
        return tuple(itertools.compress(found, is_read))

    def add_request(self, new: NewRequest, tokens: Tokens) -> None:
        if new.images:
            request = _read(new.images, tokens, self._facts)
            self._requests[new.req_index] = request
            self._rope_offsets[new.req_index] = request.rope_offset

    def remove_request(self, req_index: int) -> None:
        self._requests.pop(req_index, None)
        self._rope_offsets[req_index] = 0

    def fill_prefill(self, launch: Launch, arrays: PrefillArrays) -> None:
        self.clear(arrays)
        if not self._requests:
            return
        batch, query = arrays.positions.shape
        is_merged = len(arrays.query_lens) > batch
        first, num_runs = 0, 0
        for index, req_index in enumerate(launch.req_indices):
            start, count = int(arrays.context_lens[index]), int(arrays.query_lens[index])
            request = self._requests.get(req_index)
            if request is not None:
                self._fill(request, start, count, first, num_runs, arrays.features)
                num_runs += len(request.runs)
            first += count if is_merged else query

    def fill_decode(self, rows: list[int], arrays: DecodeArrays | DraftArrays) -> None:
        if self._facts.uses_mrope:
            self.clear(arrays)
            arrays.features[ROPE_POSITIONS][: len(rows), 0] += self._rope_offsets[rows]

    def clear(self, arrays: LaunchArrays) -> None:
        super().clear(arrays)
        if self._facts.uses_mrope:
            assert not isinstance(arrays, DraftArrays), "positions are on the device"
            arrays.features[ROPE_POSITIONS][:] = arrays.positions

    def _fill(
        self,
        request: _Request,
        start: int,
        count: int,
        first: int,
        first_run: int,
        out: FeatureArrays,
    ) -> None:
        """Write tokens start .. start + count - 1 of a request, which begin at `first` in the
        launch."""
        begin, end = np.searchsorted(request.positions, [start, start + count])
        at = first + request.positions[begin:end] - start
        if self._cache is not None and len(at):
            owners, ranks = request.owners[begin:end], request.ranks[begin:end]
            rows = np.empty(len(at), np.int64)
            for owner in np.unique(owners).tolist():
                content, expected = request.contents[owner], request.counts[owner]
                own = self._cache.rows(content)
                if len(own) != expected:
                    raise RuntimeError(
                        f"image {content.hex()} has {len(own)} embeddings for {expected} image "
                        "tokens, the numbers must be equal"
                    )
                rows[owners == owner] = own[ranks[owners == owner]]
            out[ROWS].reshape(-1)[at] = rows
        if self._facts.whole_images:
            out[IDS].reshape(-1)[at] = first_run + request.runs[begin:end]
        if self._facts.uses_mrope:
            axes = out[ROPE_POSITIONS].reshape(3, -1)
            known = request.rope_positions[:, start : start + count]
            middle = first + known.shape[1]
            axes[:, first:middle] = known
            axes[:, middle : first + count] += request.rope_offset


def _read(images: list[ImagePlacement], tokens: Tokens, facts: VisionFacts) -> _Request:
    """Locate the image tokens of a request. Raises RuntimeError for placements that overlap, are
    outside the tokens, or do not fit their image tokens."""
    last = 0
    found: list[Integers] = []
    for image in images:
        end = image.offset + image.length
        if not last <= image.offset < end <= len(tokens):
            raise RuntimeError(
                f"an image is at tokens {image.offset} to {end}, it must be between {last}, the "
                f"end of the image before it, and {len(tokens)}"
            )
        last = end
        own = tokens[image.offset : end]
        is_image = own == facts.image_token_id
        if facts.video_token_id is not None:
            is_image |= own == facts.video_token_id
        found.append(image.offset + np.flatnonzero(is_image))
    counts = tuple(map(len, found))
    if not all(counts):
        raise RuntimeError(
            f"images have {counts} image tokens in the prompt, each must have at least 1"
        )
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
    """M-RoPE positions (3, length): time, height and width of the tokens up to the end of the last
    image. A text token increments all axes by 1; tokens of an image have their grid positions; the
    text after an image continues at the image's largest position + 1 (Wang et al., Qwen2-VL, 2024).
    Transformers 5 continues at the largest height or width; its earlier releases, with which the
    models were trained, did not. The rules differ for a video whose time axis is the longest. If
    text separates the frames of a video, each frame is positioned like an image."""
    axes = np.zeros((3, length), np.int64)
    done = following = 0
    for image, at in zip(images, tokens, strict=True):
        time, height, width = image.grid
        if time * height * width != len(at):
            raise RuntimeError(
                f"an image has a grid of {time} x {height} x {width} and {len(at)} tokens, it must "
                f"have {time * height * width} tokens"
            )
        runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)
        if len(runs) > 1:
            time //= len(runs)
        if any(len(run) != time * height * width for run in runs):
            raise RuntimeError(
                f"an image has a grid of {image.grid}, and its tokens are in {len(runs)} parts of "
                f"{sorted({len(run) for run in runs})}: each part must have the tokens of a frame"
            )
        places = np.indices((time, height, width)).reshape(3, -1)
        if time > 1:
            # float32, like transformers.
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

"""Texts: how a pooling model's whole inputs fill a bucket. Knows no models and keeps nothing from
one plan to the next."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpu.backends.base import Backend
from hpu.layers.metadata import TextAttentionInputs
from hpu.models.pooler import PoolingInputs
from hpu.protocol import Launch, Text
from hpu.runner.input_buffers import Array, Bucket, Inputs

TOKEN_BYTES = 4


class TextFields(NamedTuple):
    """What the host writes for a batch B of texts of at most Q tokens; see TextAttentionInputs and
    PoolingInputs."""

    tokens: Array
    """(B, Q), and so are the next two."""
    positions: Array
    types: Array
    lengths: Array
    """(B,), and so are the others."""
    skipped: Array
    firsts: Array
    lasts: Array
    dimensions: Array
    normalizes: Array


class TextInputs(Inputs[TextFields]):
    """Of a launch of whole texts."""

    context: TextAttentionInputs
    pooling: PoolingInputs

    def __init__(self, bucket: Bucket, backend: Backend, *, is_static: bool) -> None:
        _, batch, query, _ = bucket
        shapes: list[tuple[int, ...]] = [(batch, query)] * 3 + [(batch,)] * 6
        super().__init__(bucket, shapes, TextFields, backend, is_static=is_static)
        self.tokens, positions, types, *asked = self.views
        self.context = TextAttentionInputs(positions, types, asked[0])
        self.pooling = PoolingInputs(*asked)


def num_tokens(text: Text) -> int:
    """How long a text is."""
    return text.tokens.nbytes // TOKEN_BYTES


def fill_texts(launch: Launch, texts: Sequence[Text], width: int, out: TextFields) -> None:
    """Write the inputs of the launch's `texts`; `width` is what a whole vector has. RuntimeError
    when they do not fit its bucket."""
    batch, query = out.tokens.shape
    longest = max((num_tokens(text) for text in texts), default=0)
    if not 0 < len(texts) <= batch or not 0 < longest <= query:
        raise RuntimeError(
            f"{len(texts)} texts of up to {longest} tokens do not fit {launch.bucket}"
        )
    for column in out:
        column[:] = 0
    for row, text in enumerate(texts):
        count = num_tokens(text)
        out.tokens[row, :count] = np.frombuffer(text.tokens, np.dtype("<u4"))
        out.positions[row, :count] = np.arange(count)
        if text.num_first:
            out.types[row, text.num_first : count] = 1
        out.lengths[row] = count
        out.skipped[row] = text.num_skipped
        out.firsts[row] = row * query + text.num_skipped
        out.lasts[row] = row * query + count - 1
        out.dimensions[row] = text.dimensions or width
        out.normalizes[row] = text.normalizes


def fill_idle(out: TextFields) -> None:
    """Write inputs as of full rows: for a warm-up."""
    batch, query = out.tokens.shape
    for column in out:
        column[:] = 0
    # Some position tables end before the bucket does.
    out.lengths[:] = query
    out.firsts[:] = out.lasts[:] = np.arange(batch) * query
    out.dimensions[:] = 1

"""Vectors as JSON numbers, base64 or packed bits."""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from server.pooling.pipeline import Vectors

BINARY_TYPES = ("binary", "ubinary")
"""Embedding types that pack the signs of 8 numbers into 1; the first number has the highest bit."""


def encode_vectors(vectors: Vectors, encoding_format: str | None) -> msgspec.Raw | str:
    """(width,) as a JSON list, (rows, width) as a list of lists; base64: all numbers as
    little-endian float32 in one string."""
    if encoding_format == "base64":
        return base64.b64encode(vectors.astype("<f4").tobytes()).decode()
    # Encoded one result at a time, so that other threads can take the GIL in between.
    return msgspec.Raw(msgspec.json.encode(vectors.tolist()))


def typed_embeddings(types: Sequence[str], vectors: Sequence[Vectors]) -> dict[str, list[Any]]:
    """The first row of each entry of `vectors`, in each of the `types` of Cohere's API."""
    return {name: [_encoder(name)(rows[0]) for rows in vectors] for name in types}


def _encoder(name: str) -> Callable[[Vectors], Any]:
    if name == "ubinary":
        return _packed_signs
    if name == "binary":
        return lambda vector: [number - 128 for number in _packed_signs(vector)]
    return lambda vector: encode_vectors(vector, name)


def _packed_signs(vector: Vectors) -> list[int]:
    return [int(number) for number in np.packbits(vector >= 0)]

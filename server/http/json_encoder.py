"""Encodes large JSON in pieces, because the encoder holds the GIL during a call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

PIECE_WEIGHT = 4096
"""Weight that is encoded in a single call, in a fraction of a millisecond. A value has weight 1,
and text and encoded JSON add to it."""
CHARACTERS_PER_WEIGHT = 16
"""Number of characters of text that add weight 1."""
RAW_BYTES_PER_WEIGHT = 64
"""Number of bytes of encoded JSON (msgspec.Raw) that add weight 1: encoded JSON is only copied."""
_PIECE_CHARACTERS = PIECE_WEIGHT * CHARACTERS_PER_WEIGHT

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class LongJson:
    """A large value that only `json_pieces` can encode."""

    weight: int
    """Weight of the value; above PIECE_WEIGHT."""
    pieces: Callable[[], Iterator[bytes]]
    """Encodes the value in pieces of at most a few milliseconds."""


def encode_json(value: Any) -> bytes:
    """`value` as JSON. For a large value call it on a thread: it is slow, but releases the GIL
    regularly."""
    # join releases the GIL.
    return b"".join(json_pieces(value))


def weighs_more(value: Any, weight: int) -> bool:
    """Whether the weight of `value` exceeds `weight` (for the weights see the constants above).
    Stops at the limit."""
    return _weight_left(value, weight) < 0


def json_pieces(value: object) -> Iterator[bytes]:
    """`value` as JSON in pieces. Only pieces of msgspec.Raw may end inside a UTF-8 character."""
    if not weighs_more(value, PIECE_WEIGHT):
        yield _encode(value)
    elif isinstance(value, str):
        yield from _text_pieces(value)
    elif isinstance(value, dict):
        yield from _dict_pieces(value)
    elif isinstance(value, (list, tuple)):
        yield from _list_pieces(value)
    elif isinstance(value, LongJson):
        yield from value.pieces()
    elif isinstance(value, msgspec.Raw):
        yield from slices_of(memoryview(value), PIECE_WEIGHT * RAW_BYTES_PER_WEIGHT)
    else:
        yield _encode(value)


def slices_of(data: bytes | memoryview, num_bytes: int) -> Iterator[bytes]:
    """`data` in slices of at most `num_bytes`."""
    view = memoryview(data)
    for start in range(0, len(view), num_bytes):
        yield bytes(view[start : start + num_bytes])


def _text_pieces(text: str) -> Iterator[bytes]:
    yield b'"'
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield _encode(text[start : start + _PIECE_CHARACTERS])[1:-1]
    yield b'"'


def _list_pieces(values: list[Any] | tuple[Any, ...]) -> Iterator[bytes]:
    separator, left, start = b"[", PIECE_WEIGHT, 0
    for index, entry in enumerate(values):
        left = _weight_left(entry, left)
        if left >= 0:
            continue
        if index > start:
            yield separator + _encode(values[start:index])[1:-1]
            separator = b","
        start, left = index, _weight_left(entry, PIECE_WEIGHT)
        if left < 0:
            yield separator
            yield from json_pieces(entry)
            separator, start, left = b",", index + 1, PIECE_WEIGHT
    if start < len(values):
        yield separator + _encode(values[start:])[1:-1]
    yield b"]"


def _dict_pieces(fields: dict[str, Any]) -> Iterator[bytes]:
    separator = b"{"
    for name, value in fields.items():
        yield separator
        yield from json_pieces(name)
        yield b":"
        yield from json_pieces(value)
        separator = b","
    yield b"}"


def _weight_left(value: object, left: int) -> int:
    """`left` minus the weight of `value`; negative as soon as `value` weighs more, without reading
    its rest."""
    left -= 1
    if isinstance(value, str):
        return left - len(value) // CHARACTERS_PER_WEIGHT
    if isinstance(value, dict):
        for name, inner in value.items():
            left = _weight_left(inner, left - len(name) // CHARACTERS_PER_WEIGHT)
            if left < 0:
                break
    elif isinstance(value, (list, tuple)):
        for inner in value:
            left = left - 1 if type(inner) in (int, float) else _weight_left(inner, left)
            if left < 0:
                break
    elif isinstance(value, LongJson):
        return left - value.weight
    elif isinstance(value, msgspec.Raw):
        return left - memoryview(value).nbytes // RAW_BYTES_PER_WEIGHT
    return left

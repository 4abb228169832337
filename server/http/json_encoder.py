"""Encoder of large JSON in pieces, because the encoder holds the GIL during a call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

PIECE_WEIGHT = 4096
"""Values that are encoded in a single call: a fraction of a millisecond."""
CHARACTERS_PER_WEIGHT = 16
"""Characters of a text that weigh as much as a value."""
RAW_BYTES_PER_WEIGHT = 64
"""Bytes of encoded JSON that weigh as much as a value: they are only copied."""
_PIECE_CHARACTERS = PIECE_WEIGHT * CHARACTERS_PER_WEIGHT

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class LongJson:
    """A value that only `json_pieces` encodes."""

    weight: int
    """More than PIECE_WEIGHT."""
    pieces: Callable[[], Iterator[bytes]]
    """Encodes the value; no piece takes over a few milliseconds."""


def encode_json(value: Any) -> bytes:
    """`value` as JSON. Call it on a thread for a large value: it is slow, but lets other threads
    run."""
    # join releases the GIL.
    return b"".join(json_pieces(value))


def weighs_more(value: Any, weight: int) -> bool:
    """Whether `value` has more values than `weight`; CHARACTERS_PER_WEIGHT characters count as a
    value. Stops reading `value` at the limit."""
    return _weight_left(value, weight) < 0


def json_pieces(value: Any) -> Iterator[bytes]:
    """`value` as JSON in pieces; no piece ends within a character."""
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
    """Encode runs of small entries in a single call, large entries separately."""
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
    """Encode each field separately: an object with many fields has few bytes in each."""
    separator = b"{"
    for name, value in fields.items():
        yield separator
        yield from json_pieces(name)
        yield b":"
        yield from json_pieces(value)
        separator = b","
    yield b"}"


def _weight_left(value: Any, left: int) -> int:
    """`left` minus the weight of `value`; negative if `value` weighs more, whose rest is not
    read."""
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

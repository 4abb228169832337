"""Decoder of strict JSON for request bodies. The values of a large body are counted first and then
decoded in pieces, because the decoder holds the GIL during a call."""

import contextlib
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from config.errors import UserError

PIECE_BYTES = 64 * 2**10
"""Maximum size of a piece, other than text, that is decoded in a single call. The slowest JSON
(nested empty lists) takes 0.1 us per byte, or 7 ms."""
MAX_WHOLE_BYTES = 2**20
MAX_WHOLE_OBJECTS = 50_000
"""A body within both limits is also decoded in a single call, in 10 ms at most. An ordinary prompt
of 1 MiB takes 1 ms, a tenth of the time for splitting it."""
TEXT_PIECE_BYTES = 2**19
"""Size of a piece of a long string: 2 ms at most (all escapes). A block of 1 MiB is a separate
mapping (see `map_large_blocks`), whose page faults take six times as long as decoding."""
SCANNED_BYTES = 2**18
"""Bytes scanned in a single numpy call; larger arrays would also be separate mappings."""
MAX_VALUES = 2**22
"""Maximum values in a body: slightly above the default limit on queued prompt tokens. As integers
of 32 bytes and pointers of 8 bytes they take 160 MiB."""
MAX_OBJECTS = 2**19
"""Maximum strings, lists and objects in a body, including keys; each takes 50 to 250 bytes."""
MAX_SPLIT_DEPTH = 32
"""Maximum nesting depth of a value longer than PIECE_BYTES, in a body that is split."""

MAX_TEXT_BYTES = 64 * 2**20
"""Maximum memory of a string. With a single emoji, Python stores 4 bytes per character."""
MAX_SHORT_BYTES = 64 * 2**10
"""Maximum length of a key, a number, or whitespace between values, in a body that is split."""

_OPENERS, _CLOSERS = b"[{", b"]}"
_MARKS = (b"[", b"{", b'"')
_PAIRS = {b"[": b"]", b"{": b"}"}
_COMMA, _COLON, _QUOTE = b',:"'
_ESCAPE_BYTES = 6
"""Length of the longest escape, `\\u` and four digits."""

_HEADER_BYTES = sys.getsizeof("\xe9") - 2

_decoder = msgspec.json.Decoder()
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")

Positions = npt.NDArray[np.int64]


def decode_json(data: bytes) -> Any:
    """Decode `data`. For more than PIECE_BYTES call it on a thread: it is slow, but releases the
    GIL regularly. Raises UserError."""
    if len(data) <= PIECE_BYTES:
        return _decoded(data)
    if len(data) <= MAX_WHOLE_BYTES and sum(map(data.count, _MARKS)) <= MAX_WHOLE_OBJECTS:
        # For invalid JSON fall through to the pieces, which find the problem: `_problem` for 1 MiB
        # holds the GIL for 40 ms.
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _decoder.decode(data)
    return _Pieces(data).value()


def _decoded(data: bytes, start: int | None = None) -> Any:
    """Decode `data`: a whole body, or a piece whose first byte is byte `start` of the body."""
    try:
        return _decoder.decode(data)
    except RecursionError:
        raise UserError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem, position = _problem(data, error)
    if start is not None:
        raise _invalid(f"{problem} at byte {start + position}")
    ends = ", where the body ends" if position >= len(data.rstrip()) else ""
    raise _invalid(f"{problem} at {_line_and_column(data, position)}{ends}")


def _problem(data: bytes, error: Exception) -> tuple[str, int]:
    """Description and byte position of the problem in `data`. The standard library's decoder says
    what was expected; msgspec's `error` is the fallback."""
    try:
        text = data.decode()
        json.loads(text)
    except UnicodeDecodeError as wrong:
        return f"byte 0x{data[wrong.start]:02x}, which is not UTF-8,", wrong.start
    except json.JSONDecodeError as wrong:
        problem = wrong.msg.removesuffix(" at").rstrip(": ")
        return problem[:1].lower() + problem[1:], len(text[: wrong.pos].encode())
    except (ValueError, RecursionError):
        pass
    if lone := _LONE_SURROGATE.search(data):
        return "a lone surrogate", lone.start()
    # Python's decoder has no message, for example because it accepts NaN.
    message, _, place = str(error).removeprefix("JSON is malformed: ").partition(" (byte ")
    return message, int(place.removesuffix(")")) if place else 0


def _line_and_column(data: bytes, position: int) -> str:
    line_start = data.rfind(b"\n", 0, position) + 1
    column = len(data[line_start:position].decode(errors="replace")) + 1
    line = data.count(b"\n", 0, position) + 1
    return f"line {line}, column {column}"


class _Pieces:
    """A large body, split at commas and inside strings into pieces that are decoded separately.
    msgspec decodes and validates every piece."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at, self._depth = _structure(data)
        """Positions of brackets, commas and colons outside strings, and the nesting depth after
        each position."""
        self._kinds = np.frombuffer(data, np.uint8)[self._at]

    def value(self) -> Any:
        return self._value(0, len(self._data), 0, len(self._at), 1)

    def _value(self, start: int, end: int, first: int, last: int, depth: int) -> Any:
        """Decode the bytes from `start` to `end`. `first` to `last`: indices of their structural
        characters; `depth`: nesting depth of a list or object in them."""
        data = self._data
        if end - start <= PIECE_BYTES:
            return _decoded(data[start:end], start)
        if first == last:
            return _text(data, start, end)
        if depth > MAX_SPLIT_DEPTH:
            raise UserError(
                f"the body is nested too deeply: a value of {end - start} bytes is inside "
                f"{depth - 1} lists and objects, at most {MAX_SPLIT_DEPTH} are allowed for a "
                f"value of over {PIECE_BYTES} bytes"
            )
        opens, closes = int(self._at[first]), int(self._at[last - 1])
        is_whole = (
            _PAIRS.get(data[opens : opens + 1]) == data[closes : closes + 1]
            and _is_blank(data, start, opens)
            and _is_blank(data, closes + 1, end)
            and bool((self._depth[first : last - 1] >= depth).all())
        )
        if not is_whole:
            raise _invalid(f"brackets do not match in bytes {start} to {end}")
        return self._container(first, last - 1, depth)

    def _container(self, opener: int, closer: int, depth: int) -> Any:
        data, at = self._data, self._at
        is_list = data[at[opener] : at[opener] + 1] == b"["
        result: Any = [] if is_list else {}
        add = result.extend if is_list else result.update
        before, behind = (b"[", b"]") if is_list else (b"{", b"}")
        inner = slice(opener + 1, closer)
        at_depth = self._depth[inner] == depth
        commas = np.flatnonzero(at_depth & (self._kinds[inner] == _COMMA)) + opener + 1
        # Entry i is between edges[i] and edges[i + 1].
        edges = np.concatenate(([opener], commas, [closer]))
        ends = at[edges[1:]]
        index = 0
        while index < len(ends):
            start = int(at[edges[index]]) + 1
            # numpy's searchsorted releases the GIL often and briefly, which kept other threads from
            # acquiring it for 100 ms and more.
            stop = bisect_right(ends, start + PIECE_BYTES, index)
            if stop > index:
                piece = before + data[start : int(ends[stop - 1])] + behind
                part = _decoded(piece, start - 1)
                # An empty piece next to other pieces means an extra comma.
                if not part and len(ends) > 1:
                    raise _invalid(f"an entry is missing at byte {start}")
                add(part)
                index = stop
            else:
                first, last = int(edges[index]) + 1, int(edges[index + 1])
                add(self._long_entry(start, int(ends[index]), first, last, depth, is_list=is_list))
                index += 1
        return result

    def _long_entry(
        self, start: int, end: int, first: int, last: int, depth: int, *, is_list: bool
    ) -> Any:
        """Decode a long entry into a list with a single value or an object with a single key."""
        if is_list:
            return [self._value(start, end, first, last, depth + 1)]
        if first == last or self._kinds[first] != _COLON:
            raise _invalid(f"a key is missing at byte {start}")
        colon = int(self._at[first])
        if colon - start > MAX_SHORT_BYTES:
            raise UserError(
                f"the body has a key of {colon - start} bytes, at most {MAX_SHORT_BYTES} are "
                "allowed"
            )
        key = _decoded(self._data[start:colon], start)
        if not isinstance(key, str):
            raise _invalid(f"a key at byte {start} is not a string")
        return {key: self._value(colon + 1, end, first + 1, last, depth + 1)}


def _structure(data: bytes) -> tuple[Positions, npt.NDArray[np.int32]]:
    """Positions of brackets, commas and colons outside strings, and the depth after each position.
    numpy releases the GIL. Raises UserError for a bracket that is never closed or never opened,
    for a string without an end, and for too many values, strings or containers (without scanning
    the rest)."""
    positions: list[Positions] = []
    num_values, num_strings, num_opened, is_inside = 1, 0, 0, 0
    last_quote = 0
    start = 0
    while start < len(data):
        end = _before_escape(data, start, min(start + SCANNED_BYTES, len(data)))
        # Mask escaped quotes: they neither start nor end a string.
        plain = data[start:end].replace(b"\\\\", b"__").replace(b'\\"', b"__")
        piece = np.frombuffer(plain, np.uint8)
        quotes = piece == _QUOTE
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ is_inside
        opened = (piece == _OPENERS[0]) | (piece == _OPENERS[1])
        is_comma = piece == _COMMA
        shown = opened | (piece == _CLOSERS[0]) | (piece == _CLOSERS[1])
        shown |= is_comma | (piece == _COLON)
        outside = inside == 0
        positions.append(np.flatnonzero(shown & outside) + start)
        num_opened += int(np.count_nonzero(opened & outside))
        num_values += int(np.count_nonzero((opened | is_comma) & outside))
        num_strings += int(np.count_nonzero(quotes & outside))
        _check_counts(num_values, num_strings + num_opened)
        is_inside = int(inside[-1])
        if quotes.any():
            last_quote = start + int(np.flatnonzero(quotes)[-1])
        start = end
    if is_inside:
        raise _invalid(f"the string at byte {last_quote} is not terminated")
    at = np.concatenate(positions)
    kinds = np.frombuffer(data, np.uint8)[at]
    steps = np.isin(kinds, np.frombuffer(_OPENERS, np.uint8)).astype(np.int32)
    steps -= np.isin(kinds, np.frombuffer(_CLOSERS, np.uint8))
    depth = np.cumsum(steps, dtype=np.int32)
    if len(at) and depth.min() < 0:
        closer = int(at[np.argmax(depth < 0)])
        raise _invalid(f"the closing bracket at byte {closer} has no opening bracket")
    if len(at) and depth[-1] != 0:
        opener = int(at[np.flatnonzero((depth == depth[-1]) & (steps > 0))[-1]])
        raise _invalid(f"the bracket at byte {opener} is not closed before the body ends")
    return at, depth


def _check_counts(num_values: int, num_objects: int) -> None:
    if num_values > MAX_VALUES:
        raise UserError(
            f"the body has at least {num_values} values, at most {MAX_VALUES} are allowed"
        )
    if num_objects > MAX_OBJECTS:
        raise UserError(
            f"the body has at least {num_objects} strings, lists and objects, at most "
            f"{MAX_OBJECTS} are allowed"
        )


def _text(data: bytes, start: int, end: int) -> Any:
    opens = data.find(b'"', start, min(end, start + MAX_SHORT_BYTES))
    closes = data.rfind(b'"', max(start, end - MAX_SHORT_BYTES), end)
    if opens < 0 and end - start <= MAX_SHORT_BYTES:
        return _decoded(data[start:end], start)
    if not (
        0 <= opens < closes and _is_blank(data, start, opens) and _is_blank(data, closes + 1, end)
    ):
        raise _invalid(f"bytes {start} to {end} are not a string, list or object")
    return _joined(_text_parts(data, opens + 1, closes))


def _text_parts(data: bytes, position: int, closes: int) -> Iterator[str]:
    length, width = 0, 1
    while position < closes:
        stop = min(position + TEXT_PIECE_BYTES, closes)
        if stop < closes:
            stop = _before_character(data, position, _before_escape(data, position, stop))
        part = _decoded(b'"' + data[position:stop] + b'"', position - 1)
        length, width = length + len(part), max(width, _width(part))
        if (size := length * width) > MAX_TEXT_BYTES:
            raise UserError(
                f"the body has a string of at least {size} bytes, {width} for each character, at "
                f"most {MAX_TEXT_BYTES} are allowed"
            )
        yield part
        position = stop


def _joined(parts: Iterable[str]) -> str:
    """Concatenate in many short calls: `str.join` would map and copy 64 MiB in a single call, which
    takes 50 to 200 ms."""
    text = ""
    # Python appends in place (see `map_large_blocks`) only in specialized code, and counts the
    # iterations of `for` loops for specialization, not of `while` loops. Otherwise each addition
    # copies the whole text.
    for part in parts:
        text += part
    return text


def _width(text: str) -> int:
    """Bytes of memory per character: 1, 2 or 4."""
    return 1 if text.isascii() else (sys.getsizeof(text) - _HEADER_BYTES) // (len(text) + 1)


def _before_escape(data: bytes, start: int, stop: int) -> int:
    """A position up to `stop` that is not inside an escape or a surrogate pair. `start` must be
    outside both."""
    if stop == len(data):
        return stop
    # A run of paired backslashes is complete; an unpaired backslash starts another escape.
    for position in range(max(start, stop - _ESCAPE_BYTES + 1), stop):
        if _starts_escape(data, start, position) and (
            position == stop - 1 or data[position + 1 : position + 2] == b"u"
        ):
            stop = position
            break
    high = stop - _ESCAPE_BYTES
    if (
        high > start
        and data[high + 1 : high + 3].lower() == b"ud"
        and data[high + 3 : high + 4].lower() in (b"8", b"9", b"a", b"b")
        and _starts_escape(data, start, high)
    ):
        return high
    return stop


def _starts_escape(data: bytes, start: int, position: int) -> bool:
    """Whether the byte at `position` is an unescaped backslash."""
    if data[position] != ord("\\"):
        return False
    before = data[start:position]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def _before_character(data: bytes, start: int, stop: int) -> int:
    """The last position up to `stop` that is not inside a character of valid UTF-8."""
    while stop > start + 1 and data[stop] & 0xC0 == 0x80:
        stop -= 1
    return stop


def _is_blank(data: bytes, start: int, end: int) -> bool:
    if end - start > MAX_SHORT_BYTES:
        raise UserError(
            f"the body has {end - start} bytes between two values, at most {MAX_SHORT_BYTES} are "
            "allowed"
        )
    return not data[start:end].strip(b" \t\r\n")


def _invalid(problem: str) -> UserError:
    return UserError(f"the body is not valid JSON: {problem}")

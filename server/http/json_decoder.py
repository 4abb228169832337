"""Strict JSON of a request body to Python objects: counted before it is decoded, and decoded in
pieces, because the decoder holds the GIL for the whole of a call."""

import sys
from bisect import bisect_right
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from config.errors import UserError

PIECE_BYTES = 64 * 2**10
"""Decoded in one call. The costliest JSON (nested empty lists) takes 0.1 us a byte: 7 ms."""
MAX_WHOLE_BYTES = 2**20
MAX_WHOLE_OBJECTS = 50_000
"""A body below both is decoded in one call too: some 10 ms at worst, an ordinary prompt of a MiB
in one, a tenth of what cutting it takes."""
TEXT_PIECE_BYTES = 4 * 2**20
"""Of a long string: at worst (all of it escapes) 16 ms."""
SCANNED_BYTES = 2**20
"""Of a body, at once."""
MAX_VALUES = 2**22
"""Values in a body: as many token ids as may wait in the queue by default. As integers of 32 bytes
and pointers of 8 they take 160 MiB."""
MAX_OBJECTS = 2**19
"""Strings, lists and objects in a body, keys included; each takes 50 to 250 bytes."""
MAX_SPLIT_DEPTH = 32
"""Lists and objects around a value that is itself over PIECE_BYTES long."""

MAX_TEXT_BYTES = 64 * 2**20
"""Memory of one text. One emoji makes Python take 4 bytes for each character of it."""
MAX_SHORT_BYTES = 64 * 2**10
"""Of a key, of a number, and of the space between two values, in a body that is cut."""

_OPENERS, _CLOSERS = b"[{", b"]}"
_MARKS = (b"[", b"{", b'"')
_PAIRS = {b"[": b"]", b"{": b"}"}
_COMMA, _COLON, _QUOTE = b',:"'
_ESCAPE_BYTES = 6
"""Of the longest escape, `\\u` and four digits."""

_HEADER_BYTES = sys.getsizeof("\xe9") - 2

_decoder = msgspec.json.Decoder()

Places = npt.NDArray[np.int64]


def decode_json(data: bytes) -> Any:
    """The value that `data` says. Over PIECE_BYTES it takes a while in which other threads run, so
    call it on a thread then. Raises UserError for what is no JSON, is nested too deeply, or has too
    many values."""
    if len(data) <= PIECE_BYTES:
        return _decoded(data)
    if len(data) <= MAX_WHOLE_BYTES and sum(map(data.count, _MARKS)) <= MAX_WHOLE_OBJECTS:
        return _decoded(data)
    return _Pieces(data).value()


def _decoded(data: bytes) -> Any:
    try:
        return _decoder.decode(data)
    except RecursionError:
        raise UserError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the body is not valid JSON: {error}") from None


class _Pieces:
    """A long body, cut at commas, and strings within it, into pieces that are decoded one by one.

    Where a piece ends is decided by brackets, commas, colons and quotes alone. Everything else is
    checked by the decoder, which sees every byte.
    """

    def __init__(self, data: bytes) -> None:
        """Raises UserError."""
        self._data = data
        self._at, self._depth = _structure(data)
        """The places of brackets, commas and colons outside strings, and how many lists and objects
        are open behind each."""
        self._kinds = np.frombuffer(data, np.uint8)[self._at]

    def value(self) -> Any:
        """All of it."""
        return self._value(0, len(self._data), 0, len(self._at), 1)

    def _value(self, start: int, end: int, first: int, last: int, depth: int) -> Any:
        """The value between two bytes, which holds the structure between `first` and `last`; a list
        or an object is the outermost but `depth - 1`."""
        data = self._data
        if end - start <= PIECE_BYTES:
            return _decoded(data[start:end])
        if first == last:
            return _text(data, start, end)
        if depth > MAX_SPLIT_DEPTH:
            raise UserError(
                f"the body is nested too deeply: a value of {end - start} bytes stands in "
                f"{depth - 1} lists and objects, at most {MAX_SPLIT_DEPTH} may be around one of "
                f"over {PIECE_BYTES} bytes"
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
        """The list or object between two brackets, by runs of its short entries and by its long
        ones."""
        data, at = self._data, self._at
        is_list = data[at[opener] : at[opener] + 1] == b"["
        made: Any = [] if is_list else {}
        add = made.extend if is_list else made.update
        before, behind = (b"[", b"]") if is_list else (b"{", b"}")
        inner = slice(opener + 1, closer)
        at_depth = self._depth[inner] == depth
        commas = np.flatnonzero(at_depth & (self._kinds[inner] == _COMMA)) + opener + 1
        # Of the entry i: it lies between edges[i] and edges[i + 1].
        edges = np.concatenate(([opener], commas, [closer]))
        ends = at[edges[1:]]
        place = 0
        while place < len(ends):
            start = int(at[edges[place]]) + 1
            # Not numpy's: a thread that lets the GIL go that often and that shortly keeps others
            # from it, for 100 ms and more.
            stop = bisect_right(ends, start + PIECE_BYTES, place)
            if stop > place:
                part = _decoded(before + data[start : int(ends[stop - 1])] + behind)
                # A piece that is empty, beside others, has a comma too many.
                if not part and len(ends) > 1:
                    raise _invalid(f"an entry is missing at byte {start}")
                add(part)
                place = stop
            else:
                first, last = int(edges[place]) + 1, int(edges[place + 1])
                add(self._long_entry(start, int(ends[place]), first, last, depth, is_list=is_list))
                place += 1
        return made

    def _long_entry(
        self, start: int, end: int, first: int, last: int, depth: int, *, is_list: bool
    ) -> Any:
        """A list of one value, or an object of one key."""
        if is_list:
            return [self._value(start, end, first, last, depth + 1)]
        if first == last or self._kinds[first] != _COLON:
            raise _invalid(f"a key is missing at byte {start}")
        colon = int(self._at[first])
        if colon - start > MAX_SHORT_BYTES:
            raise UserError(
                f"the body has a key of {colon - start} bytes, at most {MAX_SHORT_BYTES} are taken"
            )
        key = _decoded(self._data[start:colon])
        if not isinstance(key, str):
            raise _invalid(f"a key at byte {start} is no string")
        return {key: self._value(colon + 1, end, first + 1, last, depth + 1)}


def _structure(data: bytes) -> tuple[Places, npt.NDArray[np.int32]]:
    """Where brackets, commas and colons stand outside strings, and the depth behind each. Numpy
    lets other threads run meanwhile. Raises UserError for a body of too many values, and before
    more of it is looked at."""
    places: list[Places] = []
    num_values, num_strings, num_opened, is_inside = 1, 0, 0, 0
    start = 0
    while start < len(data):
        end = _before_escape(data, start, min(start + SCANNED_BYTES, len(data)))
        # An escaped quote neither begins nor ends a string.
        plain = data[start:end].replace(b"\\\\", b"__").replace(b'\\"', b"__")
        piece = np.frombuffer(plain, np.uint8)
        quotes = piece == _QUOTE
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ is_inside
        opened = (piece == _OPENERS[0]) | (piece == _OPENERS[1])
        is_comma = piece == _COMMA
        shown = opened | (piece == _CLOSERS[0]) | (piece == _CLOSERS[1])
        shown |= is_comma | (piece == _COLON)
        outside = inside == 0
        places.append(np.flatnonzero(shown & outside) + start)
        num_opened += int(np.count_nonzero(opened & outside))
        num_values += int(np.count_nonzero((opened | is_comma) & outside))
        num_strings += int(np.count_nonzero(quotes & outside))
        _check_counts(num_values, num_strings + num_opened)
        is_inside = int(inside[-1])
        start = end
    if is_inside:
        raise _invalid("a string has no end")
    at = np.concatenate(places)
    kinds = np.frombuffer(data, np.uint8)[at]
    steps = np.isin(kinds, np.frombuffer(_OPENERS, np.uint8)).astype(np.int32)
    steps -= np.isin(kinds, np.frombuffer(_CLOSERS, np.uint8))
    depth = np.cumsum(steps, dtype=np.int32)
    if len(at) and (depth[-1] != 0 or depth.min() < 0):
        raise _invalid("brackets do not match")
    return at, depth


def _check_counts(num_values: int, num_objects: int) -> None:
    if num_values > MAX_VALUES:
        raise UserError(
            f"the body has at least {num_values} values, at most {MAX_VALUES} are taken"
        )
    if num_objects > MAX_OBJECTS:
        raise UserError(
            f"the body has at least {num_objects} strings, lists and objects, at most "
            f"{MAX_OBJECTS} are taken"
        )


def _text(data: bytes, start: int, end: int) -> Any:
    """A long string, or a number or word."""
    opens = data.find(b'"', start, min(end, start + MAX_SHORT_BYTES))
    closes = data.rfind(b'"', max(start, end - MAX_SHORT_BYTES), end)
    if opens < 0 and end - start <= MAX_SHORT_BYTES:
        return _decoded(data[start:end])
    if not (
        0 <= opens < closes and _is_blank(data, start, opens) and _is_blank(data, closes + 1, end)
    ):
        raise _invalid(f"bytes {start} to {end} are no string, list or object")
    text, width = "", 1
    place = opens + 1
    while place < closes:
        stop = min(place + TEXT_PIECE_BYTES, closes)
        if stop < closes:
            stop = _before_character(data, place, _before_escape(data, place, stop))
        part = _decoded(b'"' + data[place:stop] + b'"')
        width = max(width, _width(part))
        if (size := (len(text) + len(part)) * width) > MAX_TEXT_BYTES:
            raise UserError(
                f"the body has a text that takes at least {size} bytes, {width} for each "
                f"character, at most {MAX_TEXT_BYTES} are taken"
            )
        # In place, piece by piece (see `map_large_blocks`): to join all pieces at once would map
        # and copy 64 MiB in one call, which takes 50 to 200 ms.
        text += part
        place = stop
    return text


def _width(text: str) -> int:
    """Bytes of memory for each character: 1, 2 or 4."""
    return 1 if text.isascii() else (sys.getsizeof(text) - _HEADER_BYTES) // (len(text) + 1)


def _before_escape(data: bytes, start: int, stop: int) -> int:
    """`stop`, or a little before it if that is inside an escape, or between two of them that are
    one character. `start` is not inside one."""
    if stop == len(data):
        return stop
    # Backslashes in pairs are whole escapes; an odd one begins an escape of more characters.
    for place in range(max(start, stop - _ESCAPE_BYTES + 1), stop):
        if _begins_escape(data, start, place) and (
            place == stop - 1 or data[place + 1 : place + 2] == b"u"
        ):
            stop = place
            break
    high = stop - _ESCAPE_BYTES
    if (
        high > start
        and data[high + 1 : high + 3].lower() == b"ud"
        and data[high + 3 : high + 4].lower() in (b"8", b"9", b"a", b"b")
        and _begins_escape(data, start, high)
    ):
        return high
    return stop


def _begins_escape(data: bytes, start: int, place: int) -> bool:
    """Whether the byte at `place` is a backslash that no other one escapes."""
    if data[place] != ord("\\"):
        return False
    before = data[start:place]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def _before_character(data: bytes, start: int, stop: int) -> int:
    """`stop`, or a little before it if that is inside the UTF-8 of a character."""
    while stop > start + 1 and data[stop] & 0xC0 == 0x80:
        stop -= 1
    return stop


def _is_blank(data: bytes, start: int, end: int) -> bool:
    if end - start > MAX_SHORT_BYTES:
        raise UserError(
            f"the body has {end - start} bytes between two values, at most {MAX_SHORT_BYTES} are "
            "taken"
        )
    return not data[start:end].strip(b" \t\r\n")


def _invalid(problem: str) -> UserError:
    return UserError(f"the body is not valid JSON: {problem}")

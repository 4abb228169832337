"""Python literals, read incrementally and emitted as JSON."""

import re
import sys
from collections.abc import Callable
from functools import partial

from server.parsers.stream.json_stream import (
    MAX_DEPTH,
    MAX_LENIENT_CHARACTERS,
    MAX_SCALAR_CHARACTERS,
    read_separated,
    to_json,
)
from server.parsers.stream.text_stream import (
    MAX_BLANKS,
    WHITESPACE,
    ParseError,
    Sink,
    Source,
    Steps,
)

_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_NUMBER = re.compile(r"([+-]?)(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in _WORDS.values()}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_CLOSINGS = {"[": "]", "(": ")", "{": "}"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


Ends = Callable[[], Steps[bool]]
"""Callback: whether the value ends after the next character, which is a quote."""


def read_literal(source: Source, sink: Sink, depth: int, ends: Ends) -> Steps[None]:
    """Read a Python literal and emit it as JSON; a tuple or a set becomes a list. A quote inside a
    string that does not end the value is part of the string. Raises ParseError."""
    first = yield from source.peek()
    if first in "\"'":
        sink('"')
        yield from _read_string(source, sink, ends)
        sink('"')
    elif first in "[({":
        if depth >= MAX_DEPTH:
            raise ParseError
        yield from _read_items(source, sink, depth)
    else:
        word = yield from source.peek_run(_WORD, MAX_SCALAR_CHARACTERS)
        match = _WORDS.get(word) or _number(word)
        if match is None:
            raise ParseError
        source.take(len(word))
        sink(match)


def _number(word: str) -> str | None:
    match = _NUMBER.fullmatch(word)
    if match is None or not (match[2] or (match[3] or ".") != "."):
        return None
    try:
        whole = int(word) if not match[3] and not match[4] else None
        value = float(word) if whole is None else 0.0
    except ValueError:
        return None
    if value in (float("inf"), float("-inf")):
        return None
    return repr(value if whole is None else whole)


def _read_items(source: Source, sink: Sink, depth: int) -> Steps[None]:
    opening = source.take(1)
    closing = _CLOSINGS[opening]
    others = tuple(mark for mark in _CLOSINGS.values() if mark != closing)
    is_dict: bool | None = None if opening == "{" else False
    ends_key, ends_value = (partial(_ends_item, source, marks) for marks in (",:}", "," + closing))

    def read_entry(is_first: bool) -> Steps[None]:
        nonlocal is_dict
        if is_dict is False:
            sink("" if is_first else ", ")
            yield from read_literal(source, sink, depth + 1, ends_value)
            return
        # The character after the first item distinguishes a dict from a set.
        item: list[str] = []
        yield from read_literal(source, item.append, depth + 1, ends_key)
        key = "".join(item)
        yield from source.skip_whitespace()
        if is_first:
            is_dict = (yield from source.peek()) == ":"
            sink("{" if is_dict else "[")
        if not is_dict:
            sink(key)
            return
        yield from source.expect(":")
        yield from source.skip_whitespace()
        name = key if key.startswith('"') else to_json(key)
        sink(f"{'' if is_first else ', '}{name}: ")
        yield from read_literal(source, sink, depth + 1, ends_value)

    if is_dict is False:
        sink("[")
    yield from read_separated(source, closing, read_entry, allows_trailing_comma=True, ends=others)
    sink("{}" if is_dict is None else "}" if is_dict else "]")


def _ends_item(source: Source, marks: str) -> Steps[bool]:
    """Whether an item of a collection ends after the next character."""
    _, character = yield from after_blanks(source, 1)
    return character == "" or character in marks


def _read_string(source: Source, sink: Sink, ends: Ends) -> Steps[None]:
    quote = source.take(1)
    plain = re.compile(rf"[^\\{quote}]+")

    def take(piece: str) -> None:
        sink(to_json(piece)[1:-1])

    while True:
        source.take_run(plain, take)
        character = yield from source.peek()
        if character == "\\":
            yield from _read_escape(source, take)
        elif character == quote:
            if (yield from ends()):
                source.take(1)
                return
            take(source.take(1))


def _read_escape(source: Source, sink: Sink) -> Steps[None]:
    kind = (yield from source.peek_many(2))[1]
    digits = _HEX_DIGITS.get(kind)
    if digits is None:
        source.take(2)
        if kind != "\n":
            # A backslash before any other character is kept, as in Python.
            sink(_ESCAPES.get(kind) or (kind if kind in "\\'\"" else "\\" + kind))
        return
    written = (yield from source.peek_many(2 + digits))[2:]
    is_number = all(digit in "0123456789abcdefABCDEF" for digit in written)
    number = int(written, 16) if is_number else sys.maxunicode + 1
    if number > sys.maxunicode:
        sink(source.take(1))
        return
    source.take(2 + digits)
    sink(chr(number))


def after_blanks(source: Source, at: int) -> Steps[tuple[int, str]]:
    """(offset, character) of the first non-whitespace character after the next `at` characters; the
    character is "" at the end of the text, and " " if all of the next MAX_BLANKS are blanks."""
    for place in range(at, at + MAX_BLANKS):
        character = yield from source.peek_at(place)
        if not character or character not in WHITESPACE:
            return place, character
    return at + MAX_BLANKS, " "


def literal_of(text: str) -> str | None:
    """JSON value of `text` if it is a Python literal of at most MAX_LENIENT_CHARACTERS, otherwise
    None."""
    if len(text) > MAX_LENIENT_CHARACTERS:
        return None
    source = Source()
    source.push(text)
    source.has_ended = True
    pieces: list[str] = []
    try:
        for _ in read_literal(source, pieces.append, 0, partial(_is_last, source)):
            return None
    except ParseError:
        return None
    return "".join(pieces) if source.is_empty else None


def _is_last(source: Source) -> Steps[bool]:
    """Whether the text ends after the next character."""
    return (yield from source.peek_at(1)) == ""

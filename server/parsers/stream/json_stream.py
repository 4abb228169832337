"""Incremental JSON parser: validates text and emits it as it arrives, numbers and words whole."""

import json
import re
from collections.abc import Callable

from server.parsers.stream.text_stream import WHITESPACE, ParseError, Sink, Source, Steps

MAX_DEPTH = 64
MAX_SCALAR_CHARACTERS = 400
MAX_LENIENT_CHARACTERS = 16_384
"""Maximum length of a complete text that is read with corrections, at 1 to 2 us per character.
Longer texts are decoded by Python's decoder."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def read_value(
    source: Source, sink: Sink, depth: int = 0, ends: tuple[str, ...] = ()
) -> Steps[None]:
    """Read any JSON value, and emit it as written, with strings as in `read_string`. Drops trailing
    commas. With `ends`, adds missing brackets before one of `ends` or before an outer bracket.
    Raises ParseError at any other invalid character, for a number of more than
    MAX_SCALAR_CHARACTERS, and for values nested deeper than MAX_DEPTH."""
    first = yield from source.peek()
    if first == '"':
        yield from read_string(source, sink)
    elif first in "{[":
        if depth >= MAX_DEPTH:
            raise ParseError
        yield from _read_container(source, sink, depth, ends)
    else:
        word = yield from source.peek_run(_WORD, MAX_SCALAR_CHARACTERS)
        if not _SCALAR.fullmatch(word):
            raise ParseError
        sink(source.take(len(word)))


def read_string(source: Source, sink: Sink) -> Steps[None]:
    """Read a JSON string. Escapes raw control characters, and backslashes before characters that
    JSON does not allow there, because models write both; a backslash before ' is dropped."""
    yield from source.expect('"')
    sink('"')
    while True:
        source.take_run(_PLAIN, sink)
        character = yield from source.peek()
        if character == '"':
            sink(source.take(1))
            return
        if character == "\\":
            yield from _read_escape(source, sink)
        elif character < " ":
            sink(json.dumps(source.take(1))[1:-1])


def read_short_string(source: Source) -> Steps[str]:
    """Read a JSON string and return its value."""
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    value: str = json.loads("".join(pieces))
    return value


def _read_escape(source: Source, sink: Sink) -> Steps[None]:
    kind = (yield from source.peek_many(2))[1]
    if kind in '"\\/bfnrt':
        sink(source.take(2))
    elif kind == "'":
        source.take(1)
    elif kind == "u" and _HEX.fullmatch((yield from source.peek_many(6))[2:]):
        sink(source.take(6))
    else:
        source.take(1)
        sink("\\\\")


def _read_container(source: Source, sink: Sink, depth: int, ends: tuple[str, ...]) -> Steps[None]:
    is_object = source.take(1) == "{"
    closing = "}" if is_object else "]"
    sink("{" if is_object else "[")
    sink((yield from source.skip_whitespace()))
    is_first = True
    while not (yield from _closes(source, sink, closing, depth, ends)):
        if not is_first:
            yield from source.expect(",")
            space = yield from source.skip_whitespace()
            if (yield from _closes(source, sink, closing, depth, ends)):
                return
            sink("," + space)
        is_first = False
        if is_object:
            yield from read_string(source, sink)
            sink((yield from source.skip_whitespace()))
            yield from source.expect(":")
            sink(":")
            sink((yield from source.skip_whitespace()))
        yield from read_value(source, sink, depth + 1, ends)
        sink((yield from source.skip_whitespace()))


def _closes(
    source: Source, sink: Sink, closing: str, depth: int, ends: tuple[str, ...]
) -> Steps[bool]:
    """Whether a container ends here. Consumes its bracket, or adds a missing bracket."""
    character = yield from source.peek()
    if character == closing:
        sink(source.take(1))
        return True
    is_missing = bool(ends) and (
        (depth > 0 and character in "}]") or bool((yield from source.peek_word(*ends)))
    )
    if is_missing:
        sink(closing)
    return is_missing


def read_separated(
    source: Source,
    closing: str,
    read_entry: Callable[[bool], Steps[None]],
    *,
    allows_trailing_comma: bool = False,
    ends: tuple[str, ...] = (),
) -> Steps[None]:
    """Read comma-separated values, up to and including `closing`, which may be missing before
    `ends`. `read_entry` is called with whether the value is the first."""
    is_first = True
    while True:
        yield from source.skip_whitespace()
        if (yield from source.accept(closing)) or (yield from source.peek_word(*ends)):
            return
        if not is_first:
            yield from source.expect(",")
            yield from source.skip_whitespace()
            if allows_trailing_comma and (yield from source.accept(closing)):
                return
        yield from read_entry(is_first)
        is_first = False


def read_members(
    source: Source,
    sink: Sink,
    closing: str,
    read_key: Callable[[], Steps[str]],
    read_entry: Callable[[str], Steps[None]],
    *,
    allows_trailing_comma: bool = False,
    ends: tuple[str, ...] = (),
) -> Steps[None]:
    """Read named values and emit them as a JSON object. `read_key` reads a name, `read_entry` the
    value."""

    def read_member(is_first: bool) -> Steps[None]:
        key = yield from read_key()
        sink(f"{'' if is_first else ', '}{to_json(key)}: ")
        yield from read_entry(key)

    sink("{")
    yield from read_separated(
        source, closing, read_member, allows_trailing_comma=allows_trailing_comma, ends=ends
    )
    sink("}")


def object_of(text: str) -> str | None:
    """`text` as a JSON object if `value_of` accepts it as an object, otherwise None."""
    value = value_of(text.strip(WHITESPACE))
    return value if value is not None and value.startswith("{") else None


def value_of(text: str) -> str | None:
    """`text` as a JSON value if `read_value` accepts it, otherwise None. A long text must be JSON
    as it is written, except for raw control characters."""
    if len(text) > MAX_LENIENT_CHARACTERS:
        return _strict_value_of(text)
    source = Source()
    source.push(text)
    source.has_ended = True
    pieces: list[str] = []
    try:
        for _ in read_value(source, pieces.append):
            return None
    except ParseError:
        return None
    return "".join(pieces) if source.is_empty else None


def _strict_value_of(text: str) -> str | None:
    try:
        json.loads(text, parse_constant=_no_constant)
        return text
    except RecursionError:
        return None
    except ValueError:
        pass
    try:
        value = json.loads(text, strict=False, parse_constant=_no_constant)
        return to_json(value)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> None:
    """Refuse NaN and infinity, which are not JSON."""
    raise ValueError(name)


def to_json(value: object) -> str:
    """`value` as JSON; lone surrogates become `?`. Raises ValueError for NaN and infinity."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()

"""Calls written as Python: Llama 3.2, Llama 4, LFM2."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import (
    MAX_DEPTH,
    MAX_SCALAR_CHARACTERS,
    quoted,
    read_members,
    read_separated,
)
from server.parsers.stream.text_stream import ParseError, Sink, Source, Steps
from server.parsers.tool.base import MAX_NAME_CHARACTERS, ToolCallFormat
from server.parsers.tool.structural_tag import (
    Functions,
    Part,
    ToolCallGrammar,
    any_of,
    json_value,
    literal,
    named_arguments,
    regex,
    repeat,
    sequence,
)

_NAME = re.compile(r"[A-Za-z_][\w.-]*|", re.ASCII)
_COMMA = regex(", ?")
_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_NUMBER = re.compile(r"([+-]?)(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in _WORDS.values()}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pythonic(ToolCallFormat):
    """`[f(a="x", b=1), g()]`: a list of calls with keywords, whose values are literals.

    Without a marker only functions of the request are calls.
    """

    ends: tuple[str, ...] = ()

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        yield from source.skip_whitespace()
        yield from source.expect("[")
        yield from source.skip_whitespace()
        while True:
            yield from _read_call(source, output, None if marker else tools)
            source.start_recording()
            yield from source.skip_whitespace()
            if (yield from source.accept("]")):
                break
            yield from source.expect(",")
            yield from source.skip_whitespace()
        if self.ends:
            space = yield from source.skip_whitespace()
            if not (yield from source.accept(*self.ends)):
                output.add_text(space)

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        calls = any_of(*(_python_call(name, schema) for name, schema in functions.items()))
        written = sequence(literal("["), calls, repeat(sequence(_COMMA, calls)), literal("]"))
        ends = [literal(end) for end in self.ends]
        form = {marker: sequence(written, *ends) for marker in self.markers}
        if self.allows_unmarked:
            return ToolCallGrammar(form, (), written, "[")
        return ToolCallGrammar(form)


def _read_call(source: Source, output: EventBuffer, allowed: Tools | None) -> Steps[None]:
    name = yield from _read_name(source)
    if allowed is not None and name not in allowed:
        raise ParseError
    yield from source.expect("(")
    output.start_call(name)
    sink = output.add_arguments

    def read_key() -> Steps[str]:
        key = yield from _read_name(source)
        yield from source.skip_whitespace()
        yield from source.expect("=")
        yield from source.skip_whitespace()
        return key

    def read_one(key: str) -> Steps[None]:
        yield from _read_literal(source, sink, 1)

    yield from read_members(source, sink, ")", read_key, read_one, allows_trailing_comma=True)
    output.end_call()


def _read_name(source: Source) -> Steps[str]:
    name = yield from source.peek_run(_NAME, MAX_NAME_CHARACTERS)
    if not name:
        raise ParseError
    return source.take(len(name))


def _read_literal(source: Source, sink: Sink, depth: int) -> Steps[None]:
    """A Python literal, passed on as JSON."""
    first = yield from source.peek()
    if first in "\"'":
        sink('"')
        yield from _read_string(source, sink)
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
    is_dict = opening == "{"
    closing = {"[": "]", "(": ")", "{": "}"}[opening]
    sink("{" if is_dict else "[")

    def read_one(is_first: bool) -> Steps[None]:
        if not is_first:
            sink(", ")
        if is_dict:
            if (yield from source.peek()) not in "\"'":
                raise ParseError
            yield from _read_literal(source, sink, depth + 1)
            yield from source.skip_whitespace()
            yield from source.expect(":")
            yield from source.skip_whitespace()
            sink(": ")
        yield from _read_literal(source, sink, depth + 1)

    yield from read_separated(source, closing, read_one, allows_trailing_comma=True)
    sink("}" if is_dict else "]")


def _read_string(source: Source, sink: Sink) -> Steps[None]:
    quote = source.take(1)
    plain = re.compile(rf"[^\\{quote}]+")

    def take(piece: str) -> None:
        sink(quoted(piece)[1:-1])

    while True:
        source.take_run(plain, take)
        character = yield from source.peek()
        if character == quote:
            source.take(1)
            return
        if character == "\\":
            yield from _read_escape(source, take)


def _read_escape(source: Source, sink: Sink) -> Steps[None]:
    kind = (yield from source.peek_many(2))[1]
    digits = _HEX_DIGITS.get(kind)
    if digits is None:
        source.take(2)
        if kind != "\n":
            # As in Python, a backslash before any other character stays.
            sink(_ESCAPES.get(kind) or (kind if kind in "\\'\"" else "\\" + kind))
        return
    written = (yield from source.peek_many(2 + digits))[2:]
    if not all(digit in "0123456789abcdefABCDEF" for digit in written):
        raise ParseError
    number = int(written, 16)
    if number > 0x10FFFF:
        raise ParseError
    source.take(2 + digits)
    sink(chr(number))


def _python_call(name: str, schema: Mapping[str, Any] | None) -> Part:
    """`name(a=1, b="x")`; values are written as JSON, which the reader accepts too."""
    free = sequence(regex("[A-Za-z_][A-Za-z0-9_]{0,63}="), json_value({}))
    inner = named_arguments(
        name, schema, _COMMA, free, lambda one: sequence(literal(f"{one.name}="), one.as_json)
    )
    return sequence(literal(f"{name}("), *inner, literal(")"))


PYTHONIC = Pythonic(allows_unmarked=True)
LLAMA4_PYTHONIC = Pythonic(
    markers=("<|python_start|>",), ends=("<|python_end|>",), allows_unmarked=True
)
LFM2 = Pythonic(markers=("<|tool_call_start|>",), ends=("<|tool_call_end|>",))

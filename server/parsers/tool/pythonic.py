"""Calls written as Python: Llama 3.2, Llama 4, LFM2."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.base import EventBuffer, Tools
from server.parsers.json_stream import MAX_DEPTH, MAX_SCALAR_CHARACTERS, quoted
from server.parsers.text_stream import ParseError, Sink, Source, Steps
from server.parsers.tool.structural_tag import (
    IDENTIFIER,
    Functions,
    Part,
    ToolCallGrammar,
    any_of,
    arguments_of,
    json_value,
    literal,
    optional,
    regex,
    repeat,
    separated,
    sequence,
    unenforceable,
)

_NAME = re.compile(r"[A-Za-z_][\w.-]*|", re.ASCII)
_COMMA = regex(", ?")
_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_NUMBER = re.compile(r"([+-]?)(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class Pythonic:
    """`[f(a="x", b=1), g()]`: a list of calls with keywords, whose values are literals.

    Without a marker only functions of the request are calls.
    """

    markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    allows_unmarked: bool = False
    ignored_markers: tuple[str, ...] = ()

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
        return (
            ToolCallGrammar(form, (), written, "[")
            if self.allows_unmarked
            else ToolCallGrammar(form)
        )


def _read_call(source: Source, output: EventBuffer, allowed: Tools | None) -> Steps[None]:
    name = yield from source.peek_run(_NAME, _MAX_NAME)
    if not name or (allowed is not None and name not in allowed):
        raise ParseError
    source.take(len(name))
    yield from source.expect("(")
    output.start_call(name)
    output.add_arguments("{")
    keys: set[str] = set()
    while True:
        yield from source.skip_whitespace()
        if (yield from source.accept(")")):
            break
        if keys:
            yield from source.expect(",")
            yield from source.skip_whitespace()
            if (yield from source.accept(")")):
                break
        key = yield from source.peek_run(_NAME, _MAX_NAME)
        if not key or key in keys:
            raise ParseError
        source.take(len(key))
        yield from source.skip_whitespace()
        yield from source.expect("=")
        yield from source.skip_whitespace()
        output.add_arguments(f"{', ' if keys else ''}{json.dumps(key)}: ")
        keys.add(key)
        yield from _read_literal(source, output.add_arguments, 1)
    output.add_arguments("}")
    output.end_call()


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
    count = 0
    while True:
        yield from source.skip_whitespace()
        if count and (yield from source.peek()) != closing:
            yield from source.expect(",")
            yield from source.skip_whitespace()
        if (yield from source.accept(closing)):
            break
        if count:
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
        count += 1
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
    if not IDENTIFIER.fullmatch(name):
        raise unenforceable(name, "the name")
    if schema is None:
        some = sequence(regex("[A-Za-z_][A-Za-z0-9_]{0,63}="), json_value({}))
        return sequence(
            literal(f"{name}("),
            optional(sequence(some, repeat(sequence(_COMMA, some)))),
            literal(")"),
        )
    arguments = arguments_of(name, schema)
    invalid = [one.name for one in arguments if not IDENTIFIER.fullmatch(one.name)]
    if invalid:
        raise unenforceable(name, f"properties.{invalid[0]:.60}")
    written = [sequence(literal(f"{one.name}="), one.as_json) for one in arguments]
    num_required = sum(one.is_required for one in arguments)
    inner = separated(written, num_required, _COMMA)
    return sequence(literal(f"{name}("), *([] if inner is None else [inner]), literal(")"))


PYTHONIC = Pythonic(allows_unmarked=True)
LLAMA4_PYTHONIC = Pythonic(("<|python_start|>",), ("<|python_end|>",), allows_unmarked=True)
LFM2 = Pythonic(("<|tool_call_start|>",), ("<|tool_call_end|>",))

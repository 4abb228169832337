"""Calls written as Python: Llama 3.2, Llama 4, LFM2, OLMo 3."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import (
    MAX_DEPTH,
    MAX_SCALAR_CHARACTERS,
    quoted,
    read_members,
    read_separated,
)
from server.parsers.stream.text_stream import (
    MAX_BLANKS,
    WHITESPACE,
    ParseError,
    Sink,
    Source,
    Steps,
)
from server.parsers.tool.base import MAX_NAME_CHARACTERS, ToolCallFormat
from server.parsers.tool.structural_tag import (
    Functions,
    Part,
    ToolCallGrammar,
    any_of,
    check_optional_arguments,
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
_CLOSINGS = {"[": "]", "(": ")", "{": "}"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pythonic(ToolCallFormat):
    """`[f(a="x", b=1), g()]`: a list of calls with keywords, whose values are literals.

    Without a marker only functions of the request are calls.
    """

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        yield from source.skip_whitespace()
        yield from source.expect("[")
        yield from source.skip_whitespace()
        while True:
            yield from _read_call(source, output, None if marker else tools, self.ends)
            source.start_recording()
            yield from source.skip_whitespace()
            if (yield from source.accept("]")) or (yield from source.peek_word(*self.ends)):
                break
            yield from source.expect(",")
            yield from source.skip_whitespace()
        if self.ends:
            space = yield from source.skip_whitespace()
            if not (yield from source.accept(*self.ends)):
                output.add_text(space)

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        check_optional_arguments(functions)
        calls = any_of(*(_python_call(name, schema) for name, schema in functions.items()))
        written = sequence(literal("["), calls, repeat(sequence(_COMMA, calls)), literal("]"))
        ends = [literal(end) for end in self.ends]
        form = {marker: sequence(written, *ends) for marker in self.markers}
        if self.allows_unmarked:
            return ToolCallGrammar(form, (), written, "[")
        return ToolCallGrammar(form)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicLines(Pythonic):
    """A call in each line, between two tags."""

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        yield from source.skip_whitespace()
        while True:
            yield from _read_call(source, output, None, self.ends, is_list=False)
            source.start_recording()
            space = yield from source.skip_whitespace()
            if (yield from source.accept(*self.ends)):
                return
            if not (yield from _is_name_before(source, 0, "(")):
                output.add_text(space)
                return

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        check_optional_arguments(functions)
        calls = any_of(*(_python_call(name, schema) for name, schema in functions.items()))
        gap = regex("\\n?")
        more = repeat(sequence(literal("\n"), calls))
        written = sequence(gap, calls, more, gap, *map(literal, self.ends))
        return ToolCallGrammar(dict.fromkeys(self.markers, written))


def _read_call(
    source: Source,
    output: EventBuffer,
    allowed: Tools | None,
    ends: tuple[str, ...],
    *,
    is_list: bool = True,
) -> Steps[None]:
    name = yield from _read_name(source)
    if allowed is not None and name not in allowed and name.rpartition(".")[2] not in allowed:
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
        yield from _read_literal(source, sink, 1, partial(_ends_argument, source, ends, is_list))

    yield from read_members(
        source, sink, ")", read_key, read_one, allows_trailing_comma=True, ends=("]", *ends)
    )
    output.end_call()


def _ends_argument(source: Source, ends: tuple[str, ...], is_list: bool) -> Steps[bool]:
    """Whether an argument ends after the next character: an argument or the end of the call
    follows, and after the call another call or the end of the calls."""
    at, character = yield from _after_blanks(source, 1)
    if character == ",":
        at, character = yield from _after_blanks(source, at + 1)
        if character != ")":
            return (yield from _is_name_before(source, at, "="))
    if character != ")":
        return (yield from source.is_followed_by(("]", *ends), at))
    at, character = yield from _after_blanks(source, at + 1)
    if character == ",":
        at, _ = yield from _after_blanks(source, at + 1)
        return (yield from _is_name_before(source, at, "("))
    if not is_list and (yield from _is_name_before(source, at, "(")):
        return True
    return (yield from source.is_followed_by(("]", *ends), at))


def _is_name_before(source: Source, at: int, mark: str) -> Steps[bool]:
    """Whether a name and then `mark` come after the next `at` characters."""
    start = at
    while (character := (yield from source.peek_at(at))) and (
        character.isalnum() or character in "_.-"
    ):
        at += 1
        if at - start > MAX_NAME_CHARACTERS:
            return False
    _, character = yield from _after_blanks(source, at)
    return at > start and character == mark


def _after_blanks(source: Source, at: int) -> Steps[tuple[int, str]]:
    """(place, character) of the first character after the next `at` and whitespace; "" at the
    end."""
    for place in range(at, at + MAX_BLANKS):
        character = yield from source.peek_at(place)
        if not character or character not in WHITESPACE:
            return place, character
    return at + MAX_BLANKS, " "


def _read_name(source: Source) -> Steps[str]:
    name = yield from source.peek_run(_NAME, MAX_NAME_CHARACTERS)
    if not name:
        raise ParseError
    return source.take(len(name))


Ends = Callable[[], Steps[bool]]
"""Tells whether a value ends after the next character, which is a quote."""


def _read_literal(source: Source, sink: Sink, depth: int, ends: Ends) -> Steps[None]:
    """A Python literal, passed on as JSON. A set is a list. A quote in a string that does not end
    the value is part of the string."""
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

    def read_one(is_first: bool) -> Steps[None]:
        nonlocal is_dict
        if is_dict is False:
            sink("" if is_first else ", ")
            yield from _read_literal(source, sink, depth + 1, ends_value)
            return
        # What follows the first item tells whether it is the key of a dict or in a set.
        item: list[str] = []
        yield from _read_literal(source, item.append, depth + 1, ends_key)
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
        name = key if key.startswith('"') else quoted(key)
        sink(f"{'' if is_first else ', '}{name}: ")
        yield from _read_literal(source, sink, depth + 1, ends_value)

    if is_dict is False:
        sink("[")
    yield from read_separated(source, closing, read_one, allows_trailing_comma=True, ends=others)
    sink("{}" if is_dict is None else "}" if is_dict else "]")


def _ends_item(source: Source, marks: str) -> Steps[bool]:
    """Whether an item of a collection ends after the next character."""
    _, character = yield from _after_blanks(source, 1)
    return character == "" or character in marks


def _read_string(source: Source, sink: Sink, ends: Ends) -> Steps[None]:
    quote = source.take(1)
    plain = re.compile(rf"[^\\{quote}]+")

    def take(piece: str) -> None:
        sink(quoted(piece)[1:-1])

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
            # As in Python, a backslash before any other character stays.
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


def _python_call(name: str, schema: Mapping[str, Any] | None) -> Part:
    """`name(a=1, b="x")`; values are written as JSON, which the reader accepts too."""
    free = sequence(regex("[A-Za-z_][A-Za-z0-9_]{0,63}="), json_value({}))
    inner = named_arguments(
        name, schema, _COMMA, free, lambda one: sequence(literal(f"{one.name}="), one.as_json)
    )
    return sequence(literal(f"{name}("), *inner, literal(")"))


PYTHONIC = Pythonic(allows_unmarked=True, unmarked_starts="[")
LLAMA4_PYTHONIC = Pythonic(
    markers=("<|python_start|>",),
    ends=("<|python_end|>",),
    allows_unmarked=True,
    unmarked_starts="[",
)
OLMO3 = PythonicLines(markers=("<function_calls>",), ends=("</function_calls>",))
LFM2 = Pythonic(markers=("<|tool_call_start|>",), ends=("<|tool_call_end|>",))

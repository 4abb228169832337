"""Calls written as Python: Llama 3.2, Llama 4, LFM2, OLMo 3."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.parsers.kinds import ParserKind, by_name
from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import read_members
from server.parsers.stream.python_stream import after_blanks, read_literal
from server.parsers.stream.text_stream import ParseError, Source, Steps
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pythonic(ToolCallFormat):
    """`[f(a="x", b=1), g()]`: a list of calls with literals as keyword arguments. Without a marker,
    only functions of the request are calls."""

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
    """Calls on separate lines, between two tags."""

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

    def read_entry(key: str) -> Steps[None]:
        yield from read_literal(source, sink, 1, partial(_ends_argument, source, ends, is_list))

    yield from read_members(
        source, sink, ")", read_key, read_entry, allows_trailing_comma=True, ends=("]", *ends)
    )
    output.end_call()


def _ends_argument(source: Source, ends: tuple[str, ...], is_list: bool) -> Steps[bool]:
    """Whether an argument ends after the next character: another argument or the end of the call
    must follow, and after the call another call or the end of the calls."""
    at, character = yield from after_blanks(source, 1)
    if character == ",":
        at, character = yield from after_blanks(source, at + 1)
        if character != ")":
            return (yield from _is_name_before(source, at, "="))
    if character != ")":
        return (yield from source.is_followed_by(("]", *ends), at))
    at, character = yield from after_blanks(source, at + 1)
    if character == ",":
        at, _ = yield from after_blanks(source, at + 1)
        return (yield from _is_name_before(source, at, "("))
    if not is_list and (yield from _is_name_before(source, at, "(")):
        return True
    return (yield from source.is_followed_by(("]", *ends), at))


def _is_name_before(source: Source, at: int, mark: str) -> Steps[bool]:
    """Whether a name followed by `mark` comes after the next `at` characters."""
    start = at
    while (character := (yield from source.peek_at(at))) and (
        character.isalnum() or character in "_.-"
    ):
        at += 1
        if at - start > MAX_NAME_CHARACTERS:
            return False
    _, character = yield from after_blanks(source, at)
    return at > start and character == mark


def _read_name(source: Source) -> Steps[str]:
    name = yield from source.peek_run(_NAME, MAX_NAME_CHARACTERS)
    if not name:
        raise ParseError
    return source.take(len(name))


def _python_call(name: str, schema: Mapping[str, Any] | None) -> Part:
    """Grammar for `name(a=1, b="x")`. Values are JSON, which the reader also accepts."""
    free = sequence(regex("[A-Za-z_][A-Za-z0-9_]{0,63}="), json_value({}))
    inner = named_arguments(
        name,
        schema,
        _COMMA,
        free,
        lambda argument: sequence(literal(f"{argument.name}="), argument.as_json),
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

TOOL_PARSERS = by_name(
    ParserKind(
        ("pythonic",),
        PYTHONIC,
        '`[f(a="x"), g()]`',
        marks=("[func_name1(",),
        rank=5,
    ),
    ParserKind(
        ("llama4_pythonic",),
        LLAMA4_PYTHONIC,
        '`[f(a="x"), g()]`, optionally after `<|python_start|>`',
        marks=("<|python_start|>",),
        rank=4,
    ),
    ParserKind(
        ("olmo3",),
        OLMO3,
        '`<function_calls>f(a="x")</function_calls>`, a call in each line',
        marks=("<function_calls>",),
        rank=8,
    ),
    ParserKind(
        ("lfm2",),
        LFM2,
        '`<|tool_call_start|>[f(a="x")]<|tool_call_end|>`',
        marks=("<|tool_call_start|>",),
        rank=4,
    ),
)

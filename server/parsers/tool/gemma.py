"""Calls with unquoted keys and their own string delimiters: FunctionGemma and Gemma 4."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.base import EventBuffer, Tools
from server.parsers.json_stream import MAX_DEPTH, MAX_SCALAR_CHARACTERS, quoted, read_string
from server.parsers.text_stream import ParseError, Sink, Source, Steps, UnexpectedEnd
from server.parsers.tool.base import MAX_NAME_CHARACTERS, checked_name, types_of
from server.parsers.tool.structural_tag import (
    IDENTIFIER,
    Functions,
    Part,
    ToolCallGrammar,
    any_of,
    arguments_of,
    is_plain_text,
    literal,
    optional,
    regex,
    repeat,
    separated,
    sequence,
    text_until,
    unenforceable,
)
from server.parsers.tool.xml import cast

_ANY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Gemma:
    """`call:NAME{key:value,...}` between two tags. A string is raw text between two `quote`s; a
    value without them is a number, a word, an object or a list."""

    markers: tuple[str, ...]
    end: str
    quote: str
    ignored_markers: tuple[str, ...]
    """What the model writes when it waits for the results."""
    allows_unmarked: bool = False

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        yield from source.skip_whitespace()
        if not (yield from source.accept("call:")):
            raise ParseError
        name, _ = yield from source.collect_until(("{",), most=MAX_NAME_CHARACTERS, leave=True)
        name = checked_name(name)
        output.start_call(name)
        yield from self._read_object(source, output.add_arguments, 1, tools.get(name, {}))
        output.end_call()
        source.start_recording()
        yield from source.skip_whitespace()
        yield from source.accept(self.end)

    def _read_object(
        self, source: Source, sink: Sink, depth: int, schema: "Tools | dict[str, object]"
    ) -> Steps[None]:
        yield from source.expect("{")
        sink("{")
        keys: set[str] = set()
        while True:
            yield from source.skip_whitespace()
            if (yield from source.accept("}")):
                break
            if keys:
                yield from source.expect(",")
                yield from source.skip_whitespace()
            key = yield from self._read_key(source)
            if key in keys:
                raise ParseError
            sink(f"{', ' if keys else ''}{quoted(key)}: ")
            keys.add(key)
            yield from source.skip_whitespace()
            yield from self._read_value(source, sink, depth, types_of(schema, key))
        sink("}")

    def _read_key(self, source: Source) -> Steps[str]:
        if (yield from source.accept(self.quote)):
            key, _ = yield from source.collect_until((self.quote,), most=MAX_NAME_CHARACTERS)
            yield from source.skip_whitespace()
            yield from source.expect(":")
        else:
            key, _ = yield from source.collect_until((":",), most=MAX_NAME_CHARACTERS)
        return checked_name(key.strip().strip('"'))

    def _read_value(
        self, source: Source, sink: Sink, depth: int, types: frozenset[str]
    ) -> Steps[None]:
        if (yield from source.accept(self.quote)):
            sink('"')
            if not (
                yield from source.read_until((self.quote,), lambda one: sink(quoted(one)[1:-1]))
            ):
                raise UnexpectedEnd
            sink('"')
            return
        first = yield from source.peek()
        if first in "{[" and depth >= MAX_DEPTH:
            raise ParseError
        if first == "{":
            yield from self._read_object(source, sink, depth + 1, {})
        elif first == "[":
            yield from self._read_list(source, sink, depth + 1)
        elif first == '"':
            yield from read_string(source, sink)
        else:
            word, _ = yield from source.collect_until(
                (",", "}", "]"), most=MAX_SCALAR_CHARACTERS, leave=True
            )
            if not word.strip():
                raise ParseError
            sink(cast(word.strip(), types))

    def _read_list(self, source: Source, sink: Sink, depth: int) -> Steps[None]:
        yield from source.expect("[")
        sink("[")
        count = 0
        while True:
            yield from source.skip_whitespace()
            if (yield from source.accept("]")):
                break
            if count:
                yield from source.expect(",")
                yield from source.skip_whitespace()
                sink(", ")
            yield from self._read_value(source, sink, depth, _ANY)
            count += 1
        sink("]")

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        calls = []
        for name, schema in functions.items():
            if not IDENTIFIER.fullmatch(name):
                raise unenforceable(name, "the name")
            inner = _gemma_arguments(self, name, schema)
            middle = [] if inner is None else [inner]
            calls.append(sequence(literal(f"call:{name}{{"), *middle, literal("}" + self.end)))
        return ToolCallGrammar(dict.fromkeys(self.markers, any_of(*calls)))


def _gemma_arguments(family: Gemma, function: str, schema: Mapping[str, Any] | None) -> Part | None:
    free = sequence(literal(family.quote), text_until(family.quote))
    if schema is None:
        some = sequence(regex("[A-Za-z_][A-Za-z0-9_]{0,63}:"), free)
        return optional(sequence(some, repeat(sequence(literal(","), some))))
    arguments = arguments_of(function, schema)
    written = []
    for one in arguments:
        is_free = is_plain_text(one.schema)
        if not IDENTIFIER.fullmatch(one.name) or not (is_free or _is_flat(one.schema)):
            raise unenforceable(function, f"properties.{one.name:.60}")
        written.append(sequence(literal(f"{one.name}:"), free if is_free else one.as_json))
    return separated(written, sum(one.is_required for one in arguments), literal(","))


def _is_flat(schema: Any) -> bool:
    """Whether values have no keys: JSON may write those in ways that are not read here."""
    if not isinstance(schema, dict):
        return False
    if isinstance(words := schema.get("enum"), list):
        return not any(isinstance(one, (dict, list)) for one in words)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == ["array"]:
        return _is_flat(schema.get("items")) and "prefixItems" not in schema
    return all(one in ("string", "integer", "number", "boolean", "null") for one in kinds)


FUNCTIONGEMMA = Gemma(
    ("<start_function_call>",), "<end_function_call>", "<escape>", ("<start_function_response>",)
)
GEMMA4 = Gemma(("<|tool_call>",), "<tool_call|>", '<|"|>', ("<|tool_response>",))

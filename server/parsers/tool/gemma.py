"""Calls with unquoted keys and special string delimiters: FunctionGemma and Gemma 4."""

from dataclasses import dataclass
from functools import partial

from server.parsers.kinds import ParserKind, by_name
from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import (
    MAX_DEPTH,
    MAX_SCALAR_CHARACTERS,
    read_members,
    read_separated,
    read_string,
    to_json,
)
from server.parsers.stream.text_stream import ParseError, Sink, Source, Steps, UnexpectedEnd
from server.parsers.tool.argument_types import cast, types_of
from server.parsers.tool.base import MAX_NAME_CHARACTERS, ToolCallFormat, checked_name
from server.parsers.tool.structural_tag import (
    Argument,
    Functions,
    Part,
    ToolCallGrammar,
    any_of,
    check_optional_arguments,
    is_plain_text,
    literal,
    named_arguments,
    regex,
    sequence,
    text_until,
    unenforceable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma(ToolCallFormat):
    """`call:NAME{key:value,...}` between two tags. A string is raw text between two `quote`
    delimiters; a value without quotes is a number, a word, an object or a list. The model writes
    the ignored marker when it waits for results."""

    quote: str

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        yield from source.skip_whitespace()
        if not (yield from source.accept("call:")):
            raise ParseError
        name = yield from source.collect_until(("{",), most=MAX_NAME_CHARACTERS, leave=True)
        name = checked_name(name)
        output.start_call(name)
        yield from self._read_object(source, output.add_arguments, 1, tools.get(name, {}))
        output.end_call()
        source.start_recording()
        yield from source.skip_whitespace()
        yield from source.accept(*self.ends)

    def _read_object(
        self, source: Source, sink: Sink, depth: int, schema: "Tools | dict[str, object]"
    ) -> Steps[None]:
        yield from source.expect("{")
        yield from read_members(
            source,
            sink,
            "}",
            partial(self._read_key, source),
            lambda key: self._read_value(source, sink, depth, types_of(schema, key)),
            ends=self.ends,
        )

    def _read_key(self, source: Source) -> Steps[str]:
        if (yield from source.accept(self.quote)):
            key = yield from source.collect_until((self.quote,), most=MAX_NAME_CHARACTERS)
            yield from source.skip_whitespace()
            yield from source.expect(":")
        else:
            stops = (":", ",", "}", *self.ends)
            key = (yield from source.peek_until(stops, 0, MAX_NAME_CHARACTERS)) or ""
            if (yield from source.peek_at(len(key))) != ":":
                raise UnexpectedEnd if source.has_ended else ParseError
            source.take(len(key) + 1)
        yield from source.skip_whitespace()
        return checked_name(key.strip().strip('"'))

    def _read_value(
        self, source: Source, sink: Sink, depth: int, types: frozenset[str]
    ) -> Steps[None]:
        if (yield from source.accept(self.quote)):
            sink('"')
            stops = (self.quote, *self.ends)
            word = yield from source.read_until(
                stops, lambda piece: sink(to_json(piece)[1:-1]), leave=True
            )
            if not word:
                raise UnexpectedEnd
            if not (yield from source.accept(self.quote)):
                raise ParseError
            sink('"')
            return
        first = yield from source.peek()
        if first in "{[" and depth >= MAX_DEPTH:
            raise ParseError
        if first == "{":
            yield from self._read_object(source, sink, depth + 1, {})
        elif first == "[":
            yield from source.expect("[")
            sink("[")
            yield from read_separated(
                source, "]", partial(self._read_item, source, sink, depth), ends=("}", *self.ends)
            )
            sink("]")
        elif first == '"':
            yield from read_string(source, sink)
        else:
            word = yield from source.collect_until(
                (",", "}", "]", self.quote, *self.ends), most=MAX_SCALAR_CHARACTERS, leave=True
            )
            sink(cast(word.strip(), types))
            yield from source.accept(self.quote)

    def _read_item(self, source: Source, sink: Sink, depth: int, is_first: bool) -> Steps[None]:
        if not is_first:
            sink(", ")
        yield from self._read_value(source, sink, depth + 1, frozenset())

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        check_optional_arguments(functions)
        calls = []
        free = sequence(literal(self.quote), text_until(self.quote))
        some = sequence(regex("[A-Za-z_][A-Za-z0-9_]{0,63}:"), free)
        for name, schema in functions.items():

            def write(argument: Argument, function: str = name) -> Part:
                is_free = is_plain_text(argument.schema)
                if not (is_free or _is_flat(argument.schema)):
                    raise unenforceable(function, f"properties.{argument.name:.60}")
                return sequence(literal(f"{argument.name}:"), free if is_free else argument.as_json)

            inner = named_arguments(name, schema, literal(","), some, write)
            calls.append(sequence(literal(f"call:{name}{{"), *inner, literal("}" + self.ends[0])))
        return ToolCallGrammar(dict.fromkeys(self.markers, any_of(*calls)))


def _is_flat(schema: object) -> bool:
    """Whether `schema` is known to allow no objects: a JSON grammar allows forms of keys that this
    reader does not accept."""
    if not isinstance(schema, dict):
        return False
    if isinstance(words := schema.get("enum"), list):
        return not any(isinstance(word, (dict, list)) for word in words)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == ["array"]:
        return _is_flat(schema.get("items")) and "prefixItems" not in schema
    return all(kind in ("string", "integer", "number", "boolean", "null") for kind in kinds)


FUNCTIONGEMMA = Gemma(
    markers=("<start_function_call>",),
    ends=("<end_function_call>",),
    quote="<escape>",
    ignored_markers=("<start_function_response>",),
)
GEMMA4 = Gemma(
    markers=("<|tool_call>",),
    ends=("<tool_call|>",),
    quote='<|"|>',
    ignored_markers=("<|tool_response>",),
)

TOOL_PARSERS = by_name(
    ParserKind(
        ("gemma4",),
        GEMMA4,
        '`call:f{a:<|"|>x<|"|>,b:1}` between tags',
        marks=("<|tool_call>",),
    ),
    ParserKind(
        ("functiongemma",),
        FUNCTIONGEMMA,
        "`call:f{a:<escape>x<escape>,b:1}` between tags",
        marks=("<start_function_call>",),
    ),
)

"""Calls with arguments as nested elements: MiniMax M3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.kinds import ParserKind, by_name
from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import MAX_DEPTH, to_json
from server.parsers.stream.text_stream import ParseError, Sink, Source, Steps, UnexpectedEnd
from server.parsers.tool.argument_types import (
    ANY_TYPE,
    NestedSchema,
    SharedTypes,
    cast,
)
from server.parsers.tool.base import MAX_NAME_CHARACTERS, ToolCallFormat, checked_name
from server.parsers.tool.json import read_call_block, read_inner_arguments
from server.parsers.tool.structural_tag import (
    Argument,
    Functions,
    Part,
    ToolCallGrammar,
    any_of,
    arguments_of,
    check_keywords,
    literal,
    optional,
    regex,
    repeat,
    sequence,
    text_until,
)
from server.parsers.tool.xml import QUOTES_AND_BLANKS, TEXT, check_name, raw_value

_ITEM = "item"
_NAME = regex("[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements(ToolCallFormat):
    """Calls in which each tag follows the special token `namespace`, which does not occur in text.
    An element that contains elements is an object or a list; an element that contains text is a
    value of the type in the schema. A missing end tag is implied by the next tag. Text between
    elements becomes text of the answer, after the call."""

    namespace: str
    opening: str
    """Text before the name of a function."""
    call_end: str
    section_end: str

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        between: list[str] = []
        if marker != self.opening:
            yield from source.skip_whitespace()
            if (yield from read_call_block(source, output, (self.section_end,))):
                return
            yield from self._skip_to_opening(source, between)
        while True:
            yield from self._read_call(source, output, tools, between)
            between.clear()
            source.start_recording()
            yield from source.skip_whitespace()
            if (yield from source.accept(self.section_end)):
                return
            if not (yield from source.accept(self.opening)):
                return

    def _skip_to_opening(self, source: Source, between: list[str]) -> Steps[None]:
        words = (*self.markers, *self.ends)
        word = yield from source.read_until(
            words, between.append, most=MAX_NAME_CHARACTERS, leave=True
        )
        if word != self.opening:
            raise UnexpectedEnd if not word else ParseError
        source.take(len(word))

    def _read_call(
        self, source: Source, output: EventBuffer, tools: Tools, between: list[str]
    ) -> Steps[None]:
        name = yield from source.collect_until((">",), most=MAX_NAME_CHARACTERS)
        name = checked_name(name.strip(QUOTES_AND_BLANKS))
        parameters = tools.get(name, {})
        output.start_call(name)
        between.append((yield from source.skip_whitespace()))
        tags = (self.call_end, self.section_end, self.opening)
        if (
            yield from read_inner_arguments(source, output, parameters.get("properties", {}), tags)
        ):
            yield from source.read_until(tags, between.append, leave=True)
            yield from source.accept(self.call_end)
        else:
            yield from self._read_arguments(
                source, output, NestedSchema(parameters, parameters), between
            )
        output.end_call()
        if text := "".join(between).strip():
            output.add_text(text)

    def _read_arguments(
        self, source: Source, output: EventBuffer, schema: NestedSchema, between: list[str]
    ) -> Steps[None]:
        output.add_arguments("{")
        num_keys = 0
        while key := (yield from self._next_key(source, between, num_keys)):
            output.add_arguments(f"{', ' if num_keys else ''}{to_json(key)}: ")
            num_keys += 1
            if schema.types_of(key) == TEXT:
                output.add_arguments('"')
                yield from self._read_text(
                    source, key, lambda piece: output.add_arguments(to_json(piece)[1:-1])
                )
                output.add_arguments('"')
            else:
                output.add_arguments((yield from self._read_value(source, schema, (key,), between)))
        output.add_arguments("}")

    def _next_key(self, source: Source, between: list[str], num_keys: int) -> Steps[str]:
        """Consume the start tag of the next argument and return its name; "" if the call ends
        first."""
        while True:
            word = yield from source.read_until((self.namespace,), between.append, leave=True)
            if not word:
                if source.is_cut or not num_keys:
                    raise UnexpectedEnd
                return ""
            if (yield from source.accept(self.call_end)):
                return ""
            if (yield from self._ends_call(source)):
                return ""
            tag = yield from self._peek_tag(source)
            yield from self._take_tag(source, tag)
            if tag and not tag.startswith("/"):
                return tag

    def _ends_call(self, source: Source) -> Steps[bool]:
        ends = (self.call_end, self.section_end, self.opening)
        return bool((yield from source.peek_word(*ends)))

    def _peek_tag(self, source: Source) -> Steps[str]:
        """Text between the angle brackets of the tag after a namespace; "" if there is no tag."""
        tag = yield from source.peek_until((">",), len(self.namespace), MAX_NAME_CHARACTERS)
        if tag is None:
            if source.has_ended and source.is_cut:
                raise UnexpectedEnd
            return ""
        name = tag[1:].removeprefix("/")
        is_tag = tag.startswith("<") and name.strip() and name.isprintable() and "<" not in name
        return tag[1:].strip() if is_tag else ""

    def _take_tag(self, source: Source, tag: str) -> Steps[None]:
        source.take(len(self.namespace))
        if tag:
            yield from source.collect_until((">",), most=MAX_NAME_CHARACTERS)

    def _read_text(self, source: Source, key: str, sink: Sink) -> Steps[None]:
        """Read text up to the end tag of `key`, or up to the next tag. The end tag may lack its
        namespace if it stands directly before the next namespace."""
        bare_end = f"</{key}>"
        words = (self.namespace, bare_end + self.namespace)
        while True:
            word = yield from source.read_until(words, sink, leave=True)
            if not word:
                raise UnexpectedEnd
            if word != self.namespace:
                source.take(len(bare_end))
                return
            if (yield from self._ends_call(source)):
                return
            tag = yield from self._peek_tag(source)
            if tag and not tag.startswith("/"):
                return
            yield from self._take_tag(source, tag)
            if tag:
                return

    def _read_value(
        self, source: Source, schema: NestedSchema, path: tuple[str, ...], between: list[str]
    ) -> Steps[str]:
        """Read the value of the last element of `path` and return it as JSON. `schema`: schema of
        the object that contains the element."""
        key = path[-1]
        types = schema.types_of(key)
        has_elements = not types or bool(types & {"object", "array", ANY_TYPE})
        pieces: list[str] = []
        elements: list[tuple[str, str]] = []
        inner: NestedSchema | None = None
        while True:
            is_closed = yield from self._read_piece(source, key, pieces)
            if is_closed or (yield from self._ends_call(source)):
                break
            tag = yield from self._peek_tag(source)
            if tag.startswith("/"):
                if tag[1:].strip() == key or tag[1:].strip() not in path:
                    yield from self._take_tag(source, tag)
                break
            if tag and not has_elements:
                break
            yield from self._take_tag(source, tag)
            if tag:
                if len(path) >= MAX_DEPTH:
                    raise ParseError
                inner = inner or _schema_inside(schema, key, types)
                child = yield from self._read_value(source, inner, (*path, tag), between)
                elements.append((tag, child))
        text = "".join(pieces)
        if not elements:
            return _cast(text, types)
        between.append(text.strip())
        return _joined(elements, types)

    def _read_piece(self, source: Source, key: str, pieces: list[str]) -> Steps[bool]:
        """Read text up to a namespace; returns whether an end tag of `key` that lacks its namespace
        stands directly before it."""
        bare_end = f"</{key}>"
        words = (self.namespace, bare_end + self.namespace)
        word = yield from source.read_until(words, pieces.append, leave=True)
        if not word:
            raise UnexpectedEnd
        if word == self.namespace:
            return False
        source.take(len(bare_end))
        return True

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        check_keywords(functions)
        shared = SharedTypes()
        calls = any_of(*(self._call(name, schema, shared) for name, schema in functions.items()))
        gap, opening = regex("\\n?"), literal(self.opening)
        end = sequence(gap, literal(self.section_end))
        several = sequence(gap, opening, calls, repeat(sequence(gap, opening, calls)), end)
        by_marker = {
            marker: sequence(calls, optional(end)) if marker == self.opening else several
            for marker in self.markers
        }
        return ToolCallGrammar(by_marker, self.ignored_markers)

    def _call(self, name: str, schema: Mapping[str, Any] | None, shared: SharedTypes) -> Part:
        check_name(name, name, (">",))
        gap = regex("\\n?")
        if schema is None:
            start = [gap, literal(f"{self.namespace}<"), _NAME, literal(">")]
            end = [text_until(self.namespace), literal("</"), _NAME, literal(">")]
            arguments = [repeat(sequence(*start, *end))]
        else:
            arguments = [
                self._argument(name, argument, shared) for argument in arguments_of(name, schema)
            ]
        return sequence(literal(f'"{name}">'), *arguments, gap, literal(self.call_end))

    def _argument(self, function: str, argument: Argument, shared: SharedTypes) -> Part:
        check_name(function, argument.name, (">", "<", "/"))
        start = literal(f"{self.namespace}<{argument.name}>")
        end = f"</{argument.name}>"
        value = raw_value(self.namespace, function, argument, shared)
        part = sequence(regex("\\n?"), start, *value, literal(end))
        return part if argument.is_required else optional(part)


def _schema_inside(schema: NestedSchema, key: str, types: frozenset[str]) -> NestedSchema:
    """Schema with a property for each element inside `key`."""
    own = schema.inside(key)
    return own.of_items() if _is_list(types, True) else own


def _is_list(types: frozenset[str], has_items: bool) -> bool:
    """Whether elements are the items of a list. `has_items`: all elements are named `item`."""
    return "array" in types if types and ANY_TYPE not in types else has_items


def _cast(text: str, types: frozenset[str]) -> str:
    if not text.strip() and "string" not in types:
        if "object" in types:
            return "{}"
        if "array" in types:
            return "[]"
    return cast(text, types or TEXT)


def _joined(elements: list[tuple[str, str]], types: frozenset[str]) -> str:
    """Elements as JSON: a list, or an object in which repeated names become a list."""
    if _is_list(types, all(name == _ITEM for name, _ in elements)):
        return f"[{', '.join(value for _, value in elements)}]"
    values: dict[str, list[str]] = {}
    for name, value in elements:
        values.setdefault(name, []).append(value)
    members = [
        f"{to_json(name)}: {found[0] if len(found) == 1 else '[' + ', '.join(found) + ']'}"
        for name, found in values.items()
    ]
    return "{" + ", ".join(members) + "}"


_NAMESPACE = "]<]minimax[>["
MINIMAX_M3 = Elements(
    markers=(f"{_NAMESPACE}<tool_call>", f"{_NAMESPACE}<invoke name="),
    ends=(f"{_NAMESPACE}</invoke>", f"{_NAMESPACE}</tool_call>"),
    namespace=_NAMESPACE,
    opening=f"{_NAMESPACE}<invoke name=",
    call_end=f"{_NAMESPACE}</invoke>",
    section_end=f"{_NAMESPACE}</tool_call>",
)

TOOL_PARSERS = by_name(
    ParserKind(
        # The second name is the name in vLLM's Gaudi plug-in.
        ("minimax_m3", "minimax_m3_py"),
        MINIMAX_M3,
        '`<invoke name="f"><a>x</a></invoke>`, with `]<]minimax[>[` before each tag',
        marks=("]<]minimax[>[",),
    ),
)

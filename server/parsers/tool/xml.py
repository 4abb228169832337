"""Calls with tags around each argument."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import object_of, to_json, value_of
from server.parsers.stream.text_stream import ParseError, Sink, Source, Steps, UnexpectedEnd
from server.parsers.tool.argument_types import (
    ANNOTATIONS,
    ANY_TYPE,
    SharedTypes,
    cast,
    types_of,
)
from server.parsers.tool.base import MAX_NAME_CHARACTERS, ToolCallFormat, checked_name
from server.parsers.tool.json import read_call_block, read_inner_arguments
from server.parsers.tool.structural_tag import (
    IDENTIFIER,
    Argument,
    Functions,
    Part,
    ToolCallGrammar,
    any_of,
    arguments_of,
    check_keywords,
    is_plain_text,
    literal,
    optional,
    regex,
    repeat,
    sequence,
    text_until,
    unenforceable,
)

MAX_ATTRIBUTES_CHARACTERS = 256
_ATTRIBUTE = re.compile(r'(?:\s*(?:index|string|type)="\w*")*')
_TEXT_ATTRIBUTES = ('string="true"', 'type="string"')
_LINE_BREAK = regex("\\n?")
_WRAPPERS = ("arguments", "input", "properties")
"""Argument names under which models wrap all arguments in an object."""
TEXT = frozenset(("string",))
ANY = frozenset((ANY_TYPE,))
QUOTES_AND_BLANKS = "\"' \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Attributes after the name of a parameter, which specify the type of its value."""

    end: str
    """End of the tag."""
    text: str
    """Attributes for a string value, as a regular expression."""
    other: str
    """Attributes for other values, as a regular expression."""
    call: str = ""
    """Attributes after the name of a function; empty: none."""
    is_escaped: bool = False
    """Whether `&quot;` and `&amp;` represent quotes and ampersands in names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags(ToolCallFormat):
    """Tags of a model family. `opening` precedes a function name, `key` a parameter name. Markers
    are the tags around calls, and `opening` itself if models omit the tag before it.

    A missing tag is implied by the next tag of the family. Text between tags becomes text of the
    answer, after the call.
    """

    opening: str = ""
    name_end: tuple[str, ...]
    key: str
    key_end: str
    value_end: str
    call_end: str
    section_end: str = ""
    value: str = ""
    """Tag between key and value."""
    attributes: Attributes | None = None
    cdata: tuple[str, ...] = ()
    """Start and end tags of a CDATA section that may contain a value; empty: none."""
    must_be_known: bool = False
    """Whether a call counts only if it names a function of the request."""
    is_framed: bool = True
    """Whether a line break before and after a value is dropped."""
    leaves_name_end: bool = False
    """Whether the name ends at the next tag, which is not consumed."""

    @property
    def block_ends(self) -> tuple[str, ...]:
        # A dataclass with slots is a new class, so super() without arguments refers to the original
        # class.
        return (self.section_end or self.call_end, *super(Tags, self).block_ends)

    @property
    def _after_call(self) -> tuple[str, ...]:
        ends = (self.section_end, self.opening, *self.markers, *self.ignored_markers)
        return tuple(dict.fromkeys(tag for tag in ends if tag))

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        is_bare = marker == self.opening
        # A call tag without its surrounding tag may be text, so it must name a known function.
        known = tools if self.must_be_known or (is_bare and len(self.markers) > 1) else None
        between: list[str] = []
        if not is_bare:
            yield from source.skip_whitespace()
            ends = tuple(filter(None, (self.section_end, self.call_end)))
            if (yield from read_call_block(source, output, ends)):
                return
            if self.opening:
                yield from self._skip_to_opening(source, between)
        while True:
            yield from self._read_call(source, output, tools, known, between)
            between.clear()
            source.start_recording()
            if not self.opening:
                return
            yield from source.skip_whitespace()
            if self.section_end and (yield from source.accept(self.section_end)):
                return
            if not (yield from source.accept(self.opening)):
                return

    def _skip_to_opening(self, source: Source, between: list[str]) -> Steps[None]:
        word = yield from source.read_until(
            self._after_call, between.append, most=MAX_NAME_CHARACTERS, leave=True
        )
        if word != self.opening:
            raise UnexpectedEnd if not word else ParseError
        source.take(len(word))

    def _read_call(
        self,
        source: Source,
        output: EventBuffer,
        tools: Tools,
        known: Tools | None,
        between: list[str],
    ) -> Steps[None]:
        name = yield from source.collect_until(
            self.name_end, most=MAX_NAME_CHARACTERS, leave=self.leaves_name_end
        )
        name = checked_name(self._unescaped(name.strip(QUOTES_AND_BLANKS)))
        namespace, _, last = name.partition(".")
        if name not in tools and namespace == last and last in tools:
            # If the template requires a namespace, models write the name twice.
            name = last
        if known is not None and name not in known:
            raise ParseError
        if self.attributes is not None and self.attributes.call:
            yield from self._read_attributes(source, self.attributes.end)
        arguments = _Arguments(output, tools.get(name, {}))
        output.start_call(name)
        between.append((yield from source.skip_whitespace()))
        tags = (self.call_end, *self._after_call)
        if (yield from read_inner_arguments(source, output, arguments.names, tags)):
            yield from source.read_until(tags, between.append, leave=True)
            yield from source.accept(self.call_end)
        else:
            yield from self._read_arguments(source, output, arguments, between)
        output.end_call()
        if text := "".join(between).strip():
            output.add_text(text)

    def _read_arguments(
        self, source: Source, output: EventBuffer, arguments: "_Arguments", between: list[str]
    ) -> Steps[None]:
        output.add_arguments("{")
        while True:
            between.append((yield from source.skip_whitespace()))
            if (yield from source.accept(self.call_end)):
                break
            if (yield from source.accept(self.key)):
                if not (yield from self._read_argument(source, arguments)):
                    between.append(self.key)
            elif not (yield from self._skip_to_tag(source, arguments, between)):
                break
        arguments.end()
        output.add_arguments("}")

    def _skip_to_tag(
        self, source: Source, arguments: "_Arguments", between: list[str]
    ) -> Steps[bool]:
        """Add text up to the next tag to `between`. If the text is a key without its start tag,
        read its value instead. Returns False if the call ends without its end tag."""
        inner = (self.value_end, *((self.value, self.key_end) if self.value else ()))
        tags = (self.key, self.call_end, *inner, *self._after_call)
        pieces: list[str] = []
        word = yield from source.read_until(tags, pieces.append, leave=True)
        text = "".join(pieces)
        if not word and (source.is_cut or not arguments.num_keys):
            raise UnexpectedEnd
        if self.value and word == self.key_end and text.strip():
            source.take(len(word))
            yield from self._read_value(source, arguments, checked_name(text))
            return True
        between.append(text)
        if word in inner:
            source.take(len(word))
        return word in (self.key, self.call_end, *inner)

    def _read_argument(self, source: Source, arguments: "_Arguments") -> Steps[bool]:
        """Read a key and its value; returns False if there is no key."""
        words = (self.key_end, *(("\n",) if self.is_framed else ()), *filter(None, (self.value,)))
        yield from source.skip_whitespace()
        key = yield from source.peek_until(words, 0, MAX_NAME_CHARACTERS)
        name = self._unescaped((key or "").strip(QUOTES_AND_BLANKS))
        if not name or not name.isprintable() or "<" in name:
            if source.is_cut:
                raise UnexpectedEnd
            return False
        source.take(len(key or ""))
        yield from source.accept(self.key_end)
        yield from self._read_value(source, arguments, name)
        return True

    def _read_value(self, source: Source, arguments: "_Arguments", key: str) -> Steps[None]:
        attributes = ""
        if self.attributes is not None:
            attributes = yield from self._read_attributes(source, self.attributes.end)
        if self.value:
            yield from source.skip_whitespace()
            yield from source.accept(self.value)
        if self.is_framed:
            yield from source.accept("\n")
        types = arguments.types_of(key)
        if "=" in attributes:
            is_text = any(word in attributes for word in _TEXT_ATTRIBUTES)
            if is_text and (not types or types & {"string", ANY_TYPE}):
                types = TEXT
        else:
            is_text = types <= TEXT
        if is_text and types <= TEXT and not arguments.is_wrapper(key):
            arguments.add(key, '"')
            yield from self._read_raw(
                source, arguments, key, lambda piece: arguments.more(to_json(piece)[1:-1])
            )
            arguments.more('"')
            return
        pieces: list[str] = []
        yield from self._read_raw(source, arguments, key, pieces.append)
        text = "".join(pieces)
        if "=" in attributes and not is_text:
            value = value_of(text.strip()) or ""
            arguments.add(key, value if value[:1] == '"' else cast(text, types or ANY))
        else:
            arguments.add(key, cast(text, types or TEXT))

    def _unescaped(self, name: str) -> str:
        if self.attributes is None or not self.attributes.is_escaped:
            return name
        return name.replace("&quot;", '"').replace("&amp;", "&")

    def _read_attributes(self, source: Source, end: str) -> Steps[str]:
        text = yield from source.peek_until((end[0], "<"), 0, MAX_ATTRIBUTES_CHARACTERS)
        if text is None:
            raise UnexpectedEnd if source.has_ended else ParseError
        for place, character in enumerate(end, len(text)):
            if (yield from source.peek_at(place)) != character:
                break
        else:
            return source.take(len(text) + len(end))
        match = _ATTRIBUTE.match(text)
        assert match is not None, "there may be no attribute"
        return source.take(match.end())

    def _read_raw(
        self, source: Source, arguments: "_Arguments", key: str, sink: Sink
    ) -> Steps[None]:
        """Read text up to the end tag of a value, or up to the next tag if the end tag is missing.
        Another tag in the text is part of the value, unless the call continues or ends after it."""
        if self.cdata and (yield from source.accept(self.cdata[0])):
            if not (yield from source.read_until(self.cdata[1:], sink)):
                raise UnexpectedEnd
            yield from source.skip_whitespace()
            yield from source.accept(self.value_end)
            return
        trailing = ""

        def take(piece: str) -> None:
            nonlocal trailing
            whole = trailing + piece
            trailing = "\n" if whole.endswith("\n") else ""
            if ready := whole[: len(whole) - len(trailing)]:
                sink(ready)

        ends = (self.value_end, self.key, self.call_end, self.section_end)
        tags = tuple(dict.fromkeys(tag for tag in ends if tag))
        while True:
            word = yield from source.read_until(tags, take, leave=True)
            if word == self.value_end:
                source.take(len(word))
                if trailing and not self.is_framed:
                    sink(trailing)
                return
            if not word:
                sink(trailing)
                raise UnexpectedEnd
            if (yield from self._ends_value(source, word, arguments)):
                return
            take(source.take(len(word)))

    def _ends_value(self, source: Source, word: str, arguments: "_Arguments") -> Steps[bool]:
        if word == self.key:
            key = yield from source.peek_until((self.key_end,), len(word), MAX_NAME_CHARACTERS)
            return key is not None and arguments.expects(key.strip(QUOTES_AND_BLANKS))
        if (yield from source.is_followed_by(self._after_call, len(word))):
            return True
        ends = (self.section_end,) if self.section_end else self._after_call
        return (yield from source.find_next((self.value_end, *ends), len(word))) != self.value_end

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        check_keywords(functions)
        shared = SharedTypes()
        calls = any_of(*(_call(self, name, schema, shared) for name, schema in functions.items()))
        end = [_LINE_BREAK, literal(self.section_end)] if self.section_end else []
        opened = [_LINE_BREAK, literal(self.opening)]
        several = sequence(*opened, calls, repeat(sequence(*opened, calls)), *end)
        alone = sequence(calls, optional(sequence(*end))) if end else calls
        by_marker = {
            marker: several if self.opening and marker != self.opening else alone
            for marker in self.markers
        }
        return ToolCallGrammar(by_marker, self.ignored_markers)


class _Arguments:
    def __init__(self, output: EventBuffer, schema: Mapping[str, Any]) -> None:
        self._output = output
        self._schema = schema
        properties = schema.get("properties")
        self.names = properties.keys() if isinstance(properties, dict) else frozenset()
        self._keys: set[str] = set()
        self._wrapped: tuple[str, str] | None = None
        """(key, value) of the only argument so far, if it may contain all arguments."""

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def types_of(self, key: str) -> frozenset[str]:
        return types_of(self._schema, key)

    def expects(self, key: str) -> bool:
        if key in self._keys or not key.isprintable() or "<" in key:
            return False
        return key in self.names if self.names else IDENTIFIER.fullmatch(key) is not None

    def is_wrapper(self, key: str) -> bool:
        """Whether `key` is not a parameter but may contain all arguments, as in JSON formats; only
        the first key may."""
        is_other = bool(self.names) and key not in self.names
        return is_other and key in _WRAPPERS and not self._keys

    def add(self, key: str, value: str) -> None:
        """Add an argument with its value, or with the start of its value."""
        inner = None
        if self.is_wrapper(key):
            inner = object_of(value) or object_of(json.loads(value) if value[:1] == '"' else "")
        if inner is not None and json.loads(inner).keys() <= self.names:
            self._wrapped = (key, inner)
            self._keys.add(key)
            return
        self._flush()
        self._add(key, value)

    def more(self, piece: str) -> None:
        self._output.add_arguments(piece)

    def end(self) -> None:
        """End the arguments; if the only argument contains all arguments, unwrap it."""
        if self._wrapped is not None:
            self._output.add_arguments(self._wrapped[1].strip()[1:-1])

    def _flush(self) -> None:
        if self._wrapped is not None:
            (key, value), self._wrapped = self._wrapped, None
            self._keys.discard(key)
            self._add(key, value)

    def _add(self, key: str, value: str) -> None:
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._output.add_arguments(f"{comma}{to_json(key)}: {value}")


def _call(family: Tags, name: str, schema: Mapping[str, Any] | None, shared: SharedTypes) -> Part:
    check_name(name, name, family.name_end)
    quote = '"' if family.opening.endswith("name=") else ""
    head = literal(f"{quote}{name}{quote}{family.name_end[0]}")
    if family.attributes is not None and family.attributes.call:
        head = sequence(head, regex(family.attributes.call), literal(family.attributes.end))
    if schema is None:
        return sequence(head, repeat(_any_argument(family)), _LINE_BREAK, literal(family.call_end))
    parts = []
    for argument in arguments_of(name, schema):
        part = _argument(family, name, argument, shared)
        parts.append(part if argument.is_required else optional(part))
    return sequence(head, *parts, _LINE_BREAK, literal(family.call_end))


def _key(family: Tags, key: Part) -> list[Part]:
    quote = [literal('"')] if family.key.endswith("name=") else []
    value = [_LINE_BREAK, literal(family.value)] if family.value else []
    return [_LINE_BREAK, literal(family.key), *quote, key, *quote, literal(family.key_end), *value]


def _any_argument(family: Tags) -> Part:
    attributes = _attributes(family.attributes, is_text=True)
    key = _key(family, regex("[A-Za-z_][A-Za-z0-9_]{0,63}"))
    return sequence(*key, *attributes, text_until(family.value_end))


def _argument(family: Tags, function: str, argument: Argument, shared: SharedTypes) -> Part:
    check_name(function, argument.name, (family.key_end,))
    value = _value(family, function, argument, shared)
    return sequence(*_key(family, literal(argument.name)), *value)


def _value(family: Tags, function: str, argument: Argument, shared: SharedTypes) -> list[Part]:
    schema, as_json = argument.schema, argument.as_json
    is_plain = is_plain_text(schema)
    if family.attributes is not None:
        attributes = _attributes(family.attributes, is_text=is_plain)
        if is_plain:
            return [*attributes, text_until(family.value_end)]
        return [*attributes, as_json, literal(family.value_end)]
    return raw_value(family.value_end, function, argument, shared, is_framed=family.is_framed)


def _attributes(attributes: Attributes | None, *, is_text: bool) -> list[Part]:
    if attributes is None:
        return []
    return [regex(attributes.text if is_text else attributes.other), literal(attributes.end)]


def raw_value(
    end: str, function: str, argument: Argument, shared: SharedTypes, *, is_framed: bool = False
) -> list[Part]:
    """Grammar for an unquoted value, up to and including the tag `end`. Raises UserError, for
    example if the type of the value cannot be derived from its text."""
    schema, gap = argument.schema, [_LINE_BREAK] if is_framed else []
    if is_plain_text(schema):
        return [*gap, text_until(end)]
    types = shared.types_of(schema, argument.definitions)
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if types == {"string"} and isinstance(words, list) and schema.keys() <= _WITH_WORDS:
        return [_any_word(end, function, argument.name, words, is_framed)]
    if not types or "string" in types:
        raise unenforceable(function, f"properties.{argument.name}")
    return [*gap, argument.as_json, *gap, literal(end)]


_WITH_WORDS = ANNOTATIONS | {"type", "enum", "const"}


def _any_word(end: str, function: str, name: str, words: list[Any], is_framed: bool) -> Part:
    frame = "\n" if is_framed else ""
    for word in words:
        if not isinstance(word, str) or end in word:
            raise unenforceable(function, f"properties.{name}")
    return any_of(*(literal(f"{frame}{word}{frame}{end}") for word in words))


def check_name(function: str, name: str, ends: tuple[str, ...]) -> None:
    """Raise UserError for an argument or function name that the parser would reject or read as
    another name."""
    is_read = name == name.strip(QUOTES_AND_BLANKS) and not any(end in name for end in ends)
    if not (is_read and name.isprintable() and 1 <= len(name) <= MAX_NAME_CHARACTERS):
        raise unenforceable(function, f"the name {name!r:.60}")

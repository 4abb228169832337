"""Calls written as tags around each argument: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, Seed,
Step3, Hunyuan."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import quoted
from server.parsers.stream.text_stream import ParseError, Source, Steps, UnexpectedEnd
from server.parsers.tool.argument_types import ANNOTATIONS, cast, types_of
from server.parsers.tool.base import MAX_NAME_CHARACTERS, ToolCallFormat, checked_name
from server.parsers.tool.structural_tag import (
    Argument,
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
    sequence,
    text_until,
    unenforceable,
)

MAX_ATTRIBUTES_CHARACTERS = 256
_LINE_BREAK = regex("\\n?")
_QUOTES_AND_BLANKS = "\"' \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags(ToolCallFormat):
    """The tags of a family. `opening` precedes the function's name, `key` a parameter's. Markers
    are the tags around calls; also `opening` itself if models leave them out."""

    opening: str = ""
    name_end: tuple[str, ...]
    key: str
    key_end: str
    value_end: str
    call_end: str
    section_end: str = ""
    value: str = ""
    """The tag between key and value."""
    has_attributes: bool = False
    """Whether attributes such as `string="true"` follow the key, up to `>`."""
    is_framed: bool = True
    """Whether a line break before and after a value is dropped."""
    leaves_name_end: bool = False
    """Whether the name ends at the next tag, which is not taken."""

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        num_calls = 0
        while True:
            if marker != self.opening or num_calls:
                yield from source.skip_whitespace()
                if self.section_end and (yield from source.accept(self.section_end)):
                    break
                if self.opening and not (yield from source.accept(self.opening)):
                    if num_calls:
                        return
                    raise ParseError
            yield from self._read_call(source, output, tools)
            source.start_recording()
            num_calls += 1
            if not self.opening:
                break
        if not num_calls:
            raise ParseError

    def _read_call(self, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        name = yield from source.collect_until(
            self.name_end, most=MAX_NAME_CHARACTERS, leave=self.leaves_name_end
        )
        name = checked_name(name.strip(_QUOTES_AND_BLANKS))
        schema = tools.get(name, {})
        output.start_call(name)
        output.add_arguments("{")
        keys: set[str] = set()
        while True:
            yield from source.skip_whitespace()
            if (yield from source.accept(self.call_end)):
                break
            if not (yield from source.accept(self.key)):
                raise ParseError
            key = yield from source.collect_until((self.key_end,), most=MAX_NAME_CHARACTERS)
            key = checked_name(key.strip(_QUOTES_AND_BLANKS))
            if key in keys:
                raise ParseError
            output.add_arguments(f"{', ' if keys else ''}{json.dumps(key)}: ")
            keys.add(key)
            yield from self._read_value(source, output, types_of(schema, key))
        output.add_arguments("}")
        output.end_call()

    def _read_value(
        self, source: Source, output: EventBuffer, types: frozenset[str]
    ) -> Steps[None]:
        is_text = not types or types == {"string"}
        if self.has_attributes:
            attributes = yield from source.collect_until((">",), most=MAX_ATTRIBUTES_CHARACTERS)
            if "string=" in attributes:
                is_text = 'string="true"' in attributes
                types = frozenset(("any",))
        if self.value:
            yield from source.skip_whitespace()
            if not (yield from source.accept(self.value)):
                raise ParseError
        if self.is_framed:
            yield from source.accept("\n")
        if is_text:
            yield from self._read_text(source, output)
        else:
            yield from self._read_cast(source, output, types)

    def _read_text(self, source: Source, output: EventBuffer) -> Steps[None]:
        """Text, passed on as it comes, up to the end tag or the line break before it."""
        output.add_arguments('"')
        trailing = ""

        def take(piece: str) -> None:
            nonlocal trailing
            whole = trailing + piece
            trailing = "\n" if self.is_framed and whole.endswith("\n") else ""
            if ready := whole[: len(whole) - len(trailing)]:
                output.add_arguments(quoted(ready)[1:-1])

        if not (yield from source.read_until((self.value_end,), take)):
            raise UnexpectedEnd
        output.add_arguments('"')

    def _read_cast(self, source: Source, output: EventBuffer, types: frozenset[str]) -> Steps[None]:
        pieces: list[str] = []
        if not (yield from source.read_until((self.value_end,), pieces.append)):
            raise UnexpectedEnd
        text = "".join(pieces)
        if self.is_framed:
            text = text.removesuffix("\n")
        output.add_arguments(cast(text, types))

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        calls = any_of(*(_call(self, name, schema) for name, schema in functions.items()))
        end = [_LINE_BREAK, literal(self.section_end)] if self.section_end else []
        opened = [_LINE_BREAK, literal(self.opening)]
        several = sequence(*opened, calls, repeat(sequence(*opened, calls)), *end)
        alone = sequence(calls, optional(sequence(*end))) if end else calls
        by_marker = {
            marker: several if self.opening and marker != self.opening else alone
            for marker in self.markers
        }
        return ToolCallGrammar(by_marker, self.ignored_markers)


def _call(family: Tags, name: str, schema: Mapping[str, Any] | None) -> Part:
    """A call after the opening tag."""
    _check_name(name, name, family.name_end)
    quote = '"' if family.opening.endswith("name=") else ""
    head = literal(f"{quote}{name}{quote}{family.name_end[0]}")
    if schema is None:
        return sequence(head, repeat(_any_argument(family)), _LINE_BREAK, literal(family.call_end))
    parts = []
    for argument in arguments_of(name, schema):
        part = _argument(family, name, argument)
        parts.append(part if argument.is_required else optional(part))
    return sequence(head, *parts, _LINE_BREAK, literal(family.call_end))


def _key(family: Tags, key: Part) -> list[Part]:
    quote = [literal('"')] if family.key.endswith("name=") else []
    value = [_LINE_BREAK, literal(family.value)] if family.value else []
    return [_LINE_BREAK, literal(family.key), *quote, key, *quote, literal(family.key_end), *value]


def _any_argument(family: Tags) -> Part:
    attributes = [literal(' string="true">')] if family.has_attributes else []
    key = _key(family, regex("[A-Za-z_][A-Za-z0-9_]{0,63}"))
    return sequence(*key, *attributes, text_until(family.value_end))


def _argument(family: Tags, function: str, argument: Argument) -> Part:
    _check_name(function, argument.name, (family.key_end,))
    return sequence(*_key(family, literal(argument.name)), *_value(family, function, argument))


def _value(family: Tags, function: str, argument: Argument) -> list[Part]:
    """The value and the tag after it."""
    schema, as_json = argument.schema, argument.as_json
    is_plain = is_plain_text(schema)
    if family.has_attributes:
        if is_plain:
            return [literal(' string="true">'), text_until(family.value_end)]
        return [literal(' string="false">'), as_json, literal(family.value_end)]
    gap = [_LINE_BREAK] if family.is_framed else []
    if is_plain:
        return [*gap, text_until(family.value_end)]
    named = {**argument.definitions, "properties": {argument.name: schema}}
    types = types_of(named, argument.name)
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if types == {"string"} and isinstance(words, list) and schema.keys() <= _WITH_WORDS:
        return [_one_of(family, function, argument.name, words)]
    if not types or "string" in types:
        raise unenforceable(function, f"properties.{argument.name}")
    return [*gap, as_json, *gap, literal(family.value_end)]


_WITH_WORDS = ANNOTATIONS | {"type", "enum", "const"}


def _one_of(family: Tags, function: str, name: str, words: list[Any]) -> Part:
    frame = "\n" if family.is_framed else ""
    for word in words:
        if not isinstance(word, str) or family.value_end in word:
            raise unenforceable(function, f"properties.{name}")
    return any_of(*(literal(f"{frame}{word}{frame}{family.value_end}") for word in words))


def _check_name(function: str, name: str, ends: tuple[str, ...]) -> None:
    is_read = name == name.strip(_QUOTES_AND_BLANKS) and not any(end in name for end in ends)
    if not (is_read and name.isprintable() and 1 <= len(name) <= MAX_NAME_CHARACTERS):
        raise unenforceable(function, f"the name {name!r:.60}")


def _in_section(section: str, **more: Any) -> Tags:
    """The tags of Qwen3-Coder around calls in a `section`."""
    return Tags(
        **{
            "markers": (f"<{section}>",),
            "opening": "<function=",
            "name_end": (">",),
            "key": "<parameter=",
            "key_end": ">",
            "value_end": "</parameter>",
            "call_end": "</function>",
            "section_end": f"</{section}>",
            **more,
        }
    )


def _invoke(prefix: str, quote: str = "", **more: Any) -> Tags:
    """`<invoke name=...><parameter name=...>`, with `prefix` in all tags."""
    return Tags(
        **{
            "opening": f"<{prefix}invoke name={quote}",
            "name_end": (f"{quote}>",),
            "key": f"<{prefix}parameter name={quote}",
            "key_end": quote or ">",
            "value_end": f"</{prefix}parameter>",
            "call_end": f"</{prefix}invoke>",
            **more,
        }
    )


def _key_and_value(**more: Any) -> Tags:
    """Keys and values, each in a tag of its own."""
    return Tags(
        markers=("<tool_call>",),
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        call_end="</tool_call>",
        is_framed=False,
        **more,
    )


QWEN3_CODER = _in_section("tool_call", markers=("<tool_call>", "<function="))
SEED = _in_section("seed:tool_call")
MINIMAX = _invoke("", markers=("<minimax:tool_call>",), section_end="</minimax:tool_call>")
DSML = _invoke(
    "\uff5cDSML\uff5c",
    '"',
    markers=("<\uff5cDSML\uff5cfunction_calls>", "<\uff5cDSML\uff5ctool_calls>"),
    ignored_markers=("</\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5ctool_calls>"),
    has_attributes=True,
    is_framed=False,
)
GLM = _key_and_value(name_end=("\n", "<arg_key>", "</tool_call>"), leaves_name_end=True)
HUNYUAN = _key_and_value(
    name_end=("<tool_sep>",), ignored_markers=("<tool_calls>", "</tool_calls>")
)
STEP3 = _invoke(
    "steptml:",
    markers=("<steptml:invoke name=",),
    ignored_markers=(
        "<\uff5ctool_calls_begin\uff5c>",
        "<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>",
        "<\uff5ctool_call_end\uff5c>",
        "<\uff5ctool_calls_end\uff5c>",
    ),
    is_framed=False,
)

"""How calls of tags are written, as parts of a structural tag. Knows no reader of them."""

from collections.abc import Callable, Mapping
from typing import Any

from server.parsers.tool.base import MAX_NAME_CHARACTERS, types_of
from server.parsers.tool.tag_parts import (
    ANNOTATIONS,
    Argument,
    Part,
    any_of,
    arguments_of,
    is_plain_text,
    optional,
    refused,
    regex,
    repeat,
    row,
    text,
    until,
)
from server.parsers.tool.xml import Tags

_GAP = regex("\\n?")
_QUOTES_AND_BLANKS = "\"' \t\r\n"


def tags_part(
    family: Tags, functions: Mapping[str, Mapping[str, Any] | None]
) -> Callable[[str], Part]:
    """What follows a marker: one call, or several up to the end of their section. Raises
    UserError."""
    calls = any_of(*(_call(family, name, schema) for name, schema in functions.items()))
    end = text(family.section_end) if family.section_end else None

    def content(marker: str) -> Part:
        opened = [text(family.opening)] if family.opening else []
        if marker == family.opening:
            return calls if end is None else row(calls, optional(row(_GAP, end)))
        if not opened:
            return calls
        more = repeat(row(_GAP, *opened, calls))
        return row(_GAP, *opened, calls, more, *([] if end is None else [_GAP, end]))

    return content


def _call(family: Tags, name: str, schema: Mapping[str, Any] | None) -> Part:
    """A call behind the opening tag."""
    _check_name(name, name, family.name_end)
    quote = '"' if family.opening.endswith("name=") else ""
    head = text(f"{quote}{name}{quote}{family.name_end[0]}")
    if schema is None:
        return row(head, repeat(_any_argument(family)), _GAP, text(family.call_end))
    parts = []
    for argument in arguments_of(name, schema):
        part = _argument(family, name, argument)
        parts.append(part if argument.is_required else optional(part))
    return row(head, *parts, _GAP, text(family.call_end))


def _key(family: Tags, key: Part) -> list[Part]:
    quote = [text('"')] if family.key.endswith("name=") else []
    value = [_GAP, text(family.value)] if family.value else []
    return [_GAP, text(family.key), *quote, key, *quote, text(family.key_end), *value]


def _any_argument(family: Tags) -> Part:
    attributes = [text(' string="true">')] if family.has_attributes else []
    key = _key(family, regex("[A-Za-z_][A-Za-z0-9_]{0,63}"))
    return row(*key, *attributes, until(family.value_end))


def _argument(family: Tags, function: str, argument: Argument) -> Part:
    _check_name(function, argument.name, (family.key_end,))
    return row(*_key(family, text(argument.name)), *_value(family, function, argument))


def _value(family: Tags, function: str, argument: Argument) -> list[Part]:
    """The value and the tag behind it."""
    schema, as_json = argument.schema, argument.as_json
    is_plain = is_plain_text(schema)
    if family.has_attributes:
        if is_plain:
            return [text(' string="true">'), until(family.value_end)]
        return [text(' string="false">'), as_json, text(family.value_end)]
    gap = [_GAP] if family.is_framed else []
    if is_plain:
        return [*gap, until(family.value_end)]
    types = types_of({"properties": {argument.name: schema}}, argument.name)
    words = schema.get("enum")
    if types == {"string"} and isinstance(words, list) and schema.keys() <= _WITH_WORDS:
        return [_one_of(family, function, argument.name, words)]
    if not types or "string" in types:
        raise refused(function, f"properties.{argument.name}")
    return [*gap, as_json, *gap, text(family.value_end)]


_WITH_WORDS = ANNOTATIONS | {"type", "enum"}


def _one_of(family: Tags, function: str, name: str, words: list[Any]) -> Part:
    frame = "\n" if family.is_framed else ""
    for word in words:
        if not isinstance(word, str) or family.value_end in word:
            raise refused(function, f"properties.{name}")
    return any_of(*(text(f"{frame}{word}{frame}{family.value_end}") for word in words))


def _check_name(function: str, name: str, ends: tuple[str, ...]) -> None:
    is_read = name == name.strip(_QUOTES_AND_BLANKS) and not any(end in name for end in ends)
    if not (is_read and name.isprintable() and 1 <= len(name) <= MAX_NAME_CHARACTERS):
        raise refused(function, f"the name {name!r:.60}")

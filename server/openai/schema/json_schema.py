"""Helpers for fields that are validated by hand: short forms of their JSON schemas, and lists whose
entries may have unknown types. The prompt leaves out such entries, and the response lists them as
ignored."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from config.errors import value_text, wrong_field
from config.json_text import Json

MAX_TYPE_CHARACTERS = 40

Schema = Json

TEXT: Schema = {"type": "string"}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}


def any_of(*options: Schema) -> Schema:
    """Schema that accepts any of `options`. Nested anyOf lists are flattened."""
    return {"anyOf": [branch for option in options for branch in option.get("anyOf", [option])]}


def array(items: Schema, **bounds: int) -> Schema:
    """Schema of a list of `items`."""
    return {"type": "array", "items": items, **bounds}


def record(properties: dict[str, Schema], required: Sequence[str] = ()) -> Schema:
    """Schema of an object with these properties; other properties are allowed."""
    schema = {**OBJECT, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def constant(word: str) -> Schema:
    """Schema that accepts only `word`."""
    return {**TEXT, "const": word}


def words(*options: str) -> Schema:
    """Schema that accepts any of the words `options`."""
    return {**TEXT, "enum": list(options)}


def type_of(entry: object) -> str | None:
    """The type of an entry; None if the type is missing, empty or not a string."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    return kind if isinstance(kind, str) and kind else None


def untyped(entry: object, where: str, example: str) -> str:
    """The error message for an entry without a type."""
    if isinstance(entry, dict):
        return wrong_field(entry, "type", where, f"a string such as {example!r}")
    return f"{where} is {value_text(entry)}, it must be an object with a type, such as {example!r}"


def ignored_entries(name: str, entries: object, is_ignored: Callable[[Any], bool]) -> Iterator[str]:
    """`name[3]:type` of each ignored entry of the list `name`."""
    if isinstance(entries, list):
        for place, entry in enumerate(entries):
            if is_ignored(entry):
                yield f"{name}[{place}]:{str(type_of(entry))[:MAX_TYPE_CHARACTERS]}"

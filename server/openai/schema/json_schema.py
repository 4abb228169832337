"""JSON schemas of fields whose values are checked by hand, in short forms."""

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

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

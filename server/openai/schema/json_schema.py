"""JSON schemas of fields whose values are checked by hand, in short forms."""

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}


def any_of(*options: Schema) -> Schema:
    """One of `options`; those of an option that is a choice itself stand beside the others."""
    return {"anyOf": [one for option in options for one in option.get("anyOf", [option])]}


def array(items: Schema, **bounds: int) -> Schema:
    """A list of `items`."""
    return {"type": "array", "items": items, **bounds}


def record(properties: dict[str, Schema], required: Sequence[str] = ()) -> Schema:
    """An object with these properties, and any others."""
    schema = {**OBJECT, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def constant(word: str) -> Schema:
    """Only this word."""
    return {**TEXT, "const": word}


def words(*options: str) -> Schema:
    """One of these words."""
    return {**TEXT, "enum": list(options)}

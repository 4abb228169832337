"""A JSON schema made ready for the grammar library: what asks for nothing is left out, and what
would be passed over in silence is refused. Pure."""

from typing import Any

from config.errors import UserError
from engine.structured_output.bounds import NAMED_KEYWORDS, VALUE_KEYWORDS, check_schema_size
from engine.structured_output.json_bounds import check_bounds
from engine.structured_output.json_ends import check_ends

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Keywords that the library does not know, and their values that ask for nothing."""
_FORGOTTEN = ("extends", "disallow", "divisibleBy")
"""Of the third draft; to the library they are words like any other."""


def prepared(schema: Any) -> Any:
    """`schema` as the library is to have it. Raises UserError for what it would not enforce."""
    check_schema_size(schema)
    check_bounds(schema)
    check_ends(schema)
    return _prepared(schema)


def _prepared(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_prepared(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _FORGOTTEN:
            raise _bad(f"{key} is a keyword of an older draft that cannot be enforced")
        if any(type(value) is type(one) and value == one for one in _NEUTRAL.get(key, ())):
            continue
        if key in VALUE_KEYWORDS:
            made[key] = value
        elif key in NAMED_KEYWORDS and isinstance(value, dict):
            made[key] = {name: _prepared(one) for name, one in value.items()}
        else:
            made[key] = _prepared(value)
    return made


def _bad(message: str) -> UserError:
    return UserError(f"the json cannot be compiled: {message}", param="structured_outputs")

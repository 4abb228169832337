"""The form of an answer that must call: a JSON schema made from a request's tools. Knows no
parser."""

from collections.abc import Mapping
from typing import Any

MOST_CALLS = 32
"""Of one answer that must call; without a bound a model may go on to the end of the context."""
_VALUES = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def name_of(choice: Any) -> str | None:
    """The function that a tool_choice names."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and choice.get("type") == "function" else None


def forced_schema(tools: list[Any], choice: Any, *, is_parallel: bool) -> dict[str, Any] | None:
    """What the answer must be: the arguments alone of a function that is named, or a list of calls
    as objects. None where `choice` leaves it to the model. The tools must have been checked."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    named = name_of(choice)
    if named is not None:
        return object_schema(functions[named].get("parameters"))
    if choice != "required":
        return None
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": MOST_CALLS if is_parallel else 1,
        **calls_schema({name: one.get("parameters") for name, one in functions.items()}),
    }


def calls_schema(
    functions: Mapping[str, Mapping[str, Any] | None], key: str = "arguments"
) -> dict[str, Any]:
    """Keywords of an array of calls, as objects with a name and, at `key`, arguments that fit the
    function's schema; any object without one."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                key: {"$ref": f"#/$defs/arguments{place}"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for place, name in enumerate(functions)
    ]
    return {
        "items": {"anyOf": calls},
        "$defs": {
            f"arguments{place}": _moved(object_schema(schema), f"#/$defs/arguments{place}")
            for place, schema in enumerate(functions.values())
        },
    }


def object_schema(schema: Any) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object always."""
    return {"type": "object", **(schema or {})}


def _moved(value: Any, root: str, *, has_names: bool = False) -> Any:
    """A copy of a schema that now stands at `root`: its own references still lead into itself.
    `has_names`: the keys are names that its author chose, not keywords."""
    if isinstance(value, list):
        return [_moved(one, root) for one in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for key, inner in value.items():
        if has_names:
            made[key] = _moved(inner, root)
        elif key == "$ref" and isinstance(inner, str) and inner.startswith("#"):
            made[key] = root + inner[1:]
        elif key in _VALUES:
            made[key] = inner
        else:
            made[key] = _moved(inner, root, has_names=key in _NAMED)
    return made

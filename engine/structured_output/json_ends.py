"""Whether a JSON schema has any value that ends: the grammar library would follow one that has none
for ever. Pure."""

from collections.abc import Iterable
from typing import Any

from config.errors import UserError
from engine.structured_output.bounds import referenced

_MOST_PASSES = 100
"""Enough for any schema that a person would write; what needs more is let through."""
_BRANCHES = ("anyOf", "oneOf")
_CONTAINERS = ("object", "array")


def check_ends(schema: Any) -> None:
    """Raise UserError for a schema all of whose values would have to hold another of its own."""
    nodes = _nodes(schema)
    if not any("$ref" in node for node in nodes):
        return
    ending: set[int] = set()
    for _ in range(_MOST_PASSES):
        before = len(ending)
        # What a schema is made of was found after it.
        for node in reversed(nodes):
            if id(node) not in ending and _ends(node, schema, ending):
                ending.add(id(node))
        if id(schema) in ending:
            return
        if len(ending) == before:
            break
    else:
        return
    raise UserError(
        "the json cannot be compiled: by its $ref every value must hold another one, without end",
        param="structured_outputs",
    )


def _nodes(schema: Any) -> list[dict[str, Any]]:
    """All objects in it, whether they are schemas or not."""
    found, left = [], [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            found.append(one)
            left += one.values()
        elif isinstance(one, list):
            left += one
    return found


def _ends(node: dict[str, Any], root: Any, ending: set[int]) -> bool:
    if "enum" in node or "const" in node:
        return True

    def all_end(schemas: Iterable[Any]) -> bool:
        return all(not isinstance(one, dict) or id(one) in ending for one in schemas)

    needed = list(_list(node.get("allOf")))
    if isinstance(node.get("$ref"), str):
        needed.append(referenced(root, node["$ref"]))
    if not all_end(needed):
        return False
    for name in _BRANCHES:
        branches = _list(node.get(name))
        if branches and not any(all_end([one]) for one in branches):
            return False
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if any(kind not in _CONTAINERS for kind in kinds):
        return True
    return ("object" in kinds and all_end(_required(node))) or (
        "array" in kinds and all_end(_items(node))
    )


def _required(node: dict[str, Any]) -> list[Any]:
    properties = node.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    names = [name for name in _list(node.get("required")) if isinstance(name, str)]
    return [properties.get(name, node.get("additionalProperties")) for name in names]


def _items(node: dict[str, Any]) -> list[Any]:
    """Those that an array cannot be without."""
    least = node.get("minItems", 0)
    least = least if isinstance(least, int) else 0
    first = _list(node.get("prefixItems"))
    return [*first[:least], *([node.get("items")] if least > len(first) else [])]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

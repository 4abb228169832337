"""Checks a JSON schema before the grammar library compiles it, and removes keywords without effect.

Rejects known kinds of schemas that the library would partly ignore, not enforce, or never finish
compiling.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

from config.errors import UserError
from config.json_text import Json
from engine.structured_output.bounds import check_pattern_size, too_large

MAX_NESTING = 120
"""Maximum JSON nesting; the library's reader supports 127 levels."""
MAX_DEPTH = 2_000
"""Maximum schemas on a path from the root, with references followed. The library recurses once per
schema, with 3 to 9 KiB of stack."""
MAX_CHAIN = 100
"""Maximum consecutive schemas on a path that apply to the same value (references, alternatives)."""
MAX_SCHEMAS = 20_000
MAX_PROPERTIES = 2_000
"""Maximum properties of an object: the library's time is quadratic in their number."""
MAX_TERMINATION_PASSES = 100
"""Maximum passes of check_terminates, enough for hand-written schemas. A schema that needs more is
accepted."""

VALUE_KEYWORDS = ("const", "enum", "default", "examples")
"""Keywords whose values are not schemas."""
NAMED_KEYWORDS = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
    "$defs",
    "definitions",
)
"""Keywords that map names chosen by the author to schemas."""
SAME_VALUE_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""Keywords whose schemas apply to the same value as the schema that contains the keyword."""
BRANCH_KEYWORDS = ("anyOf", "oneOf")
CONTAINER_TYPES = ("object", "array")

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Keywords that the library does not support, and their values without effect."""
DRAFT_3_KEYWORDS = ("extends", "disallow", "divisibleBy")
"""Keywords of JSON Schema draft 3, which the library silently ignores."""
_PLAIN: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r'Unimplemented keys: \["(\w+)"\]', re.DOTALL),
        r"`\1` cannot be enforced; leave it out",
    ),
    (
        re.compile(r"Unimplemented keys: \[(.+)\]", re.DOTALL),
        r"the keywords \1 cannot be enforced; leave them out",
    ),
    (
        re.compile(r"Unknown format: (.+)", re.DOTALL),
        r"format '\1' cannot be enforced; use pattern, or leave it out",
    ),
    (
        re.compile(r"min/maxProperties only supported .*", re.DOTALL),
        "minProperties and maxProperties cannot be enforced with optional properties; list all "
        "properties in required",
    ),
    (
        re.compile(r"(?:Anchor|Pointer) '(.*)' does not exist", re.DOTALL),
        r"$ref '#\1' must name a part of this schema",
    ),
    (
        re.compile(r"Resource '(.*)' is not present .*", re.DOTALL),
        r"$ref '\1' must be in this schema; copy its target to $defs",
    ),
    (re.compile(r"Unsatisfiable schema: (.+)", re.DOTALL), r"it must allow a value: \1"),
    (re.compile(r"invalid multiple of", re.DOTALL), "multipleOf must be greater than 0"),
    (
        re.compile(r"Expected array for '(\w+)', got (.+)", re.DOTALL),
        r"`\1` is \2, it must be a list",
    ),
    (
        re.compile(r"Expected f64 for '(\w+)', got (.+)", re.DOTALL),
        r"`\1` is \2, it must be a number",
    ),
    (
        re.compile(r"Expected (?:u64|positive integer) for '(\w+)', got (.+)", re.DOTALL),
        r"`\1` is \2, it must be an integer of at least 0",
    ),
    (
        re.compile(r"Expected (\w+) for '(\w+)', got (.+)", re.DOTALL),
        r"`\2` is \3, it must be a \1",
    ),
    (re.compile(r"(\w+) must be an array", re.DOTALL), r"`\1` must be a list"),
)
"""(regular expression of a library message, message to the client)."""
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def prepare_schema(schema: Any) -> Any:
    """Return `schema` without keywords that have no effect. Raises UserError."""
    if schema is False:
        raise _refusal("the schema is false, it must allow a value")
    check_schema_size(schema)
    check_terminates(schema)
    return _prepare(schema)


def plain_reason(message: str) -> str:
    """Message to the client for the library's `message` about a schema; unknown messages are
    returned unchanged."""
    for pattern, ours in _PLAIN:
        if found := pattern.fullmatch(message):
            return found.expand(ours)
    return message


def _prepare(schema: object) -> Any:
    if isinstance(schema, list):
        return [_prepare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    _check_num_properties(schema)
    _check_types(schema)
    _check_number_bounds(schema)
    prepared = {}
    for keyword, value in schema.items():
        if keyword in DRAFT_3_KEYWORDS:
            raise _refusal(
                f"`{keyword}` is a keyword of an older draft that cannot be enforced; leave it out"
            )
        neutral = NEUTRAL_VALUES.get(keyword, ())
        if any(type(value) is type(other) and value == other for other in neutral):
            continue
        if keyword in VALUE_KEYWORDS:
            prepared[keyword] = value
        elif keyword in NAMED_KEYWORDS and isinstance(value, dict):
            prepared[keyword] = {name: _prepare(part) for name, part in value.items()}
        else:
            prepared[keyword] = _prepare(value)
    return prepared


def check_schema_size(schema: Any) -> None:
    """Raise UserError for a JSON schema that is nested too deeply, also with references followed,
    that has too many schemas, in total or in a row for one value, or that has too large a
    pattern."""
    _check_nesting(schema)
    # Depth first and in order, like the library; each schema is entered once.
    entered: set[int] = set()
    path: list[Iterator[tuple[Any, bool]]] = [iter([(schema, False)])]
    chains = [0]
    while path:
        part, is_same_value = next(path[-1], (None, False))
        if part is None:
            path.pop()
            chains.pop()
            continue
        if not isinstance(part, dict) or id(part) in entered:
            continue
        entered.add(id(part))
        if len(entered) > MAX_SCHEMAS:
            raise too_large("json", f"more than {MAX_SCHEMAS} schemas")
        chains.append(chains[-1] + 1 if is_same_value else 0)
        path.append(iter(_subschemas(part, schema)))
        if chains[-1] > MAX_CHAIN:
            raise too_large("json", f"more than {MAX_CHAIN} schemas in a row for one value")
        if len(path) > MAX_DEPTH:
            raise too_large(
                "json", f"schemas more than {MAX_DEPTH} levels deep, with references followed"
            )


def _check_nesting(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_NESTING:
            raise too_large("json", f"more than {MAX_NESTING} levels")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level, depth = below, depth + 1


def _subschemas(schema: Json, root: Any) -> list[tuple[Any, bool]]:
    """(part, whether it applies to the same value as `schema`) for each part of `schema` that may
    be a schema. Also checks the size of patterns."""
    found: list[tuple[Any, bool]] = []
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str):
            target = _resolve(root, value)
            if target is not None:
                found.append((target, True))
        elif keyword == "pattern" and isinstance(value, str):
            check_pattern_size(value, "json")
        elif keyword in VALUE_KEYWORDS or keyword in ("$defs", "definitions"):
            continue
        elif keyword in NAMED_KEYWORDS and isinstance(value, dict):
            found += [(part, False) for part in value.values() if part is not None]
            if keyword == "patternProperties":
                for pattern in value:
                    check_pattern_size(pattern, "json")
        else:
            parts = value if isinstance(value, list) else [value]
            is_same_value = keyword in SAME_VALUE_KEYWORDS
            found += [(part, is_same_value) for part in parts if part is not None]
    return found


def _resolve(root: Any, reference: str) -> Any:
    """Target of a reference within the schema (a JSON pointer); None for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = root
    for word in reference[1:].split("/")[1:]:
        name = word.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name)
        elif isinstance(target, list) and name.isdecimal() and int(name[:9]) < len(target):
            target = target[int(name[:9])]
        else:
            return None
    return target


def _check_num_properties(schema: Json) -> None:
    count = len(schema["properties"]) if isinstance(schema.get("properties"), dict) else 0
    if count > MAX_PROPERTIES:
        raise _refusal(f"an object has {count} properties, at most {MAX_PROPERTIES} are allowed")


def _check_types(schema: dict[str, object]) -> None:
    given = schema.get("type", [])
    for name in given if isinstance(given, list) else [given]:
        if name not in TYPES:
            raise _refusal(f"type is {reprlib.repr(name)}, it must be one of {', '.join(TYPES)}")


def _check_number_bounds(schema: Json) -> None:
    """Reject an integral exclusive bound of a number whose bounds are less than 1 apart: the
    library (1.9) would accept the bound itself. Integers are not affected."""
    lows = [_number(schema, name) for name in ("minimum", "exclusiveMinimum")]
    highs = [_number(schema, name) for name in ("maximum", "exclusiveMaximum")]
    low = max((value for value in lows if value is not None), default=None)
    high = min((value for value in highs if value is not None), default=None)
    if low is None or high is None or high - low >= 1 or schema.get("type") == "integer":
        return
    for name, bound in (("exclusiveMinimum", lows[1]), ("exclusiveMaximum", highs[1])):
        if bound is not None and float(bound).is_integer():
            raise _refusal(
                f"{name} {bound} cannot be enforced on numbers between {low} and {high}, as these "
                "are less than 1 apart"
            )


def _number(schema: Json, name: str) -> float | None:
    value = schema.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < 2**53 else None


def check_terminates(schema: Any) -> None:
    """Raise UserError for a recursive schema that no finite value satisfies, such as an object that
    requires a property of its own type: the library never finishes compiling some of these. Accepts
    a schema after MAX_TERMINATION_PASSES passes."""
    objects = _all_objects(schema)
    if not any("$ref" in part for part in objects):
        return
    terminating: set[int] = set()
    for _ in range(MAX_TERMINATION_PASSES):
        before = len(terminating)
        # Reversed, since parts come after the schemas that contain them.
        for part in reversed(objects):
            if id(part) not in terminating and _terminates(part, schema, terminating):
                terminating.add(id(part))
        if id(schema) in terminating:
            return
        if len(terminating) == before:
            raise _refusal(
                "its $ref is infinitely recursive: every value must contain another value"
            )


def _all_objects(schema: Any) -> list[Json]:
    """All JSON objects in `schema`, whether or not they are schemas."""
    found, stack = [], [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            found.append(item)
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return found


def _terminates(schema: Json, root: Any, terminating: set[int]) -> bool:
    """Whether `schema` has a finite value, given that the schemas in `terminating` have finite
    values."""
    if "enum" in schema or "const" in schema:
        return True

    def all_terminate(parts: Iterable[Any]) -> bool:
        return all(not isinstance(part, dict) or id(part) in terminating for part in parts)

    required = list(_list(schema.get("allOf")))
    if isinstance(schema.get("$ref"), str):
        required.append(_resolve(root, schema["$ref"]))
    if not all_terminate(required):
        return False
    for keyword in BRANCH_KEYWORDS:
        branches = _list(schema.get(keyword))
        if branches and not any(all_terminate([branch]) for branch in branches):
            return False
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if any(name not in CONTAINER_TYPES for name in types):
        return True
    return ("object" in types and all_terminate(_required_properties(schema))) or (
        "array" in types and all_terminate(_required_items(schema))
    )


def _required_properties(schema: Json) -> list[Any]:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
    return [properties.get(name, schema.get("additionalProperties")) for name in names]


def _required_items(schema: Json) -> list[Any]:
    min_items = schema.get("minItems", 0)
    min_items = min_items if isinstance(min_items, int) else 0
    prefix = _list(schema.get("prefixItems"))
    return [*prefix[:min_items], *([schema.get("items")] if min_items > len(prefix) else [])]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _refusal(message: str) -> UserError:
    return UserError(f"the JSON schema cannot be compiled: {message}", param="structured_outputs")

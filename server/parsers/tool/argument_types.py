"""JSON types that the schema of a function allows for an argument, and text cast to them."""

from collections.abc import Iterator, Mapping
from typing import Any

from server.parsers.stream.json_stream import quoted, value_of

MAX_SCHEMA_NODES = 1000
"""Subschemas that are read for the types of an argument; beyond, all types are allowed."""
MAX_SCHEMA_DEPTH = 32
ANY_TYPE = "any"
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
"""Keywords that do not restrict values."""
_BRANCHES = ("anyOf", "oneOf")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that `schema`, of a function's parameters, allows for parameter `name`. Empty
    if the schema does not restrict them, ANY_TYPE if they cannot be told."""
    search = _Search(schema)
    types = search.all_of(search.types(found, 0) for found in search.named(schema, name, 0))
    if search.is_exhausted:
        return frozenset((ANY_TYPE,))
    return frozenset() if types is None else types


def referenced(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema`, with what it refers to in `root` in the place of the reference."""
    for _ in range(MAX_SCHEMA_DEPTH):
        rest = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        if isinstance(schema.get("$ref"), str) and "allOf" not in schema:
            target = _target(schema["$ref"], root)
        elif "$ref" not in schema and _is_single(schema.get("allOf")):
            target = schema["allOf"][0]
        else:
            break
        if not isinstance(target, dict) or (target.keys() & rest.keys()) - ANNOTATIONS:
            break
        schema = {**target, **rest}
    return schema


class SharedTypes:
    """The types of arguments of a function. Arguments whose schemas have the same values share the
    types."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, frozenset[str]]] = {}

    def types_of(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
        """The JSON types that `schema` allows, with what it refers to in `root`."""
        restricting = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        key = tuple((name, id(value)) for name, value in restricting.items())
        if key not in self._known:
            types = types_of({**root, "properties": {"": schema}}, "")
            # The values are kept, so that no other value takes their id.
            self._known[key] = (restricting, types)
        return self._known[key][1]


def num_keywords(schema: Mapping[str, Any], root: Mapping[str, Any]) -> int:
    """Maximum number of keywords that `referenced` copies for `schema`."""
    count = 0
    current: Any = schema
    for _ in range(MAX_SCHEMA_DEPTH):
        if not isinstance(current, dict):
            break
        count += len(current)
        if isinstance(current.get("$ref"), str):
            current = _target(current["$ref"], root)
        else:
            current = current["allOf"][0] if _is_single(current.get("allOf")) else None
    return count


def _is_single(branches: object) -> bool:
    return isinstance(branches, list) and len(branches) == 1


class _Search:
    """Reads a schema. A set of types is None where the schema does not restrict them."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_nodes = 0
        self._open: set[str] = set()
        """References that are being followed."""

    @property
    def is_exhausted(self) -> bool:
        return self._num_nodes > MAX_SCHEMA_NODES

    def named(self, schema: Any, name: str, depth: int) -> Iterator[Any]:
        """The schemas of parameter `name`."""
        if not self._enter(schema, depth):
            return
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        elif isinstance(others, dict):
            yield others
        if isinstance(schema.get("$ref"), str):
            yield from self.named(_target(schema["$ref"], self._root), name, depth + 1)
        for key in (*_BRANCHES, "allOf"):
            branches = schema.get(key)
            for branch in branches if isinstance(branches, list) else ():
                yield from self.named(branch, name, depth + 1)

    def types(self, schema: Any, depth: int) -> frozenset[str] | None:
        """The types that `schema` allows."""
        if not self._enter(schema, depth):
            return None
        found = [_named_types(schema), _value_types(schema)]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            found.append(self._types_of_reference(reference, depth))
        for key in _BRANCHES:
            branches = schema.get(key)
            if isinstance(branches, list):
                found.append(_union(self.types(branch, depth + 1) for branch in branches))
        branches = schema.get("allOf")
        parts = branches if isinstance(branches, list) else ()
        found += [self.types(part, depth + 1) for part in parts]
        return self.all_of(iter(found))

    def all_of(self, found: "Iterator[frozenset[str] | None]") -> frozenset[str] | None:
        """The types that are in all sets of `found`. A set that contradicts the sets before it is
        ignored."""
        allowed: frozenset[str] | None = None
        for types in found:
            if types is None or (ANY_TYPE in types and allowed is not None):
                continue
            if allowed is None or ANY_TYPE in allowed:
                allowed = types
                continue
            both = allowed & types
            if "integer" in allowed | types and "number" in allowed | types:
                both |= {"integer"}
            allowed = both or allowed
        return allowed

    def _types_of_reference(self, reference: str, depth: int) -> frozenset[str] | None:
        target = _target(reference, self._root)
        if target is None or reference in self._open:
            return frozenset((ANY_TYPE,))
        self._open.add(reference)
        types = self.types(target, depth + 1)
        self._open.discard(reference)
        return types

    def _enter(self, schema: Any, depth: int) -> bool:
        self._num_nodes += 1
        if depth > MAX_SCHEMA_DEPTH:
            self._num_nodes = MAX_SCHEMA_NODES + 1
        return isinstance(schema, dict) and not self.is_exhausted


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a local reference points to; None if there is no such schema."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        if not isinstance(found, dict):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found if isinstance(found, dict) else None


def _named_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    kind = schema.get("type")
    names = [name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)]
    return frozenset(names) or None


def _value_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    values = schema.get("enum")
    if "const" in schema:
        values = [schema["const"]]
    return frozenset(map(_type_of, values)) or None if isinstance(values, list) else None


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _union(found: "Iterator[frozenset[str] | None]") -> frozenset[str] | None:
    types: set[str] = set()
    for branch in found:
        types |= frozenset((ANY_TYPE,)) if branch is None else branch
    return frozenset(types) or None


def cast(text: str, types: frozenset[str]) -> str:
    """`text` as a JSON value that `types` allow, else as a string."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    if "boolean" in types and not types & {"integer", "number", ANY_TYPE}:
        bare = _BOOLEANS.get(bare.lower(), bare)
    if "null" in types and bare.lower() == "null":
        bare = "null"
    if bare[:1] == '"' and "string" in types:
        return quoted(text)
    value = value_of(bare)
    if value is None or ("string" in types and not _fits(value, types)):
        return quoted(text)
    return value


def _fits(value: str, types: frozenset[str]) -> bool:
    """Whether a JSON value has one of `types` other than string."""
    if ANY_TYPE in types:
        return True
    first = value[0]
    if first == "{":
        return "object" in types
    if first == "[":
        return "array" in types
    if first in "tf":
        return "boolean" in types
    if first == "n":
        return "null" in types
    is_whole = value.lstrip("-").isdecimal()
    return "number" in types or ("integer" in types and is_whole)

"""JSON types that the schema of a function allows for an argument, and text cast to them."""

from collections.abc import Iterator, Mapping
from typing import Any

from server.parsers.stream.json_stream import quoted, value_of

MAX_SCHEMA_NODES = 1000
"""Subschemas that are read for the types of an argument; beyond, all types are allowed."""
MAX_REQUEST_NODES = 100_000
"""The same for all arguments of the strict tools of a request: some tenths of a second."""
MAX_SCHEMA_DEPTH = 32
ANY_TYPE = "any"
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
"""Keywords that do not restrict values."""
_BRANCHES = ("anyOf", "oneOf")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBERS = frozenset(("integer", "number"))
_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that `schema`, of a function's parameters, allows for parameter `name`. Empty
    if the schema does not restrict them, ANY_TYPE if they cannot be told."""
    return _Search(schema).types_of(name)


def schema_of(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of parameter `name`, with the definitions that it may refer to."""
    found = next(_Search(schema).named(schema, name, 0), None)
    return _with_definitions(found, schema)


def schema_of_items(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of objects whose parameters all have the schema of the items of `schema`."""
    found = next(_Search(schema).items(schema, 0), None)
    items = _with_definitions(found, schema)
    return _with_definitions({"additionalProperties": items}, schema)


def _with_definitions(found: object, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**shared, **found} if isinstance(found, dict) else shared


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
    """The types of arguments of all functions of a request. Arguments whose schemas have the same
    values share the types."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, frozenset[str]]] = {}
        self._num_nodes = 0

    def types_of(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
        """The JSON types that `schema` allows, with what it refers to in `root`. ANY_TYPE once the
        searches of the request have read MAX_REQUEST_NODES."""
        restricting = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        values = (*restricting.items(), *root.items())
        key = tuple((name, id(value)) for name, value in values)
        if key not in self._known:
            search = _Search({**root, "properties": {"": schema}})
            exhausted = self._num_nodes > MAX_REQUEST_NODES
            types = frozenset((ANY_TYPE,)) if exhausted else search.types_of("")
            self._num_nodes += search.num_nodes
            # The values are kept, so that no other value takes their id.
            self._known[key] = (values, types)
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
        self.num_nodes = 0
        self._open: set[str] = set()
        """References that are being followed."""

    @property
    def is_exhausted(self) -> bool:
        return self.num_nodes > MAX_SCHEMA_NODES

    def types_of(self, name: str) -> frozenset[str]:
        """As the function `types_of`."""
        types = self.all_of(self.types(found, 0) for found in self.named(self._root, name, 0))
        if self.is_exhausted:
            return frozenset((ANY_TYPE,))
        return frozenset() if types is None else types

    def named(self, schema: Any, name: str, depth: int) -> Iterator[Any]:
        """The schemas of parameter `name`."""
        if not self._enter(schema, depth):
            return
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        elif isinstance(others, dict):
            yield others
        for part in self._parts(schema):
            yield from self.named(part, name, depth + 1)

    def items(self, schema: Any, depth: int) -> Iterator[Any]:
        """The schemas of the items of a list."""
        if not self._enter(schema, depth):
            return
        if isinstance(schema.get("items"), dict):
            yield schema["items"]
        for part in self._parts(schema):
            yield from self.items(part, depth + 1)

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """What `schema` refers to, and its branches."""
        if isinstance(schema.get("$ref"), str):
            yield _target(schema["$ref"], self._root)
        for key in (*_BRANCHES, "allOf"):
            branches = schema.get(key)
            yield from branches if isinstance(branches, list) else ()

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
        self.num_nodes += 1
        if depth > MAX_SCHEMA_DEPTH:
            self.num_nodes = MAX_SCHEMA_NODES + 1
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
    if value is None and types & _NUMBERS and "string" not in types:
        value = _without_leading_zeros(bare)
    if value is None or ("string" in types and not _fits(value, types)):
        return quoted(text)
    return value


def _without_leading_zeros(text: str) -> str | None:
    """The JSON number that a whole number such as 007 stands for; None for other texts."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    return text[: len(text) - len(digits)] + (digits.lstrip("0") or "0")


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

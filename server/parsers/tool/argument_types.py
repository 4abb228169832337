"""JSON types that a function's schema allows for an argument, and conversion of text to these
types."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from server.parsers.stream.json_stream import to_json, value_of
from server.parsers.stream.python_stream import literal_of

MAX_SCHEMA_NODES = 1000
"""Maximum number of subschemas searched for the types of an argument; beyond this, all types are
allowed."""
MAX_REQUEST_NODES = 100_000
"""Maximum number of subschemas searched for all arguments of a request's strict tools, which takes
tenths of a second."""
MAX_SCHEMA_DEPTH = 32
MAX_REFERENCE_CHARACTERS = 1_024
"""Maximum characters of a $ref; a longer $ref is not resolved."""
CHARACTERS_PER_NODE = 32
"""Number of $ref characters that count as a subschema."""
ENTRIES_PER_NODE = 16
"""Number of entries of an enum or of a list of types that count as a subschema."""
ANY_TYPE = "any"
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
"""Keywords that do not restrict values."""
_BRANCHES = ("anyOf", "oneOf")
_LISTS = ("enum", "type", *_BRANCHES, "allOf")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBERS = frozenset(("integer", "number"))
_CONTAINERS = frozenset(("array", "object"))
_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON types that `schema`, a function's parameters, allows for parameter `name`. Empty if the
    schema does not restrict them, ANY_TYPE if they cannot be determined."""
    return _Search(schema).types_of(name, schema)


class NestedSchema:
    """A schema nested in the parameters of a function. `root`: schema that references are resolved
    in."""

    def __init__(self, schema: Any, root: Mapping[str, Any]) -> None:
        self._schema = schema
        self._root = root
        self._types: dict[str, frozenset[str]] = {}

    def types_of(self, name: str) -> frozenset[str]:
        """The JSON types of property `name` (see the function `types_of`)."""
        if name not in self._types:
            self._types[name] = _Search(self._root).types_of(name, self._schema)
        return self._types[name]

    def inside(self, name: str) -> "NestedSchema":
        """The schema of property `name`."""
        found = _Search(self._root).composed(self._schema, partial(_property, name), 0)
        return NestedSchema(found, self._root)

    def of_items(self) -> "NestedSchema":
        """A schema of objects whose properties all have the schema of the items."""
        found = _Search(self._root).composed(self._schema, _items, 0)
        return NestedSchema({"additionalProperties": found}, self._root)


def _property(name: str, schema: Mapping[str, Any]) -> Any:
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return others if isinstance(others, dict) else None


def _items(schema: Mapping[str, Any]) -> Any:
    return schema["items"] if isinstance(schema.get("items"), dict) else None


def referenced(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` with references into `root`, and allOf with a single branch, replaced by their
    targets, unless keywords conflict."""
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
    """Cache of argument types for all functions of a request. Arguments with the same schema values
    share an entry."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, frozenset[str]]] = {}
        self._num_nodes = 0

    def types_of(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
        """JSON types that `schema` allows; references are resolved in `root`. ANY_TYPE after the
        request's searches have read MAX_REQUEST_NODES."""
        restricting = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        values = (*restricting.items(), *root.items())
        key = tuple((name, id(value)) for name, value in values)
        if key not in self._known:
            search = _Search({**root, "properties": {"": schema}})
            exhausted = self._num_nodes > MAX_REQUEST_NODES
            types = frozenset((ANY_TYPE,)) if exhausted else search.types_of("", search.root)
            self._num_nodes += search.num_nodes
            # Keep a reference to the values, so that their ids are not reused.
            self._known[key] = (values, types)
        return self._known[key][1]


def num_keywords(schema: Mapping[str, Any], root: Mapping[str, Any]) -> int:
    """Upper bound on the keywords that `referenced` copies for `schema`, plus the entries of lists.
    A long $ref counts as several keywords."""
    count = 0
    current: Any = schema
    for _ in range(MAX_SCHEMA_DEPTH):
        if not isinstance(current, dict):
            break
        count += len(current)
        lists = (current.get(key) for key in _LISTS)
        count += sum(len(entries) for entries in lists if isinstance(entries, list))
        if isinstance(current.get("$ref"), str):
            count += _reference_nodes(current["$ref"])
            current = _target(current["$ref"], root)
        else:
            current = current["allOf"][0] if _is_single(current.get("allOf")) else None
    return count


def _reference_nodes(reference: str) -> int:
    return min(len(reference), MAX_REFERENCE_CHARACTERS) // CHARACTERS_PER_NODE


def _is_single(branches: object) -> bool:
    return isinstance(branches, list) and len(branches) == 1


class _Search:
    """Search for the types that a schema allows. A set of types is None if the schema does not
    restrict them."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.num_nodes = 0
        self._open: set[str] = set()
        """References that are currently being resolved."""

    @property
    def is_exhausted(self) -> bool:
        return self.num_nodes > MAX_SCHEMA_NODES

    def types_of(self, name: str, schema: Any) -> frozenset[str]:
        types = self.types(self.composed(schema, partial(_property, name), 0), 0)
        if self.is_exhausted:
            return frozenset((ANY_TYPE,))
        return frozenset() if types is None else types

    def composed(self, schema: Any, pick: Callable[[Mapping[str, Any]], Any], depth: int) -> Any:
        """Results of `pick` for `schema`, for the target of its reference and for its branches,
        combined by anyOf and allOf like the branches; None if there are no results."""
        if not self._enter(schema, depth):
            return None
        found = [pick(schema)]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._open:
            self._open.add(reference)
            found.append(self.composed(_target(reference, self.root), pick, depth + 1))
            self._open.discard(reference)
        for key in (*_BRANCHES, "allOf"):
            branches = schema.get(key)
            inner = [
                self.composed(branch, pick, depth + 1)
                for branch in (branches if isinstance(branches, list) else ())
            ]
            present = [part for part in inner if part is not None]
            found += [{"anyOf": present}] if present and key != "allOf" else present
        present = [part for part in found if part is not None]
        return {"allOf": present} if len(present) > 1 else next(iter(present), None)

    def types(self, schema: Any, depth: int) -> frozenset[str] | None:
        """The types that `schema` allows; None: not limited, or not known."""
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
        """The intersection of the sets in `found`, in which integer is a kind of number; None if
        all entries are None. None, ANY_TYPE, and a set that contradicts the earlier sets do not
        restrict the result."""
        allowed: frozenset[str] | None = None
        for types in found:
            if types is None or (ANY_TYPE in types and allowed is not None):
                continue
            if allowed is None or ANY_TYPE in allowed:
                allowed = types
                continue
            both = allowed & types
            if any(
                "integer" in a and "number" in b for a, b in ((allowed, types), (types, allowed))
            ):
                both |= {"integer"}
            allowed = both or allowed
        return allowed

    def _types_of_reference(self, reference: str, depth: int) -> frozenset[str] | None:
        target = _target(reference, self.root)
        if target is None or reference in self._open:
            return frozenset((ANY_TYPE,))
        self._open.add(reference)
        types = self.types(target, depth + 1)
        self._open.discard(reference)
        return types

    def _enter(self, schema: object, depth: int) -> bool:
        self.num_nodes += _num_nodes(schema)
        if depth > MAX_SCHEMA_DEPTH:
            self.num_nodes = MAX_SCHEMA_NODES + 1
        return isinstance(schema, dict) and not self.is_exhausted


def _num_nodes(schema: object) -> int:
    """Cost of `schema` in subschemas: 1, or more for a long enum, list of types or $ref."""
    if not isinstance(schema, dict):
        return 1
    lists = (schema.get("enum"), schema.get("type"))
    num_entries = sum(len(entries) for entries in lists if isinstance(entries, list))
    reference = schema.get("$ref")
    num_nodes = _reference_nodes(reference) if isinstance(reference, str) else 0
    return 1 + num_entries // ENTRIES_PER_NODE + num_nodes


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """The object in `root` that the JSON pointer `reference` names; None if it does not exist, and
    for anchors."""
    if len(reference) > MAX_REFERENCE_CHARACTERS:
        return None
    if reference != "#" and not reference.startswith("#/"):
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
    """Convert `text` to a JSON value. It becomes a JSON string if it cannot be read as another
    value, or if `types` allow a string and not the type of the value."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    if "boolean" in types and not types & {"integer", "number", ANY_TYPE}:
        bare = _BOOLEANS.get(bare.lower(), bare)
    if "null" in types and bare.lower() == "null":
        bare = "null"
    if bare[:1] == '"' and "string" in types:
        return to_json(text)
    value = value_of(bare)
    if value is None and types & _NUMBERS and "string" not in types:
        value = _without_leading_zeros(bare)
    if value is None and types & _CONTAINERS and "string" not in types:
        value = literal_of(bare) if bare[:1] in ("[", "(", "{") else None
    if value is None or ("string" in types and not _fits(value, types)):
        return to_json(text)
    return value


def _without_leading_zeros(text: str) -> str | None:
    """The JSON number of an integer with leading zeros, such as 007; None for other texts."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    return text[: len(text) - len(digits)] + (digits.lstrip("0") or "0")


def _fits(value: str, types: frozenset[str]) -> bool:
    """Whether `value`, encoded JSON but not a string, has one of `types`."""
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

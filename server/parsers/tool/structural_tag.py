"""Structural tags that constrain tool calls to the functions of a request."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from config.errors import UserError
from config.json_text import Json
from server.parsers.tool.argument_types import (
    ANNOTATIONS,
    MAX_REFERENCE_CHARACTERS,
    num_keywords,
    referenced,
)

Part = Json
Functions = Mapping[str, Mapping[str, Any] | None]
"""Function name -> schema of its arguments; None: any object."""

IDENTIFIER = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
"""Names that can be written without quotes."""
MAX_ARGUMENT_PARTS = 16_384
"""Maximum number of grammar parts for arguments, which take 10 ms to build; a larger grammar
exceeds the character limit anyway."""
MAX_ARGUMENT_KEYWORDS = 65_536
"""Maximum number of keywords of all arguments, including entries of enums and branches."""
MAX_CALLS = 32
"""Maximum number of calls in a constrained JSON list; without a limit, a model may continue to the
end of the context."""
_VALUES = ("enum", "const", "default", "examples")
"""Keywords whose values are not schemas."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_KEYWORDS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
)


def literal(value: str) -> Part:
    """Exactly the text `value`."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Part:
    return {"type": "regex", "pattern": pattern}


def json_value(schema: Mapping[str, Any]) -> Part:
    return {"type": "json_schema", "json_schema": dict(schema)}


def text_until(mark: str) -> Part:
    """Any text up to and including the first `mark`."""
    return {"type": "text_until", "mark": mark}


def sequence(*parts: Part) -> Part:
    """`parts` in order."""
    return {"type": "sequence", "elements": list(parts)}


def any_of(*parts: Part) -> Part:
    return {"type": "or", "elements": list(parts)}


def optional(part: Part) -> Part:
    return {"type": "optional", "element": part}


def repeat(part: Part) -> Part:
    """`part`, zero or more times."""
    return {"type": "repeat", "element": part}


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a function."""

    name: str
    schema: Mapping[str, Any]
    definitions: Mapping[str, Any]
    """Definitions that the schema may refer to."""
    is_required: bool

    @property
    def as_json(self) -> Part:
        """Grammar for the value as JSON."""
        return json_value({**self.definitions, **self.schema})


def arguments_of(function: str, schema: Mapping[str, Any]) -> list[Argument]:
    """Arguments in `schema`, required arguments first. Raises UserError, for example if the schema
    cannot be enforced (see `unenforceable`)."""
    unknown = schema.keys() - _KEYWORDS - ANNOTATIONS
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if unknown or not isinstance(properties, dict) or not isinstance(required, list):
        raise unenforceable(function, min(unknown, default="properties"))
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise unenforceable(function, f"required {name!r:.40}")
    required_names = frozenset(required)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    _check_references(function, shared)
    result = []
    for name, subschema in properties.items():
        if subschema is False or not isinstance(subschema, (dict, bool)):
            raise unenforceable(function, f"properties.{name}")
        inner: Mapping[str, Any] = subschema if isinstance(subschema, dict) else {}
        _check_references(function, inner)
        is_required = name in required_names
        result.append(Argument(name, referenced(inner, shared), shared, is_required))
    return sorted(result, key=lambda argument: not argument.is_required)


def check_keywords(functions: Functions) -> None:
    """Raise UserError if all arguments together have more than MAX_ARGUMENT_KEYWORDS keywords. A
    definition counts for each argument that refers to it."""
    total = 0
    for schema in functions.values():
        properties = (schema or {}).get("properties")
        for inner in properties.values() if isinstance(properties, dict) else ():
            total += num_keywords(inner, schema or {})
            if total > MAX_ARGUMENT_KEYWORDS:
                raise UserError(
                    f"the arguments of the strict tools have at least {total} keywords and "
                    f"entries of lists, at most {MAX_ARGUMENT_KEYWORDS} are allowed: set strict "
                    "to false, or refer to smaller definitions",
                    param="tools",
                )


def check_optional_arguments(functions: Functions) -> None:
    """Raise UserError for more keywords or arguments than `named_arguments` supports: if all
    arguments are optional, the grammar has a part for each pair of arguments."""
    check_keywords(functions)
    total = 0
    for schema in functions.values():
        properties = (schema or {}).get("properties")
        count = len(properties) if isinstance(properties, dict) else 0
        total += count if (schema or {}).get("required") else count * (count + 1) // 2
    if total > MAX_ARGUMENT_PARTS:
        raise UserError(
            f"the arguments of the strict tools make {total} parts of a grammar, at most "
            f"{MAX_ARGUMENT_PARTS} are allowed: set strict to false, or name required arguments",
            param="tools",
        )


def named_arguments(
    function: str,
    schema: Mapping[str, Any] | None,
    comma: Part,
    free: Part,
    write: Callable[[Argument], Part],
) -> list[Part]:
    """Grammar for the arguments that match `schema`, each produced by `write`, separated by
    `comma`; without a schema, any number of `free`. Raises UserError."""
    if not IDENTIFIER.fullmatch(function):
        raise unenforceable(function, "the name")
    if schema is None:
        return [optional(sequence(free, repeat(sequence(comma, free))))]
    arguments = arguments_of(function, schema)
    for argument in arguments:
        if not IDENTIFIER.fullmatch(argument.name):
            raise unenforceable(function, f"properties.{argument.name:.60}")
    parts = [write(argument) for argument in arguments]
    num_required = sum(argument.is_required for argument in arguments)

    def after(first: int) -> list[Part]:
        return [
            sequence(comma, part)
            if first + place < num_required
            else optional(sequence(comma, part))
            for place, part in enumerate(parts[first:])
        ]

    # The first optional part that is present determines the positions of commas.
    firsts = range(1 if num_required else len(parts))
    options = [sequence(parts[place], *after(place + 1)) for place in firsts]
    if num_required:
        return options
    return [optional(any_of(*options))] if options else []


def is_plain_text(schema: Mapping[str, Any]) -> bool:
    """Whether any text is valid for `schema`, even text that reads as null or a boolean."""
    rest = {k: v for k, v in schema.items() if k not in ANNOTATIONS}
    branches = rest.pop("anyOf", None)
    if branches is not None:
        if not isinstance(branches, list):
            return False
        dicts = [branch for branch in branches if isinstance(branch, dict)]
        plain = len(dicts) == len(branches) and all(
            not branch.keys() - ANNOTATIONS - {"type"} for branch in dicts
        )
        kinds: list[Any] = [branch.get("type") for branch in dicts]
        return not rest and plain and _allow_text(kinds)
    kind = rest.pop("type", "string")
    return not rest and _allow_text(kind if isinstance(kind, list) else [kind])


def _allow_text(kinds: list[Any]) -> bool:
    return "string" in kinds and all(kind in ("string", "null", "boolean") for kind in kinds)


def unenforceable(function: str, what: str) -> UserError:
    """The error for a schema that cannot be enforced in formats that write each argument
    separately."""
    return UserError(
        f"{what} of the parameters of {function!r:.60} cannot be enforced in the way this model "
        "writes calls; set strict to false, or tool_choice to required",
        param="tools",
    )


def _check_references(function: str, value: Any) -> None:
    for reference in _references(value):
        if len(reference) > MAX_REFERENCE_CHARACTERS:
            raise UserError(
                f"the parameters of {function!r:.60} have a $ref of {len(reference)} characters, "
                f"at most {MAX_REFERENCE_CHARACTERS} are allowed",
                param="tools",
            )
        if not reference.startswith(("#/$defs/", "#/definitions/")):
            raise unenforceable(function, f"$ref {reference!r:.40}")


def _references(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        schema = left.pop()
        if isinstance(schema, (list, tuple)):
            left += schema
        elif isinstance(schema, dict):
            left += schema.values()
            if isinstance(schema.get("$ref"), str):
                yield schema["$ref"]


GAP = regex("[ \\n]?")
"""Optional whitespace between the tags around a call."""


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """Grammar for the text that may follow each marker of a format, including the end of the
    call."""

    by_marker: Mapping[str, Part]
    ignored_markers: tuple[str, ...] = ()
    bare: Part | None = None
    """Grammar for an answer that starts with a character in `bare_starts`; None: all calls have
    markers."""
    bare_starts: str = ""
    whole: Part | None = None
    """Grammar for the whole answer, including reasoning, if calls are not embedded in text."""

    def part(self) -> Part:
        """Grammar for text with calls."""
        if self.whole is not None:
            return self.whole
        result: Part = {
            "type": "calls",
            "tags": [
                {"begin": marker, "content": grammar} for marker, grammar in self.by_marker.items()
            ],
            "silent": list(self.ignored_markers),
        }
        if self.bare is not None:
            result.update(bare=self.bare, bare_starts=self.bare_starts)
        return result

    def part_beside(self, form: Part, *, is_parallel: bool) -> Part | None:
        """Grammar for either `form` or only calls; None if calls may start without a marker or are
        not embedded in text."""
        if self.bare is not None or not self.by_marker:
            return None
        calls = any_of(
            *(sequence(literal(marker), grammar) for marker, grammar in self.by_marker.items())
        )
        around = (
            [repeat(any_of(*map(literal, self.ignored_markers)))] if self.ignored_markers else []
        )
        part = sequence(*around, calls, *around)
        return any_of(form, sequence(part, repeat(sequence(GAP, part))) if is_parallel else part)


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Keys of a call as a JSON object."""

    arguments: str = "arguments"
    name: str = "name"
    """Key of the function name. Empty: the function name is the key of the arguments."""
    number: str = ""
    """Key of the call number. Empty: calls have no number."""

    def schema(self, name: str, arguments: Part) -> Part:
        """The JSON schema of a call to `name`."""
        number = {"type": "string", "pattern": "^[0-9]{1,3}$"}
        properties: Json = {self.number: number} if self.number else {}
        if self.name:
            properties |= {self.name: {"const": name}, self.arguments: arguments}
        else:
            properties[name] = arguments
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }


NAME_AND_ARGUMENTS = CallKeys()


def calls_schema(
    functions: Functions, keys: CallKeys = NAME_AND_ARGUMENTS, max_calls: int = MAX_CALLS
) -> Json:
    """JSON schema of a list of calls: objects with a name, and arguments that match the function's
    schema; any object if the function has no schema."""
    calls = [
        keys.schema(name, {"$ref": f"#/$defs/arguments{place}"})
        for place, name in enumerate(functions)
    ]
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": {"anyOf": calls},
        "$defs": {
            f"arguments{place}": _moved(object_schema(schema), f"#/$defs/arguments{place}")
            for place, schema in enumerate(functions.values())
        },
    }


def object_schema(schema: Any) -> Json:
    """Schema of a function's arguments, which are always an object."""
    return {"type": "object", **(schema or {})}


def _moved(value: object, root: str, *, has_names: bool = False) -> Any:
    """A copy of a schema that is moved to `root`, with adjusted references. `has_names`: whether
    the keys are names chosen by the author instead of keywords."""
    if isinstance(value, list):
        return [_moved(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, inner in value.items():
        if has_names:
            result[key] = _moved(inner, root)
        elif key == "$ref" and isinstance(inner, str) and inner.startswith("#"):
            result[key] = root + inner[1:]
        elif key in _VALUES:
            result[key] = inner
        else:
            result[key] = _moved(inner, root, has_names=key in _NAMED)
    return result

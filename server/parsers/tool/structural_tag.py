"""Structural tags of tool calls: the grammar that holds the calls that a model chooses to make to
the functions of the request."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config.errors import UserError

Part = dict[str, Any]
Functions = Mapping[str, Mapping[str, Any] | None]
"""Names of functions with the schemas that their arguments are held to; None: any object."""

IDENTIFIER = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
"""Names that can stand where a family writes them without quotes."""
MOST_CALLS = 32
"""Of one answer that must call; without a bound a model may go on to the end of the context."""
_VALUES = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_KEYWORDS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
)
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))


def text(value: str) -> Part:
    """Exactly this."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Part:
    return {"type": "regex", "pattern": pattern}


def json_of(schema: Mapping[str, Any]) -> Part:
    return {"type": "json_schema", "json_schema": dict(schema)}


def until(mark: str) -> Part:
    """Any text up to the first `mark`, with it."""
    return {"type": "text_until", "mark": mark}


def row(*parts: Part) -> Part:
    """One after the other."""
    return {"type": "sequence", "elements": list(parts)}


def any_of(*parts: Part) -> Part:
    return {"type": "or", "elements": list(parts)}


def optional(part: Part) -> Part:
    return {"type": "optional", "element": part}


def repeat(part: Part) -> Part:
    """As often as may be, or never."""
    return {"type": "repeat", "element": part}


def separated(parts: Sequence[Part], num_required: int, comma: Part) -> Part | None:
    """The first `num_required` of `parts` and any of the others, in order, with commas between
    them; None for no parts."""

    def after(first: int) -> list[Part]:
        return [
            row(comma, part) if first + place < num_required else optional(row(comma, part))
            for place, part in enumerate(parts[first:])
        ]

    # Which of the optional ones comes first decides where commas stand.
    firsts = range(1 if num_required else len(parts))
    options = [row(parts[place], *after(place + 1)) for place in firsts]
    if not options:
        return None
    return options[0] if num_required else optional(any_of(*options))


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a function."""

    name: str
    schema: Mapping[str, Any]
    definitions: Mapping[str, Any]
    """What the schema may refer to."""
    is_required: bool

    @property
    def as_json(self) -> Part:
        """Its value."""
        return json_of({**self.definitions, **self.schema})


def arguments_of(function: str, schema: Mapping[str, Any]) -> list[Argument]:
    """The arguments that `schema` allows by name, those that it requires first. Raises UserError
    for a schema that says more of the object than that."""
    strange = schema.keys() - _KEYWORDS - ANNOTATIONS
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if strange or not isinstance(properties, dict) or not isinstance(required, list):
        raise refused(function, min(strange, default="properties"))
    missing = [name for name in required if name not in properties]
    if missing:
        raise refused(function, f"required {missing[0]!r:.40}")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    made = []
    for name, one in properties.items():
        if one is False or not isinstance(one, (dict, bool)):
            raise refused(function, f"properties.{name}")
        inner: Mapping[str, Any] = one if isinstance(one, dict) else {}
        for reference in _references((inner, shared)):
            if not reference.startswith(("#/$defs/", "#/definitions/")):
                raise refused(function, f"$ref {reference!r:.40}")
        made.append(Argument(name, inner, shared, name in required))
    return sorted(made, key=lambda argument: not argument.is_required)


def is_plain_text(schema: Mapping[str, Any]) -> bool:
    """Whether any text is a value, whatever else it may be read as: null or a boolean."""
    rest = {k: v for k, v in schema.items() if k not in ANNOTATIONS}
    branches = rest.pop("anyOf", None)
    if branches is not None:
        dicts = [one for one in branches if isinstance(one, dict)]
        plain = len(dicts) == len(branches) and all(
            not one.keys() - ANNOTATIONS - {"type"} for one in dicts
        )
        kinds: list[Any] = [one.get("type") for one in dicts]
        return not rest and plain and _may_be_text(kinds)
    kind = rest.pop("type", "string")
    return not rest and _may_be_text(kind if isinstance(kind, list) else [kind])


def _may_be_text(kinds: list[Any]) -> bool:
    return "string" in kinds and all(one in ("string", "null", "boolean") for one in kinds)


def refused(function: str, what: str) -> UserError:
    """The error for what cannot be held where arguments are written one by one."""
    return UserError(
        f"{what} of the parameters of {function!r:.60} cannot be enforced in the way this model "
        "writes calls; set strict to false, or tool_choice to required",
        param="tools",
    )


def _references(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, (list, tuple)):
            left += one
        elif isinstance(one, dict):
            left += one.values()
            if isinstance(one.get("$ref"), str):
                yield one["$ref"]


GAP = regex("[ \\n]?")
"""Optional white space between the marks around a call."""


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """What may follow each marker of a family, its end included."""

    by_marker: Mapping[str, Part]
    ignored_markers: tuple[str, ...] = ()
    bare: Part | None = None
    """What an answer that begins with one of `bare_starts` must be."""
    bare_starts: str = ""
    whole: Part | None = None
    """All that an answer may be, its thinking too, where calls stand in no text."""

    def part(self) -> Part:
        """The part that is text and calls."""
        if self.whole is not None:
            return self.whole
        made: Part = {
            "type": "calls",
            "tags": [{"begin": marker, "content": one} for marker, one in self.by_marker.items()],
            "silent": list(self.ignored_markers),
        }
        if self.bare is not None:
            made.update(bare=self.bare, bare_starts=self.bare_starts)
        return made

    def part_beside(self, form: Part, *, is_parallel: bool) -> Part | None:
        """The part that is `form`, or calls alone; None where text and calls begin alike."""
        if self.bare is not None or not self.by_marker:
            return None
        calls = any_of(*(row(text(marker), one) for marker, one in self.by_marker.items()))
        around = [repeat(any_of(*map(text, self.ignored_markers)))] if self.ignored_markers else []
        one = row(*around, calls, *around)
        return any_of(form, row(one, repeat(row(GAP, one))) if is_parallel else one)


def calls_schema(
    functions: Functions, key: str = "arguments", max_calls: int = MOST_CALLS
) -> dict[str, Any]:
    """The JSON schema of an array of calls: objects with a name and, at `key`, arguments that fit
    the function's schema; any object without one."""
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
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
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

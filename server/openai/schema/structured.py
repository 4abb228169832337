"""Fields that constrain the output: response_format, structured_outputs, and the names used by
other servers. A request may set at most a single such field."""

import json
from collections.abc import Mapping
from typing import Any

from config.errors import UserError, wrong_field
from config.json_text import Json
from config.params.structured_output import KINDS, GrammarSpec, grammar_spec

MAX_SHOWN_CHARACTERS = 40
_HINTS = ("disable_any_whitespace", "disable_fallback")
"""Options of structured_outputs that are always in effect."""
FIELDS = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Field of other servers -> kind of grammar."""


def spec_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    others: Mapping[str, Any],
) -> tuple[str, GrammarSpec] | None:
    """(field, grammar) that constrain the output; None: no constraint. `others`: values of the
    FIELDS that are set. Raises UserError."""
    specs = {"response_format": _of_format(response_format)}
    if structured_outputs is not None:
        requested = {name: v for name, v in structured_outputs.items() if name not in _HINTS}
        spec = grammar_spec(requested)
        if spec is None:
            raise UserError(
                f"structured_outputs has no grammar, it must have one of {', '.join(KINDS)}",
                param="structured_outputs",
            )
        specs["structured_outputs"] = spec
    for name, value in others.items():
        specs[name] = _spec_for(name, {FIELDS[name]: value})
    fields = [(name, spec) for name, spec in specs.items() if spec is not None]
    if len(fields) > 1:
        names = " and ".join(name for name, _ in fields)
        raise UserError(f"{names} are set, only one of them may be set", param=fields[1][0])
    return fields[0] if fields else None


def place_of(field: str, response_format: Mapping[str, Any] | None) -> str:
    """Path of the grammar that `field` sets, for errors."""
    if field == "tools":
        return "the parameters of a tool"
    if field == "response_format" and response_format:
        path = {"json_schema": ".json_schema.schema", "json_object": ".schema"}
        return field + path.get(str(response_format.get("type")), "")
    return field


def spec_of_schema(field: str, schema: Mapping[str, Any]) -> GrammarSpec:
    """The grammar of a JSON schema from `field`. Raises UserError, which names `field`."""
    spec = _spec_for(field, {"json": dict(schema)})
    assert spec is not None
    return spec


def spec_of_tags(field: str, part: Mapping[str, Any]) -> GrammarSpec:
    """The grammar of a structural tag from `field`; it may use special tokens. Raises UserError,
    which names `field`."""
    requested = {"special_tokens": True, "format": dict(part)}
    spec = _spec_for(field, {"structural_tag": requested})
    assert spec is not None
    return spec


def part_of(field: str, spec: GrammarSpec) -> Json:
    """`spec` as a part of a structural tag. Raises UserError, which names `field`, if `spec` cannot
    be such a part."""
    if spec.kind in ("json", "json_object"):
        schema = json.loads(spec.text) if spec.kind == "json" else {"type": "object"}
        if isinstance(schema, dict):
            return {"type": "json_schema", "json_schema": schema}
    if spec.kind == "regex" and "\n" not in spec.text:
        return {"type": "regex", "pattern": spec.text}
    if spec.kind == "choice":
        words = [{"type": "const_string", "value": word} for word in json.loads(spec.text)]
        return {"type": "or", "elements": words}
    raise UserError(
        f"{field} sets a {spec.kind} that cannot be combined with tools; set tool_choice to none, "
        "or leave out one of the two",
        param=field,
    )


def _of_format(given: Mapping[str, Any] | None) -> GrammarSpec | None:
    if given is None:
        return None
    name = "response_format"
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if given.get("schema") is not None:
            return _spec_for(f"{name}.schema", {"json": given["schema"]})
        return _spec_for(name, {"json_object": True})
    if kind == "structural_tag":
        return _spec_for(name, {"structural_tag": {k: v for k, v in given.items() if k != "type"}})
    if kind != "json_schema":
        raise UserError(
            f"response_format has type {str(kind)[:MAX_SHOWN_CHARACTERS]!r}, it must be text, "
            "json_object, json_schema or structural_tag",
            param=f"{name}.type",
        )
    schema = given.get("json_schema")
    if not isinstance(schema, dict):
        raise _bad_field(given, "json_schema", name, "an object")
    path = f"{name}.json_schema"
    if not isinstance(schema.get("name"), str) or not schema["name"]:
        raise _bad_field(schema, "name", path, "a string")
    if not isinstance(schema.get("schema"), (dict, bool)):
        raise _bad_field(schema, "schema", path, "an object")
    return _spec_for(f"{path}.schema", {"json": schema["schema"]})


def _bad_field(parent: Mapping[str, object], field: str, where: str, wanted: str) -> UserError:
    return UserError(wrong_field(parent, field, where, wanted), param=f"{where}.{field}")


def _spec_for(field: str, requested: Mapping[str, Any]) -> GrammarSpec | None:
    try:
        return grammar_spec(requested, field)
    except UserError as error:
        raise UserError(error.message, param=field.partition(".")[0]) from None

"""Generates the lists of docs/api-fields.md from the schemas, the lists of docs/tools.md from the
parsers, and the lists of docs/selftest.md from the checks: `python -m server.app.reference`.

The text of the pages is written by hand. In api-fields.md, the lists of a body are between two
comments, and the first comment names the body. `beyond BODY`: fields that BODY has with the same
type and meaning are not described again.
"""

import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from config.json_text import Json
from config.loading.reference import DOCS, list_of, listed, with_text
from engine.selftest.fallbacks import checks_by_fallback
from server.app.field_docs import add_descriptions
from server.app.openapi import BODIES
from server.openai.schema.chat import ChatBody
from server.openai.schema.generation import Body
from server.parsers.kinds import ParserKind, distinct
from server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from server.pooling.schema import EmbeddingBody, ScoreBody

FIELDS, TOOLS, SELFTEST = DOCS / "api-fields.md", DOCS / "tools.md", DOCS / "selftest.md"
TABLES = re.compile(
    r"(<!-- fields of (\w+)(?: beyond (\w+))? -->\n).*?(<!-- end of fields -->\n)", re.DOTALL
)
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Prompt": (
        *("messages", "model", "documents", "chat_template", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("truncate_prompt_tokens", "truncation_side"),
    ),
    "Length and end": (
        *("max_completion_tokens", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("include_stop_str_in_output", "ignore_eos"),
    ),
    "Sampling": (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
        *("allowed_token_ids", "use_beam_search", "length_penalty"),
    ),
    "Structured output": (
        *("response_format", "structured_outputs", "guided_json", "json_schema"),
        *("guided_json_object", "guided_regex", "regex", "guided_choice", "guided_grammar"),
        *("ebnf", "grammar", "structural_tag"),
    ),
    "Tools and reasoning": (
        *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
        *("include_reasoning", "thinking_token_budget"),
    ),
    "Form of the answer": (
        *("stream", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "echo"),
        *("return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens"),
        *("spaces_between_special_tokens", "modalities"),
    ),
    "Order, time and cache": ("priority", "timeout", "request_id", "cache_salt"),
    "Without effect": (
        *("user", "service_tier", "prompt_cache_key", "verbosity", "store", "metadata"),
        "safety_identifier",
    ),
}
"""Fields of ChatBody by the heading of their list."""
Rows = dict[str, str]
"""Field name -> the remainder of its list item, `(type): meaning`."""
LINKS: Mapping[type[Body], str] = {
    ChatBody: "[a chat](#chat)",
    EmbeddingBody: "[embeddings](#embeddings)",
    ScoreBody: "[scores](#scores)",
}
"""Link to the section of each body that other bodies go beyond."""


def with_tables(page: str) -> str:
    """Regenerate the lists of every body of the page. Raises KeyError for an unknown body."""
    bodies = {body.__name__: body for body in BODIES}

    def table(found: re.Match[str]) -> str:
        opening, name, base, end = found.groups()
        text = _fields(bodies[name], bodies[base] if base else None)
        return f"{opening}\n{text}\n{end}"

    return TABLES.sub(table, page)


def _fields(body: type[Body], base: type[Body] | None) -> str:
    """Lists of the body's own fields and of its nested objects, the fields that it shares with
    `base`, and the fields that it rejects."""
    own, objects = _rows_of(body)
    base_rows, base_objects = _rows_of(base) if base else ({}, {})
    shared = [name for name, row in own.items() if base_rows.get(name) == row]
    rest = {name: row for name, row in own.items() if name not in shared}
    parts = [_grouped(rest) if body is ChatBody else _items(rest)]
    parts += [
        f"`{name}`:\n\n{_items(rows)}"
        for name, rows in objects.items()
        if base_objects.get(name) != rows
    ]
    rejected, link = set(body.unsupported), ""
    if base:
        link = LINKS[base]
        others = [name for name in base_rows if name not in own]
        if len(others) < len(shared):
            parts.append(f"All other fields of {link}, except {listed(others)}.\n")
        else:
            parts.append(f"As in {link}: {listed(shared)}.\n")
    if base and base.unsupported and rejected >= {*base.unsupported}:
        words = [f"as in {link}", *(f"`{name}`" for name in sorted(rejected - {*base.unsupported}))]
        parts.append(f"Refused: {', '.join(words)}.\n")
    elif rejected:
        parts.append(f"Refused: {listed(sorted(rejected))}.\n")
    return "\n".join(parts)


def _in(names: Collection[str]) -> list[tuple[str, list[str]]]:
    if missing := set(names).difference(*GROUPS.values()):
        raise ValueError(f"fields without a group in GROUPS: {sorted(missing)}")
    found = [(group, [name for name in of if name in names]) for group, of in GROUPS.items()]
    return [(group, of) for group, of in found if of]


def _grouped(rows: Rows) -> str:
    return "\n".join(
        f"### {group}\n\n{_items({name: rows[name] for name in names})}"
        for group, names in _in(rows)
    )


def _rows_of(body: type[Body]) -> tuple[Rows, dict[str, Rows]]:
    _, made = models_json_schema([(body, "validation")])
    definitions: Json = made["$defs"]
    add_descriptions(definitions)
    tables = {
        name: _rows(definition)
        for name, definition in definitions.items()
        if definition.get("properties")
    }
    own = tables.pop(body.__name__)
    return {name: row for name, row in own.items() if name not in body.unsupported}, tables


def _rows(definition: Mapping[str, Any]) -> Rows:
    required = definition.get("required", ())
    # Required fields come first.
    names = sorted(definition["properties"], key=lambda name: name not in required)
    rows = {}
    for name in names:
        schema = definition["properties"][name]
        kind = f"{type_of(schema)}; required" if name in required else type_of(schema)
        rows[name] = f"({kind}): {schema['description']}"
    return rows


def _items(rows: Rows) -> str:
    """A list in which fields with the same type and meaning share an item."""
    names: dict[str, list[str]] = {}
    for name, text in rows.items():
        names.setdefault(text, []).append(name)
    return "".join(f"* {listed(fields)} {text}\n" for text, fields in names.items())


def type_of(schema: Mapping[str, Any]) -> str:
    """Short description of a JSON schema, as a type of TypeScript. null is omitted, since every
    optional field accepts it."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rsplit('/', 1)[1]}`"
    if "enum" in schema:
        return "|".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options:
        words = [type_of(option) for option in options if option.get("type") != "null"]
        return "|".join(dict.fromkeys(words))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return "|".join(name for name in kind if name != "null")
    if kind == "array":
        entries = type_of(schema.get("items") or {})
        return f"({entries})[]" if "|" in entries else f"{entries}[]"
    return str(kind)


def with_parsers(page: str) -> str:
    """tools.md with its lists regenerated."""
    calls = _parsers("tool-call-parser", "a call, as the model writes it", TOOL_PARSERS.all)
    thinking = _parsers("reasoning-parser", "the reasoning", REASONING_PARSERS.all)
    return with_text(page, f"{calls}\n{thinking}\n")


def _parsers(flag: str, head: str, parsers: Mapping[str, ParserKind[object]]) -> str:
    names: dict[str, list[str]] = {}
    for parser in sorted(distinct(parsers), key=lambda parser: parser.names):
        names.setdefault(parser.example, []).extend(parser.names)
    lines = [f"* {listed(found)}: {example}\n" for example, found in names.items()]
    return f"`--{flag}`: {head}:\n\n{''.join(lines)}"


def with_checks(page: str) -> str:
    """selftest.md with its lists of checks regenerated."""
    parts = []
    for fallbacks, checks in sorted(checks_by_fallback().items()):
        items = list_of(f"`{check.name}`: {check.assumption}" for check in checks)
        head = f"Fallback {fallbacks}" if fallbacks else "No fallback"
        parts.append(f"{head}:\n\n{items}\n")
    return with_text(page, "".join(parts))


def main() -> int:
    """Write the lists into the pages."""
    for path, tables in ((FIELDS, with_tables), (TOOLS, with_parsers), (SELFTEST, with_checks)):
        path.write_text(tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tables of docs/api.md, generated from the schemas: `python -m server.openai.schema.reference`.
`python -m server.openai.schema.reference`.

The page's text is written by hand; each table lies between two comments, the first of which names
the body.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from server.http.openapi import BODIES
from server.openai.schema.field_docs import add_descriptions
from server.openai.schema.generation import Body

PATH = Path(__file__).parents[3] / "docs" / "api.md"
TABLES = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end of fields -->\n)", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table as the code has it now. Raises KeyError for an unknown body."""
    bodies = {body.__name__: body for body in BODIES}
    return TABLES.sub(lambda found: f"{found[1]}\n{_fields(bodies[found[2]])}\n{found[3]}", page)


def _fields(body: type[Body]) -> str:
    """A table of the body, one of each object that it holds, and what it refuses."""
    _, made = models_json_schema([(body, "validation")])
    definitions: dict[str, Any] = made["$defs"]
    add_descriptions(definitions)
    own = definitions.pop(body.__name__)
    parts = [_table_of(own)]
    for name, definition in definitions.items():
        if definition.get("properties"):
            parts.append(f"`{name}`:\n\n{_table_of(definition)}")
    if body.unsupported:
        names = ", ".join(f"`{name}`" for name in sorted(body.unsupported))
        parts.append(
            f"Refused with a 400, unless the value is null or asks for nothing: {names}.\n"
        )
    return "\n".join(parts)


def _table_of(definition: Mapping[str, Any]) -> str:
    required = definition.get("required", ())
    # What must be there comes first.
    names = sorted(definition["properties"], key=lambda name: name not in required)
    rows = ["| field | type | meaning |\n| --- | --- | --- |\n"]
    for name in names:
        schema = definition["properties"][name]
        text = (
            f"**Required.** {schema['description']}" if name in required else schema["description"]
        )
        rows.append(f"| `{name}` | {type_of(schema)} | {text} |\n")
    return "".join(rows)


def type_of(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words; null, which every optional field takes, is not named."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rsplit('/', 1)[1]}`"
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options:
        words = [type_of(one) for one in options if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(one for one in kind if one != "null")
    if kind == "array":
        return f"list of {type_of(schema['items'])}" if schema.get("items") else "list"
    return str(kind)


def main() -> int:
    """Write the tables where they belong."""
    PATH.write_text(with_tables(PATH.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

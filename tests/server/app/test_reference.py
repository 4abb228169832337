"""docs/api.md, docs/api-fields.md and docs/tools.md agree with the code."""

import re
from typing import Any

import pytest
from http_rig import in_memory

from config.loading.reference import DOCS
from server.anthropic.schema import CountBody
from server.app.openapi import BODIES
from server.app.reference import FIELDS, TABLES, TOOLS, type_of, with_parsers, with_tables
from server.openai.schema.generation import Body
from server.pooling.schema import (
    ClassifyBody,
    ClassifyChatBody,
    EmbeddingChatBody,
    PoolBody,
    PoolChatBody,
)

PAGE = FIELDS.read_text(encoding="utf-8")
ROUTES = (DOCS / "api.md").read_text(encoding="utf-8")
HIDDEN = {"GET /docs", "GET /openapi.json"}
"""Routes that are only on the page: the OpenAPI schema does not list itself."""
LIKE_OTHERS = (CountBody, EmbeddingChatBody, PoolBody, PoolChatBody, ClassifyBody, ClassifyChatBody)
"""Bodies whose difference from a body with a table is described in words on the page."""


def test_the_tables_of_all_bodies_are_current() -> None:
    named = [name for _, name, *_ in TABLES.findall(PAGE)]

    assert set(named) == {body.__name__ for body in BODIES if body not in LIKE_OTHERS}
    assert with_tables(PAGE) == PAGE, "run `python -m server.app.reference`"


def test_the_tables_of_parsers_are_current() -> None:
    page = TOOLS.read_text(encoding="utf-8")

    assert "`xlam`" in page
    assert with_parsers(page) == page, "run `make reference`"


@pytest.mark.parametrize("body", [body for body in BODIES if body not in LIKE_OTHERS])
def test_each_section_documents_every_field_of_its_body(body: type[Body]) -> None:
    (section,) = (found[0] for found in TABLES.finditer(PAGE) if found[2] == body.__name__)

    first_tables = re.split(r"\n(?:`|As in a chat)", section)[0]
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", first_tables, re.MULTILINE)
    own = re.findall(r"`(\w+)`", "\n".join(cells))
    lines = re.findall(r"^(?:As described above|Refused|\| \[).*$", section, re.MULTILINE)
    listed = re.findall(r"`(\w+)`", "\n".join(lines))

    assert set(body.model_fields) <= {*own, *listed}
    assert set(own).isdisjoint(listed)


async def test_every_route_is_documented() -> None:
    flags = {"enable_dev_endpoints": True, "allow_runtime_lora_updating": True, "lora_dir": "/"}
    async with in_memory(**flags, api_keys=("key",)) as rig:
        answer = await rig.http.get("/openapi.json", headers={"x-api-key": "key"})
        paths = answer.json()["paths"]

        served = {f"{method.upper()} {path}" for path, of in paths.items() for method in of}
        rows = re.findall(r"^\| `((?:GET|POST|DELETE) [^`]+)` \| (.*) \|$", ROUTES, re.MULTILINE)
        told = dict(rows)
        assert {*told} == served | HIDDEN
        # The page at /docs and the table agree.
        for path, of in paths.items():
            for method, operation in of.items():
                row = told[f"{method.upper()} {path}"].lower()
                words = re.split("[,;]", operation["summary"])[0].lower()
                assert row.startswith("as /") or words in row


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"type": ["integer", "null"]}, "integer"),
        ({"type": "array", "items": {"type": "array", "items": {}}}, "list of list"),
        ({"anyOf": [{"$ref": "#/components/schemas/A"}, {"const": "b"}]}, "`A` or `b`"),
        ({}, "any"),
    ],
)
def test_types_are_described_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words

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
SECTIONS = {found[2]: found for found in TABLES.finditer(PAGE)}
"""Body -> the match of its section in api-fields.md; the third group is the body that it goes
beyond."""
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


def own_fields(name: str) -> set[str]:
    """Fields with a list item of their own in the section of a body."""
    before_objects = re.split(r"\n(?:`|As in|All other)", SECTIONS[name][0])[0]
    items = re.findall(r"^\* ((?:`\w+`(?:, )?)+) \(", before_objects, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", "\n".join(items)))


def names_after(words: str, name: str) -> set[str]:
    """Names in the line of a section that begins with these words."""
    lines = re.findall(rf"^{words}.*$", SECTIONS[name][0], re.MULTILINE)
    return set(re.findall(r"`(\w+)`", "\n".join(lines)))


def documented_fields(name: str) -> set[str]:
    own, base = own_fields(name), SECTIONS[name][3]
    if "\nAll other fields of " in SECTIONS[name][0]:
        return own | documented_fields(base) - names_after("All other fields", name)
    return own | names_after("As in", name)


def documented_as_refused(name: str) -> set[str]:
    refused, base = names_after("Refused", name), SECTIONS[name][3]
    return refused | (
        documented_as_refused(base) if "\nRefused: as in" in SECTIONS[name][0] else set()
    )


@pytest.mark.parametrize("body", [body for body in BODIES if body not in LIKE_OTHERS])
def test_each_section_documents_every_field_of_its_body(body: type[Body]) -> None:
    name = body.__name__

    assert documented_fields(name) == set(body.model_fields) - set(body.unsupported)
    assert documented_as_refused(name) == set(body.unsupported)
    assert own_fields(name).isdisjoint(names_after("As in", name))


async def test_every_route_is_documented() -> None:
    flags = {"enable_dev_endpoints": True, "allow_runtime_lora_updating": True, "lora_dir": "/"}
    async with in_memory(**flags, api_keys=("key",)) as rig:
        answer = await rig.http.get("/openapi.json", headers={"x-api-key": "key"})
        paths = answer.json()["paths"]

        served = {f"{method.upper()} {path}" for path, of in paths.items() for method in of}
        items = re.findall(r"^\* (`[A-Z]+ /.*?`): (.*)$", ROUTES, re.MULTILINE)
        told = {route: text for routes, text in items for route in re.findall("`(.+?)`", routes)}
        assert {*told} == served | HIDDEN
        # The page at /docs and the list agree.
        for path, of in paths.items():
            for method, operation in of.items():
                row = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", told[f"{method.upper()} {path}"]).lower()
                words = re.split("[,;]", operation["summary"])[0].lower()
                assert words in row
                # Swagger UI shows a summary as plain text.
                assert "`" not in operation["summary"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"type": ["integer", "null"]}, "integer"),
        ({"type": "array", "items": {"type": "array"}}, "any[][]"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, "(`a`|`b`)[]"),
        ({"anyOf": [{"$ref": "#/components/schemas/A"}, {"const": "b"}]}, "`A`|`b`"),
        ({}, "any"),
    ],
)
def test_types_are_described_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words

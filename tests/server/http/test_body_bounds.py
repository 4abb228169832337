"""Limits of maps and short texts in a body: the error has both numbers."""

from collections.abc import Callable
from typing import Any

import pytest
from http_rig import in_memory

from config.errors import UserError
from server.anthropic.schema import MessagesBody
from server.http.body import validate_fields
from server.http.body_bounds import MAX_FIELD_VALUES, MAX_RENDERED_CHARACTERS
from server.openai.responses.schema import ResponseBody
from server.openai.schema.chat import ChatBody
from server.openai.schema.completions import CompletionBody
from server.openai.schema.tokenize import TokenizeChatBody
from server.pooling.schema import EmbeddingBody, RerankBody

USER = {"messages": [{"role": "user", "content": "hi"}]}
MINIMAL: dict[Any, dict[str, Any]] = {
    ChatBody: {"messages": []},
    TokenizeChatBody: {"messages": []},
    CompletionBody: {"prompt": "a"},
    ResponseBody: {"input": "a"},
    EmbeddingBody: {"input": "a"},
    RerankBody: {"query": "a", "documents": "b"},
    MessagesBody: {"messages": [], "max_tokens": 1},
}
PAIRS = {f"k{n}": "v" for n in range(17)}
NUMBERED: list[tuple[str, Any, Any, str]] = [
    ("metadata", dict(list(PAIRS.items())[:16]), PAIRS, "has 17 entries, at most 16 are allowed"),
    ("metadata", {"k" * 64: "v"}, {"k" * 65: "v"}, "65 characters, at most 64 are allowed"),
    ("metadata", {"k": "v" * 512}, {"k": "v" * 513}, "513 characters, at most 512 are allowed"),
    ("metadata", {"k": ""}, {"k": 5}, r"metadata\['k'\] is 5, it must be a string"),
    ("safety_identifier", "x" * 64, "x" * 65, "65 characters, at most 64 are allowed"),
    *(
        (name, "x" * 512, "x" * 10**6, "1000000 characters, at most 512 are allowed")
        for name in ("user", "prompt_cache_key", "service_tier", "verbosity", "prompt_name")
    ),
]
"""(field, largest accepted value, rejected value, error)"""
CASES = [
    (body, *case)
    for case in NUMBERED
    for body in MINIMAL
    if case[0] in body.model_fields and (body, case[0]) != (MessagesBody, "metadata")
]


@pytest.mark.parametrize(
    ("body", "name", "most", "more", "error"),
    CASES,
    ids=[f"{case[0].__name__}-{case[1]}-{index}" for index, case in enumerate(CASES)],
)
def test_a_map_or_short_text_over_its_limit_is_refused(
    body: Any, name: str, most: Any, more: Any, error: str
) -> None:
    fields = MINIMAL[body]

    taken = validate_fields(body, {**fields, name: most})
    with pytest.raises(UserError, match=error) as caught:
        validate_fields(body, {**fields, name: more})

    assert getattr(taken, name) == most
    assert caught.value.param == name


def test_the_end_user_of_a_message_has_the_limit_of_the_messages_api() -> None:
    fields = MINIMAL[MessagesBody]

    taken = validate_fields(MessagesBody, {**fields, "metadata": {"user_id": "u" * 256}})
    with pytest.raises(UserError, match=r"metadata.user_id has 257 characters, at most 256"):
        validate_fields(MessagesBody, {**fields, "metadata": {"user_id": "u" * 257}})

    assert taken.metadata is not None


async def test_metadata_or_a_user_over_its_limit_is_a_400_of_four_routes() -> None:
    async with in_memory() as rig:
        answers = [
            await rig.post("/v1/chat/completions", {**USER, "metadata": PAIRS}),
            await rig.post("/v1/responses", {"input": "a", "metadata": PAIRS}),
            await rig.post("/v1/completions", {"prompt": "a", "user": "u" * 513}),
            await rig.post(
                "/v1/messages", {**USER, "max_tokens": 1, "metadata": {"user_id": "u" * 257}}
            ),
        ]

    assert [answer.status_code for answer in answers] == [400] * 4


MANY = [1] * MAX_FIELD_VALUES
LONG = "x" * (MAX_RENDERED_CHARACTERS + 1)
STRUCTURED: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (body, name, wrap)
    for name, wrap in (
        ("tools", lambda value: [{"x": value}]),
        ("tool_choice", lambda value: {"x": value}),
        ("documents", lambda value: [{"x": value}]),
        ("chat_template_kwargs", lambda value: {"x": value}),
        ("response_format", lambda value: {"type": "text", "x": value}),
        ("structured_outputs", lambda value: {"x": value}),
        ("guided_json", lambda value: {"x": value}),
        ("json_schema", lambda value: {"x": value}),
        ("structural_tag", lambda value: {"x": value}),
        ("text", lambda value: {"format": {"type": "text", "x": value}}),
        ("output_format", lambda value: {"type": "json_schema", "schema": {"x": value}}),
    )
    for body in (ChatBody, TokenizeChatBody, CompletionBody, ResponseBody, MessagesBody)
    if name in body.model_fields
    and (body, name) not in ((MessagesBody, "tool_choice"), (ResponseBody, "response_format"))
]
"""(body, field of any structure, function that makes a value of the field around a given value)"""


@pytest.mark.parametrize(
    ("body", "name", "wrap"),
    STRUCTURED,
    ids=[f"{body.__name__}-{name}" for body, name, _ in STRUCTURED],
)
def test_a_field_of_any_structure_is_bounded_before_it_is_read(
    body: Any, name: str, wrap: Callable[[Any], Any]
) -> None:
    fields = MINIMAL[body]
    digits = 10**4000

    for value, unit in ((MANY, "values"), (LONG, "characters"), ([digits] * 5_000, "characters")):
        with pytest.raises(UserError, match=rf"at least \d+ {unit}, at most \d+ are") as caught:
            validate_fields(body, {**fields, name: wrap(value)})
        assert caught.value.param == name


async def test_the_choice_of_a_response_with_other_keys_is_bounded() -> None:
    choice = {"type": "function", "name": "f", "x": MANY}
    tools = [{"type": "function", "name": "f"}]
    async with in_memory() as rig:
        answer = await rig.post(
            "/v1/responses", {"input": "a", "tools": tools, "tool_choice": choice}
        )

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"tool_choice has at least {MAX_FIELD_VALUES + 4} values, at most {MAX_FIELD_VALUES} are "
        "allowed"
    )

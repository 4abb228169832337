"""Limits of maps and short texts of a body: the error names both numbers."""

from typing import Any

import pytest
from http_rig import in_memory

from config.errors import UserError
from server.anthropic.schema import MessagesBody
from server.http.body import validate_fields
from server.openai.responses.schema import ResponseBody
from server.openai.schema.chat import ChatBody
from server.openai.schema.completions import CompletionBody
from server.pooling.schema import EmbeddingBody, RerankBody

USER = {"messages": [{"role": "user", "content": "hi"}]}
MINIMAL: dict[Any, dict[str, Any]] = {
    ChatBody: {"messages": []},
    CompletionBody: {"prompt": "a"},
    ResponseBody: {"input": "a"},
    EmbeddingBody: {"input": "a"},
    RerankBody: {"query": "a", "documents": "b"},
    MessagesBody: {"messages": [], "max_tokens": 1},
}
PAIRS = {f"k{n}": "v" for n in range(17)}
NUMBERED: list[tuple[str, Any, Any, str]] = [
    ("metadata", dict(list(PAIRS.items())[:16]), PAIRS, "it has 17 entries, at most 16 are taken"),
    ("metadata", {"k" * 64: "v"}, {"k" * 65: "v"}, "65 characters, at most 64 are taken"),
    ("metadata", {"k": "v" * 512}, {"k": "v" * 513}, "513 characters, at most 512 are taken"),
    ("metadata", {"k": ""}, {"k": 5}, "entry 'k' must be a string, it is 5"),
    ("safety_identifier", "x" * 64, "x" * 65, "65 characters, at most 64 are taken"),
    *(
        (name, "x" * 512, "x" * 10**6, "1000000 characters, at most 512 are taken")
        for name in ("user", "prompt_cache_key", "service_tier", "verbosity", "prompt_name")
    ),
]
"""Field, the most that is taken, too much, and the error."""
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
    with pytest.raises(UserError, match=r"metadata.user_id: it has 257 characters, at most 256"):
        validate_fields(MessagesBody, {**fields, "metadata": {"user_id": "u" * 257}})

    assert taken.metadata is not None


async def test_metadata_over_its_limit_is_a_400_of_every_generating_route() -> None:
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

"""Error messages of 400 responses: the sent value, the allowed values, and no words of the
libraries."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from http_rig import TOOLS_TEMPLATE, TalkingClient, in_memory
from pooling_client import PoolingClient

from config.errors import UserError
from server.anthropic.schema import MessagesBody
from server.http.body import validate_fields
from server.openai.responses.schema import ResponseBody
from server.openai.schema.chat import ChatBody
from server.openai.schema.completions import CompletionBody
from server.openai.schema.generation import Body
from server.pooling.schema import EmbeddingBody, RerankBody, ScoreBody

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EMBEDDINGS, SCORE, RERANK, POOL = "/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
USER = {"role": "user", "content": "hi"}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [USER], "max_tokens": 8},
    EMBEDDINGS: {"input": "hi"},
    SCORE: {"text_1": "a", "text_2": "b"},
    RERANK: {"query": "a", "documents": ["b"]},
    POOL: {"input": "hi"},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [1]},
}
WRONG = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "vectors" / "wrong_requests.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
"""Invalid fields of a route, and the complete message."""
BODIES: dict[type[Body], dict[str, Any]] = {
    ChatBody: VALID[CHAT],
    CompletionBody: VALID[TEXT],
    ResponseBody: VALID[RESPONSES],
    MessagesBody: VALID[MESSAGES],
    EmbeddingBody: VALID[EMBEDDINGS],
    ScoreBody: VALID[SCORE],
    RerankBody: VALID[RERANK],
}
MAX_CHARACTERS = 400
POOLING = {EMBEDDINGS, SCORE, RERANK, POOL}

ALLOWED = re.compile(
    r"\bmust\b|\bat most\b|\bmay have\b|\bmay be\b|; leave it out|; use |; send |; start |"
    r"this model (accepts|supports)"
)
"""Texts that name allowed values or a remedy; each message has at least one text."""
LIBRARY_WORDS = re.compile(
    r"Input should|Value error|valid (dictionary|list|string|number)|pydantic|Unimplemented|"
    r"NoneType|Traceback|\b(dict|str|int|bool|None|True|False)\b"
)
WRONG_PLURAL = re.compile(r"(?<![\d.])1 (?!(is|has|was)\b)[a-z]+s\b")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong["message"])[:60])
async def test_a_refusal_has_the_sent_and_the_allowed_values(wrong: dict[str, Any]) -> None:
    path = wrong["path"]
    client = PoolingClient() if path in POOLING else TalkingClient()
    async with in_memory(client, chat_template=TOOLS_TEMPLATE) as rig:
        response = await rig.post(path, {**VALID[path], **wrong["fields"]})

    message = response.json()["error"]["message"]
    assert response.status_code == 400
    assert message == wrong["message"]
    check_style(message)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_refusals_of_wrong_values_have_the_message_style(
    kind: type[Body],
) -> None:
    messages = {
        refusal(kind, {**BODIES[kind], name: value})
        for name in kind.model_fields
        for value in ([[]], {"a": {}}, 5.5, True, "\0", 2**70)
    } - {""}

    assert len(messages) > 2 * len(kind.model_fields)
    for message in messages:
        check_style(message)


def refusal(kind: Any, fields: dict[str, Any]) -> str:
    try:
        validate_fields(kind, fields).check()
    except UserError as error:
        return error.message
    return ""


def check_style(message: str) -> None:
    assert ALLOWED.search(message), message
    assert not LIBRARY_WORDS.search(message), message
    assert not WRONG_PLURAL.search(message), message
    assert not re.search(r"(.)\1{60}", message), "a long value is not repeated"
    assert message == message.strip() and len(message) <= MAX_CHARACTERS


def test_the_table_of_refusals_has_at_least_80_rows() -> None:
    assert len(WRONG) >= 80

"""The OpenAPI schema. Handlers parse bodies themselves, so FastAPI does not know their models."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.anthropic.schema import CountBody, MessagesBody
from server.openai.responses.schema import ResponseBody
from server.openai.schema.chat import ChatBody
from server.openai.schema.completions import CompletionBody
from server.openai.schema.field_docs import add_descriptions
from server.openai.schema.tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.pooling.schema import (
    ClassifyBody,
    ClassifyChatBody,
    EmbeddingBody,
    EmbeddingChatBody,
    PoolBody,
    PoolChatBody,
    RerankBody,
    ScoreBody,
)

_REF = "#/components/schemas/{model}"
_POOLING = (
    *(EmbeddingBody, EmbeddingChatBody, PoolBody, PoolChatBody, ClassifyBody, ClassifyChatBody),
    *(ScoreBody, RerankBody),
)
_TOKENIZATION = (TokenizeTextBody, TokenizeChatBody, DetokenizeBody)
_GENERATION = (ChatBody, CompletionBody, ResponseBody, MessagesBody, CountBody)
BODIES = (*_GENERATION, *_TOKENIZATION, *_POOLING)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
}
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"type": "string", "const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_GENERATED = {
    "description": "The answer; with `stream`, server-sent events",
    "content": {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {},
    },
}
Answers = dict[int | str, dict[str, Any]]


def _fault(model: str) -> dict[str, Any]:
    return {
        "description": "An error",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model=model)}}},
    }


ANSWERS: Answers = {"default": _fault("Error")}
GENERATES: Answers = {200: _GENERATED, **ANSWERS}
PAGE_OF_METRICS: Answers = {
    200: {
        "description": "Every metric",
        "content": {"text/plain": {}, "application/openmetrics-text": {}},
    },
    **ANSWERS,
}
MESSAGES_ANSWERS: Answers = {"default": _fault("MessagesError")}
MESSAGES_GENERATES: Answers = {200: _GENERATED, **MESSAGES_ANSWERS}


def takes(*names: str) -> dict[str, Any]:
    """The `requestBody` of a route: one of the named schemas."""
    refs = [{"$ref": _REF.format(model=name)} for name in names]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class DescribedApi(FastAPI):
    """FastAPI with the schemas of our bodies."""

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            schema = get_openapi(
                title=self.title,
                version=self.version,
                openapi_version=self.openapi_version,
                description=self.description,
                routes=self.routes,
            )
            _, definitions = models_json_schema(
                [(body, "validation") for body in BODIES], ref_template=_REF
            )
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            add_descriptions(definitions["$defs"])
            schemas.update(definitions["$defs"])
            schemas["Error"] = _ERROR
            schemas["MessagesError"] = _MESSAGES_ERROR
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}, {}]
            self.openapi_schema = schema
        return self.openapi_schema

"""OpenAPI schema. Handlers parse bodies themselves, so the schemas of the bodies are added here."""

import asyncio

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from config.json_text import Json
from server.anthropic.schema import CountBody, MessagesBody
from server.app.field_docs import add_descriptions
from server.http.body import encoded_response
from server.http.openapi import REF
from server.openai.lora import LoadAdapterBody, UnloadAdapterBody
from server.openai.responses.schema import ResponseBody
from server.openai.schema.chat import ChatBody
from server.openai.schema.completions import CompletionBody
from server.openai.schema.generate import GenerateBody
from server.openai.schema.tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.pooling.schema import (
    ClassifyBody,
    ClassifyChatBody,
    CohereEmbedBody,
    EmbeddingBody,
    EmbeddingChatBody,
    PoolBody,
    PoolChatBody,
    RerankBody,
    ScoreBody,
)

_POOLING = (
    *(EmbeddingBody, EmbeddingChatBody, PoolBody, PoolChatBody, ClassifyBody, ClassifyChatBody),
    *(CohereEmbedBody, ScoreBody, RerankBody),
)
_TOKENIZATION = (TokenizeTextBody, TokenizeChatBody, DetokenizeBody, GenerateBody)
_ADAPTERS = (LoadAdapterBody, UnloadAdapterBody)
_GENERATION = (ChatBody, CompletionBody, ResponseBody, MessagesBody, CountBody)
BODIES = (*_GENERATION, *_TOKENIZATION, *_POOLING, *_ADAPTERS)
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


class DescribedApi(FastAPI):
    """FastAPI whose OpenAPI schema includes this server's request bodies and is cached as JSON."""

    _encoded = b""

    def setup(self) -> None:
        """Add the route of the schema. Replaces FastAPI's routes, which encode the schema for each
        request."""
        if self.openapi_url:
            self.add_route(self.openapi_url, self._answer_openapi, include_in_schema=False)

    async def _answer_openapi(self, request: Request) -> Response:
        if not self._encoded:
            self._encoded = await asyncio.to_thread(lambda: msgspec.json.encode(self.openapi()))
        return encoded_response(self._encoded)

    def openapi(self) -> Json:
        if not self.openapi_schema:
            schema = get_openapi(
                title=self.title,
                version=self.version,
                openapi_version=self.openapi_version,
                description=self.description,
                routes=self.routes,
                servers=self.servers,
            )
            _, definitions = models_json_schema(
                [(body, "validation") for body in BODIES], ref_template=REF
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

"""The OpenAPI description: bodies that handlers read themselves are described here by name."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.schema.admin import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody

_REF = "#/components/schemas/{model}"
_BODIES = (ChatBody, CompletionBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody)
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
_FAULT = {
    "description": "An error",
    "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
}

ANSWERS: dict[int | str, dict[str, Any]] = {"default": _FAULT}
GENERATES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    },
    "default": _FAULT,
}


def takes(*names: str) -> dict[str, Any]:
    """A route's request body: one of the named schemas."""
    refs = [{"$ref": _REF.format(model=name)} for name in names]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class DescribedApi(FastAPI):
    """FastAPI whose description has our bodies in it."""

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            made = get_openapi(
                title=self.title,
                version=self.version,
                openapi_version=self.openapi_version,
                description=self.description,
                routes=self.routes,
            )
            _, definitions = models_json_schema(
                [(body, "validation") for body in _BODIES], ref_template=_REF
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            schemas["Error"] = _ERROR
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{"key": []}, {}]
            self.openapi_schema = made
        return self.openapi_schema

"""Parts of the OpenAPI schema for routes: request bodies and responses."""

from typing import Any

REF = "#/components/schemas/{model}"
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
        "content": {"application/json": {"schema": {"$ref": REF.format(model=model)}}},
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
    """The `requestBody` of a route that accepts any of the named schemas."""
    refs = [{"$ref": REF.format(model=name)} for name in names]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

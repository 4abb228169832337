"""GET /v1/models and /v1/models/{id}. An id may hold slashes."""

from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from server.http.body import json_response
from server.http.openapi import ANSWERS
from server.serving.state import AppState


def model_routes(state: AppState) -> APIRouter:
    """The routes, over `state`."""
    router = APIRouter(tags=["OpenAI"], responses=ANSWERS)

    @router.get("/v1/models", summary="Models served here")
    async def list_models() -> Response:
        state.check_open()
        data = [_entry(state, name) for name in state.model_names]
        return json_response({"object": "list", "data": data})

    @router.get("/v1/models/{id:path}", summary="One model")
    async def retrieve_model(id: str) -> Response:
        if not id:
            raise HTTPException(404)
        state.check_open()
        return json_response(_entry(state, state.model(id)))

    return router


def _entry(state: AppState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "gaudiserve",
        "root": state.root,
        "parent": None,
        "max_model_len": state.max_model_len,
    }

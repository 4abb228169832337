"""GET /v1/models and /v1/models/{id}. An id may contain slashes."""

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from config.json_text import Json
from config.lora.info import LoRAInfo
from server.http.body import json_response, long_json_response
from server.http.openapi import ANSWERS
from server.serving.state import AppState


def model_routes(state: AppState) -> APIRouter:
    """Routes that list the served models."""
    router = APIRouter(tags=["OpenAI"], responses=ANSWERS)

    @router.get("/v1/models", summary="The models served here")
    async def list_models() -> Response:
        state.check_open()
        adapters = state.client.adapters
        data = [_entry(state, name, None) for name in state.model_names]
        data += [_entry(state, name, info) for name, info in adapters.items()]
        return await long_json_response({"object": "list", "data": data})

    @router.get("/v1/models/{id:path}", summary="One served model")
    async def retrieve_model(id: str) -> Response:
        if not id:
            raise HTTPException(404)
        state.check_open()
        name = state.model(id)
        adapter = None if name in state.model_names else state.client.adapters.get(name)
        return json_response(_entry(state, name, adapter))

    return router


def _entry(state: AppState, name: str, adapter: LoRAInfo | None) -> Json:
    """Entry of a served model; `adapter`: None for the base model."""
    parent = None if adapter is None else adapter.parent or state.model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "gaudiserve",
        "root": state.root if adapter is None else adapter.source,
        "parent": parent,
        "max_model_len": state.max_model_len,
    }

"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: loads and unloads adapters at run time,
from folders and GGUF files below --lora-dir. The routes are enabled by
--allow-runtime-lora-updating, and need API keys."""

import asyncio
from pathlib import Path

from fastapi import APIRouter
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from config.errors import NotFound, UserError
from config.params.lora import NamedAdapter
from config.server import ServerConfig
from engine.transport.messages import LOAD_ADAPTER, UNLOAD_ADAPTER
from server.http.access_log import record_of
from server.http.body import json_response, parse
from server.http.body_bounds import Label, PathText
from server.http.disconnect import CancelOnDisconnect
from server.http.openapi import ANSWERS, takes
from server.openai.schema.generation import Body
from server.serving.state import AppState

MAX_NAME_CHARACTERS = 256
MAX_NAMES_SHOWN = 10


class LoadAdapterBody(Body):
    """An adapter to load."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"lora_name": "sql", "lora_path": "sql-lora"}}
    )

    lora_name: str
    lora_path: PathText
    base_model_name: Label | None = None


class UnloadAdapterBody(Body):
    """An adapter to unload."""

    model_config = ConfigDict(json_schema_extra={"example": {"lora_name": "sql"}})

    lora_name: str
    lora_int_id: int | None = None


def lora_routes(state: AppState) -> APIRouter:
    """Routes that load and unload LoRA adapters."""
    router = APIRouter(tags=["LoRA"], responses=ANSWERS)

    @router.post(
        "/v1/load_lora_adapter",
        summary="Serve an adapter",
        openapi_extra=takes("LoadAdapterBody"),
    )
    async def load_lora_adapter(request: Request) -> Response:
        state.check_awake()
        folder = allowed_folder(state.config)
        body = await parse(LoadAdapterBody, await state.bodies.read_object(request))
        _check_name(state, body.lora_name)
        adapter = await asyncio.to_thread(_adapter, folder, body)
        record = record_of(request.scope)
        client = record.owner or record.client
        try:
            with CancelOnDisconnect(request.receive):
                await state.client.control(LOAD_ADAPTER, adapter=adapter, client=client)
        except UserError as error:
            raise UserError(error.message, param="lora_path", code=error.code) from None
        return json_response(
            {"message": f"Success: LoRA adapter '{body.lora_name}' added successfully."}
        )

    @router.post(
        "/v1/unload_lora_adapter",
        summary="Stop serving an adapter; requests that use it end as usual",
        openapi_extra=takes("UnloadAdapterBody"),
    )
    async def unload_lora_adapter(request: Request) -> Response:
        state.check_awake()
        allowed_folder(state.config)
        body = await parse(UnloadAdapterBody, await state.bodies.read_object(request))
        name = body.lora_name
        if len(name) > MAX_NAME_CHARACTERS:
            raise _no_such_adapter(state, name)
        try:
            # An adapter that only some engines serve is not in `adapters`, and is unloaded too.
            left = await state.client.control(UNLOAD_ADAPTER, lora_name=name)
        except UserError:
            raise _no_such_adapter(state, name) from None
        return json_response(
            {
                "message": f"Success: LoRA adapter '{name}' removed successfully.",
                "requests": sum(left) if isinstance(left, list) else left,
            }
        )

    return router


def _no_such_adapter(state: AppState, name: str) -> NotFound:
    served = list(state.client.adapters)
    shown = ", ".join(served[:MAX_NAMES_SHOWN])
    if len(served) > MAX_NAMES_SHOWN:
        shown += f" and {len(served) - MAX_NAMES_SHOWN} others"
    known = f"this server has {shown}" if served else "no adapter is loaded"
    return NotFound(
        f"The adapter '{name[:200]}' does not exist; {known} (GET /v1/models lists them). "
        "POST /v1/load_lora_adapter adds one.",
        param="lora_name",
    )


def allowed_folder(config: ServerConfig) -> str:
    """The folder that must contain the adapters that are loaded at run time. Raises UserError,
    which names the missing flags, if the server has no --lora-dir or no API keys: without keys,
    anybody could change the served models."""
    if config.lora_dir is not None and config.has_api_keys:
        return config.lora_dir
    missing = [] if config.lora_dir else ["--lora-dir FOLDER"]
    missing += [] if config.has_api_keys else ["--api-key KEY"]
    raise UserError(
        f"the server has no {' and no '.join(flag.split()[0] for flag in missing)}, so its "
        f"adapters cannot be changed: start it with --enable-lora {' '.join(missing)}, and load "
        "adapters from folders below FOLDER",
        param="lora_path",
    )


def _check_name(state: AppState, name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise UserError(
            f"lora_name has {len(name)} characters, it must have 1 to {MAX_NAME_CHARACTERS} that "
            "can be printed",
            param="lora_name",
        )
    if name in state.model_names or name in state.client.adapters:
        raise UserError(f"lora_name is {name!r}, which is already loaded", param="lora_name")


def _adapter(lora_dir: str, body: LoadAdapterBody) -> NamedAdapter:
    """Resolve `lora_path`, a folder or file, relative to `lora_dir` or absolute. Follows symlinks.
    Raises NotFound, with the same message if the path does not exist or is outside `lora_dir`."""
    try:
        root = Path(lora_dir).resolve(strict=True)
        folder = (root / body.lora_path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        folder = None
    is_below = folder is not None and folder.is_relative_to(root)
    # Later errors name the path as it was sent, so an empty path is rejected.
    if (
        not body.lora_path
        or folder is None
        or not is_below
        or not (folder.is_dir() or folder.is_file())
    ):
        raise NotFound(
            f"lora_path is {body.lora_path!r:.200}, it must name a folder or a GGUF file below the "
            "server's --lora-dir",
            param="lora_path",
        )
    return NamedAdapter(
        body.lora_name,
        str(folder),
        body.base_model_name,
        root=str(root),
        label=body.lora_path,
    )

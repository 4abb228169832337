"""Development routes: profiling, settings, prefix cache, sleep. They need --enable-dev-endpoints
and API keys, see ServerConfig."""

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import UserError
from engine.transport.messages import FALLING_ASLEEP, KV_CACHE, SLEEP, WAKE_UP, WEIGHTS
from server.admin.settings import as_text, shown_settings
from server.http.body import json_response
from server.http.openapi import ANSWERS
from server.serving.state import AppState

POLL_S = 0.05
FORMATS = ("text", "json")
LEVELS = ("1", "2")
MODES = ("abort", "wait")
TAGS = (WEIGHTS, KV_CACHE)


def development_routes(state: AppState) -> APIRouter:
    """Routes that --enable-dev-endpoints enables on a server with API keys."""
    router = APIRouter(tags=["Development"])
    _add_profile(router, state)
    _add_facts(router, state)
    _add_sleep(router, state)
    return router


def _add_profile(router: APIRouter, state: AppState) -> None:
    @router.post(
        "/start_profile",
        operation_id="start_profile",
        summary="Start a trace of all steps, in a file that the worker names",
        responses=ANSWERS,
    )
    async def start_profile() -> Response:
        return json_response({"file": await state.client.control("start_profile")})

    @router.post(
        "/stop_profile",
        operation_id="stop_profile",
        summary="End the trace; returns its file",
        responses=ANSWERS,
    )
    async def stop_profile() -> Response:
        return json_response({"file": await state.client.control("stop_profile")})


def _add_facts(router: APIRouter, state: AppState) -> None:
    @router.get(
        "/server_info",
        operation_id="server_info",
        summary="The settings in force, as text or as an object",
        openapi_extra=_query_parameters(config_format=FORMATS),
        responses=ANSWERS,
    )
    async def server_info(request: Request) -> Response:
        form = _choice(request, "config_format", FORMATS)
        shown = shown_settings(state)
        return json_response({"vllm_config": as_text(shown) if form == "text" else shown})

    @router.post(
        "/reset_prefix_cache",
        operation_id="reset_prefix_cache",
        summary="Clear the prefix cache; running requests keep their blocks",
        responses=ANSWERS,
    )
    async def reset_prefix_cache(request: Request) -> Response:
        for name in ("reset_running_requests", "reset_external"):
            if request.query_params.get(name, "false").lower() not in ("false", "0"):
                raise UserError(f"{name} is on, it must be off: it is not supported", param=name)
        await state.client.control("reset_prefix_cache")
        return json_response({})


def _add_sleep(router: APIRouter, state: AppState) -> None:
    post = partial(router.post, responses=ANSWERS)

    @post(
        "/sleep",
        operation_id="sleep",
        summary="Free the device's memory; returns when that is done",
        openapi_extra=_query_parameters(level=LEVELS, mode=MODES),
    )
    async def sleep(request: Request) -> Response:
        level, mode = _choice(request, "level", LEVELS), _choice(request, "mode", MODES)
        sleep_state = await state.client.control(SLEEP, level=int(level), mode=mode)
        while sleep_state == FALLING_ASLEEP and not await request.is_disconnected():
            await asyncio.sleep(POLL_S)
            sleep_state = await state.client.control("sleep_state")
        return json_response({})

    @post(
        "/wake_up",
        operation_id="wake_up",
        summary="Allocate memory and accept requests again; with tags, allocate only these",
        openapi_extra=_query_parameters(tags=TAGS),
    )
    async def wake_up(request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        for tag in tags:
            if tag not in TAGS:
                raise UserError(
                    f"tags has {tag[:40]!r}, it must be {' or '.join(TAGS)}", param="tags"
                )
        await state.client.control(WAKE_UP, tags=tags)
        return json_response({})


def _choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    value = request.query_params.get(name, choices[0])
    if value not in choices:
        raise UserError(f"{name} is {value[:40]!r}, it must be {' or '.join(choices)}", param=name)
    return value


def _query_parameters(**choices: tuple[str, ...]) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "string", "enum": list(values)}}
            for name, values in choices.items()
        ]
    }

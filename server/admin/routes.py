"""Probes, version, load and metrics, for operators, routers and Prometheus."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.transport.messages import ASLEEP, AWAKE, LATER
from server.generation.pipeline import asleep
from server.http.body import json_response
from server.http.errors import Fault, fault_of
from server.http.openapi import ANSWERS, PAGE_OF_METRICS
from server.serving.state import DRAINING_RETRY_S, STARTING_RETRY_S, AppState


def admin_routes(state: AppState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["Operations"])
    _add_probes(router, state)
    _add_facts(router, state)
    return router


def _add_probes(router: APIRouter, state: AppState) -> None:
    get = partial(router.get, responses=ANSWERS)

    @get(
        "/health",
        operation_id="health",
        summary="Liveness; fails when the engine has died",
    )
    async def get_health() -> Response:
        return _health(state)

    @get("/ping", operation_id="ping", summary="The same as /health")
    async def get_ping() -> Response:
        return _health(state)

    @router.post("/ping", operation_id="ping_by_post", summary="As GET", responses=ANSWERS)
    async def post_ping() -> Response:
        return _health(state)

    @get(
        "/ready",
        operation_id="ready",
        summary="Readiness: loaded, warmed up, not draining",
    )
    async def get_ready() -> Response:
        return _readiness(state)


def _add_facts(router: APIRouter, state: AppState) -> None:
    get = partial(router.get, responses=ANSWERS)

    @get("/version", operation_id="version", summary="The server's version")
    async def get_version() -> Response:
        return json_response({"version": state.version})

    @get("/is_sleeping", operation_id="is_sleeping", summary="Whether the model sleeps")
    async def get_is_sleeping() -> Response:
        return json_response({"is_sleeping": state.client.stats.sleep in ASLEEP})

    @get(
        "/load",
        operation_id="load",
        summary="Sequences that run or wait in the engine, of all API servers",
    )
    async def get_load() -> Response:
        stats = state.client.stats
        return json_response({"server_load": stats.running + stats.waiting})

    @router.get(
        "/metrics",
        operation_id="metrics",
        summary="Prometheus metrics, as OpenMetrics if requested",
        # Otherwise OpenAPI also lists application/json.
        response_class=PlainTextResponse,
        responses=PAGE_OF_METRICS,
    )
    async def get_metrics(request: Request) -> Response:
        page, content_type = state.metrics.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})


def _health(state: AppState) -> Response:
    if state.client.failure is not None:
        return _engine_gone(state.client.failure).response()
    return json_response({"status": "ok"})


def _readiness(state: AppState) -> Response:
    if not state.is_ready:
        return _not_ready(state).response()
    progress = state.client.progress
    if progress is None or progress.stage != LATER or progress.done >= progress.total:
        return json_response({"status": "ready"})
    warmup = {"done": progress.done, "total": progress.total}
    return json_response({"status": "ready", "warmup": warmup})


def _not_ready(state: AppState) -> Fault:
    if state.client.failure is not None:
        return _engine_gone(state.client.failure)
    if state.is_draining:
        message, retry_s = "The server is shutting down.", DRAINING_RETRY_S
    elif state.client.stats.sleep != AWAKE:
        return fault_of(asleep())
    else:
        message, retry_s = f"The server is starting: {state.progress}.", STARTING_RETRY_S
    return Fault(503, message, "server_error", headers={"Retry-After": str(retry_s)})


def _engine_gone(reason: str) -> Fault:
    return Fault(503, f"The engine is gone: {reason}.", "server_error")

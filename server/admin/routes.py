"""Probes, version, sleep state, load and metrics, for operators, routers and Prometheus."""

from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from config.errors import EngineDied, Overloaded
from config.json_text import Json
from engine.client.state import RETRY_AFTER_S
from engine.transport.messages import ASLEEP, BACKGROUND_WARMUP
from server.http.body import json_response
from server.http.errors import Fault, fault_of
from server.http.openapi import ANSWERS, PAGE_OF_METRICS
from server.metrics.pages import MetricsPages
from server.serving.state import STARTING_RETRY_S, AppState


def admin_routes(state: AppState) -> APIRouter:
    """Routes for operators: probes, metrics and server status."""
    router = APIRouter(tags=["Operations"])
    pages = MetricsPages(state.metrics.pieces)
    get = partial(router.get, responses=ANSWERS)

    @get(
        "/live",
        operation_id="live",
        summary="Liveness probe: 503 after the engines have failed for good, otherwise 200",
    )
    async def get_live() -> Response:
        return liveness(state)

    @get(
        "/health",
        operation_id="health",
        summary="503 until the server has started, then the same as /live",
    )
    async def get_health() -> Response:
        return _health(state)

    @get("/ping", operation_id="ping", summary="Same as /health")
    async def get_ping() -> Response:
        return _health(state)

    @router.post("/ping", operation_id="ping_by_post", summary="Same as /health", responses=ANSWERS)
    async def post_ping() -> Response:
        return _health(state)

    @get(
        "/ready",
        operation_id="ready",
        summary="200 while requests are served, otherwise 503",
    )
    async def get_ready() -> Response:
        return _readiness(state)

    @get("/version", operation_id="version", summary="The server's version")
    async def get_version() -> Response:
        return json_response({"version": state.version})

    @get("/is_sleeping", operation_id="is_sleeping", summary="Whether the model sleeps")
    async def get_is_sleeping() -> Response:
        return json_response({"is_sleeping": state.client.stats.sleep in ASLEEP})

    @get(
        "/load",
        operation_id="load",
        summary="How many sequences run or wait, over all API servers",
    )
    async def get_load() -> Response:
        stats = state.client.stats
        return json_response({"server_load": stats.running + stats.waiting})

    @router.get(
        "/metrics",
        operation_id="metrics",
        summary="Prometheus' metrics, as OpenMetrics if requested",
        # Without it, OpenAPI also lists application/json.
        response_class=PlainTextResponse,
        responses=PAGE_OF_METRICS,
    )
    async def get_metrics(request: Request) -> Response:
        page, content_type = await pages.get(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    return router


def liveness(state: AppState) -> Response:
    """Response of /live."""
    if state.client.has_failed:
        return fault_of(EngineDied(state.client.failure)).response()
    return json_response({"status": "ok"})


def _health(state: AppState) -> Response:
    # If the engine failed during start-up, report the failure instead of the progress.
    if state.status == "starting" and not state.client.has_failed:
        return starting(state)
    return liveness(state)


def starting(state: AppState) -> Response:
    """Response of the probes except /live while the server starts."""
    message = f"The server is starting: {state.progress}."
    headers = {"Retry-After": str(STARTING_RETRY_S)}
    return Fault(503, message, "server_error", headers=headers).response()


def _readiness(state: AppState) -> Response:
    if state.status == "starting":
        return starting(state)
    if state.client.lost is not None:
        message = f"The engine is being restarted: {state.client.lost.message}."
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return Fault(503, message, "server_error", headers=headers).response()
    try:
        state.check_awake()
    except (EngineDied, Overloaded) as error:
        return fault_of(error).response()
    answer: Json = {"status": "ready"}
    engines = state.client.engines
    if len(engines) > 1:
        num_alive = sum(engine.is_alive for engine in engines)
        answer["engines"] = f"{num_alive} of {len(engines)}"
    ranks = [
        {"engine": engine.engine, **msgspec.structs.asdict(rank)}
        for engine in engines
        if engine.ready is not None and not engine.has_failed
        for rank in engine.ready.ranks
    ]
    if ranks:
        answer["ranks"] = ranks
    progress = state.client.progress
    if (
        progress is not None
        and progress.stage == BACKGROUND_WARMUP
        and progress.done < progress.total
    ):
        answer["warmup"] = {"done": progress.done, "total": progress.total}
    return json_response(answer)

"""ASGI application for an AppState: FastAPI routes and error handlers behind this server's
middleware."""

import re
from difflib import get_close_matches

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.admin.development import development_routes
from server.admin.docs import docs_routes
from server.admin.page import page_routes
from server.admin.routes import admin_routes
from server.anthropic.errors import refusal
from server.anthropic.routes import messages_routes
from server.app.middleware import (
    IGNORED_FIELDS,
    REQUEST_ID,
    AuthMiddleware,
    CorsMiddleware,
    FastRouter,
    RecordMiddleware,
    WithoutPrefix,
)
from server.app.openapi import DescribedApi
from server.http.access_log import record_of
from server.http.errors import fault_of, user_error_from_problems
from server.openai.chat import chat_routes
from server.openai.completions import completion_routes
from server.openai.generate import generate_routes
from server.openai.lora import lora_routes
from server.openai.models import model_routes
from server.openai.render import render_routes
from server.openai.responses.routes import response_routes
from server.openai.tokenize import tokenize_routes
from server.pooling.routes import pooling_routes
from server.serving.state import AppState

TITLE = "gaudiserve"
OPENAPI = "/openapi.json"
PREFLIGHT_SECONDS = 600
PATH_CHARACTERS_SHOWN = 100
NEAR_PATH_RATIO = 0.8
"""Minimum similarity of an unknown path to a route for the route to be suggested."""
OLLAMA = "/api/"
"""Path prefix of Ollama's API."""
NOT_SERVED = (
    (re.compile(r"/v1/(audio/|realtime)"), "Audio is not served."),
    (
        re.compile(r"/v1/(files|batches|uploads)\b"),
        "`gaudiserve run-batch` answers a file of requests.",
    ),
    (re.compile(r"/v1/(images|videos)\b"), "Images and videos are not generated."),
    (re.compile(r"/v1/fine_tuning\b"), "Models are not trained here."),
    (re.compile(r"/v1/moderations\b"), "/classify runs a classifier."),
    (
        re.compile(r"/v1/(assistants|threads|conversations)\b"),
        "/v1/responses continues conversations that it stores.",
    ),
    (
        re.compile(r"/v1/(vector_stores|containers)\b"),
        "The client runs the tools and stores their files.",
    ),
    (re.compile("/v1/update_models"), "A server has a single model: start a server for each."),
    (
        re.compile("/generate(_stream)?$"),
        "The API of TGI is not served: set the client to OpenAI's API at /v1.",
    ),
    (re.compile(".*/derender$"), "/detokenize returns the text of token ids."),
)
"""(path pattern of routes of OpenAI, vLLM and TGI that do not exist here, sentence added to the 404
message)."""


def create_app(state: AppState) -> ASGIApp:
    """ASGI application of an API server, with all routes and middleware."""
    prefix = state.config.path_prefix
    api = DescribedApi(
        title=TITLE,
        version=state.version,
        description="OpenAI-compatible serving.",
        servers=[{"url": prefix}] if prefix else None,
        docs_url=None,
        openapi_url=OPENAPI if state.config.enable_docs else None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    routers = [
        routes(state)
        for routes in (
            *(chat_routes, completion_routes, response_routes, messages_routes),
            *(render_routes, generate_routes, pooling_routes, model_routes),
            *(tokenize_routes, admin_routes),
        )
    ]
    disabled: list[tuple[APIRouter, str]] = []
    for router, flag, is_on in _optional_routers(state):
        if is_on:
            routers.append(router)
        else:
            disabled.append((router, flag))
    for router in routers:
        api.include_router(router)
    api.state.routes = [route for router in routers for route in router.routes]
    api.state.flags = [(route, flag) for router, flag in disabled for route in router.routes]
    api.add_exception_handler(HTTPException, _answer_http)
    api.add_exception_handler(RequestValidationError, _answer_invalid)
    api.add_exception_handler(Exception, _leave_to_middleware)
    # Outside FastAPI's middleware stack, so that requests to fixed paths bypass FastAPI.
    app: ASGIApp = FastRouter(api, api.state.routes)
    app = AuthMiddleware(app, state)
    if state.config.allowed_origins:
        app = CorsMiddleware(
            app,
            allow_origins=state.config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED_FIELDS],
            max_age=PREFLIGHT_SECONDS,
        )
    app = RecordMiddleware(app, state)
    return WithoutPrefix(app, prefix) if prefix else app


def _optional_routers(state: AppState) -> list[tuple[APIRouter, str, bool]]:
    """Tuples (router, flags that its routes need, whether the routes are served)."""
    config = state.config
    return [
        (
            lora_routes(state),
            "--enable-lora, --allow-runtime-lora-updating, --lora-dir and --api-key",
            config.allow_runtime_lora_updating,
        ),
        (
            development_routes(state),
            "--enable-dev-endpoints and --api-key",
            config.serves_dev_endpoints,
        ),
        (docs_routes(TITLE), "--enable-docs", config.enable_docs),
        (page_routes(state), "--enable-page", config.enable_page),
    ]


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        error = _wrong_method(request, error)
    elif error.status_code == 404:
        error = _unknown_route(request)
    return _refusal(error, request)


def _wrong_method(request: Request, error: HTTPException) -> HTTPException:
    path = request.scope["path"]
    methods = ", ".join(_methods(request, path)) or (error.headers or {}).get("Allow", "")
    given = request.method[:PATH_CHARACTERS_SHOWN]
    message = f"{path[:PATH_CHARACTERS_SHOWN]} takes {methods}, not {given}."
    return HTTPException(405, message, headers={"Allow": methods})


def _unknown_route(request: Request) -> HTTPException:
    """404 for an unknown path, with a hint if one applies: the flag that enables the route, a note
    on a route of another server, the route if only `/v1` is missing, the base URL if `/v1` is there
    twice, a route below `/v1`, or the route with the most similar path."""
    path = request.scope["path"]
    shown = path[:PATH_CHARACTERS_SHOWN]
    message = f"There is no route {shown}."
    if flag := _flag(request):
        message += f" It is served with {flag}."
    elif path.startswith(OLLAMA):
        message += " The API of Ollama is not served: set the client to OpenAI's API at /v1."
    elif instead := [text for pattern, text in NOT_SERVED if pattern.match(path)]:
        message += f" {instead[0]}"
    elif _methods(request, f"/v1{path}"):
        message += f" The API is at /v1{shown}: end the client's base URL with /v1."
    elif path.startswith("/v1/v1/") and _methods(request, path.removeprefix("/v1")):
        message += " The path has /v1 twice: remove /v1 from the end of the client's base URL."
    elif path.rstrip("/") == "/v1":
        message += " It is the base of the API's routes; GET /v1/models lists the models."
    elif near := get_close_matches(shown, _paths(request), n=1, cutoff=NEAR_PATH_RATIO):
        message += f" The nearest route is {near[0]}."
    return HTTPException(404, message)


def _flag(request: Request) -> str | None:
    if request.scope["path"] == OPENAPI:
        return "--enable-docs"
    for route, flag in request.app.state.flags:
        if route.matches(request.scope)[0] != Match.NONE:
            return str(flag)
    return None


def _paths(request: Request) -> list[str]:
    paths = (route.path for route in request.app.state.routes if isinstance(route, Route))
    return sorted({path for path in paths if "{" not in path})


def _methods(request: Request, path: str) -> list[str]:
    scope = {**request.scope, "path": path}
    return sorted(
        method
        for route in request.app.state.routes
        if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE
        for method in route.methods or ()
    )


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # The first element of loc is the kind of parameter, such as "query".
    problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
    return _refusal(user_error_from_problems(problems), request)


def _refusal(error: Exception, request: Request) -> Response:
    fault = fault_of(error)
    record_of(request.scope).set_error(fault.status, fault.message, fault.param)
    return refusal(fault, request.url.path)


class _NoResponse(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def _leave_to_middleware(request: Request, error: Exception) -> Response:
    """Exception handler that sends nothing. Starlette then re-raises `error`, and AuthMiddleware
    handles it; the default handler would send plain text first."""
    return _NoResponse()

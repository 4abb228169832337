"""The application over an AppState: FastAPI's routes and errors, and our own layers around them."""

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.admin.development import development_routes
from server.admin.docs import docs_routes
from server.admin.page import page_routes
from server.admin.routes import admin_routes
from server.anthropic.errors import refusal
from server.anthropic.routes import messages_routes
from server.http.errors import fault_of, problem_of
from server.http.middleware import REQUEST_ID, Books, Cors, Gate, Shortcut
from server.http.openapi import DescribedApi
from server.http.state import AppState
from server.openai.chat import chat_routes
from server.openai.completions import completion_routes
from server.openai.models import model_routes
from server.openai.responses.routes import response_routes
from server.openai.tokenize import tokenize_routes
from server.pooling.embeddings import embedding_routes
from server.pooling.score_routes import score_routes

PREFLIGHT_SECONDS = 600


def create_app(state: AppState) -> ASGIApp:
    """Everything a front-end answers."""
    has_docs = state.config.enable_docs
    api = DescribedApi(
        title="gaudiserve",
        version=state.version,
        description="OpenAI-compatible serving.",
        docs_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    routers = [
        routes(state)
        for routes in (
            *(chat_routes, completion_routes, response_routes, messages_routes),
            *(embedding_routes, score_routes, model_routes, tokenize_routes, admin_routes),
            *(development_routes, page_routes),
        )
    ]
    for router in routers:
        api.include_router(router)
    if has_docs:
        api.include_router(docs_routes(api.title))
    api.add_exception_handler(HTTPException, _answer_http)
    api.add_exception_handler(RequestValidationError, _answer_invalid)
    api.add_exception_handler(Exception, _leave)
    # Around the library and not among its own layers, which a short request need not pass then.
    app: ASGIApp = Shortcut(api, [route for router in routers for route in router.routes])
    app = Gate(app, state)
    if state.config.allowed_origins:
        app = Cors(
            app,
            allow_origins=state.config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
            max_age=PREFLIGHT_SECONDS,
        )
    return Books(app, state)


async def _answer_http(request: Request, error: Exception) -> Response:
    return refusal(fault_of(error), request.url.path)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # The first step only says that it is about the query, or the path.
    problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
    return refusal(fault_of(problem_of(problems)), request.url.path)


class _Left(Response):
    """Nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def _leave(request: Request, error: Exception) -> Response:
    """The library answers in plain text and then raises `error` again: it is for the gate."""
    return _Left()

"""The FastAPI application over an AppState: routes, errors, and the layers around them."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from config.errors import UserError
from server.anthropic.faults import refusal
from server.errors import fault_of
from server.middleware import REQUEST_ID, Books, Cors, Gate
from server.openapi import DescribedApi
from server.routes.admin import admin_routes
from server.routes.chat import chat_routes
from server.routes.completions import completion_routes
from server.routes.development import development_routes
from server.routes.docs import docs_routes
from server.routes.embeddings import embedding_routes
from server.routes.messages import messages_routes
from server.routes.models import model_routes
from server.routes.page import page_routes
from server.routes.responses import response_routes
from server.routes.scores import score_routes
from server.routes.tokenize import tokenize_routes
from server.state import AppState

PREFLIGHT_SECONDS = 600


def create_app(state: AppState) -> FastAPI:
    """Everything a front-end answers."""
    has_docs = state.config.enable_docs
    app = DescribedApi(
        title="gaudiserve",
        version=state.version,
        description="OpenAI-compatible serving.",
        docs_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for routes in (
        *(chat_routes, completion_routes, response_routes, messages_routes),
        *(embedding_routes, score_routes, model_routes, tokenize_routes, admin_routes),
        *(development_routes, page_routes),
    ):
        app.include_router(routes(state))
    if has_docs:
        app.include_router(docs_routes(app.title))
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    # The last one added is the outermost.
    app.add_middleware(Gate, state=state)
    if state.config.allowed_origins:
        app.add_middleware(
            Cors,
            allow_origins=state.config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
            max_age=PREFLIGHT_SECONDS,
        )
    app.add_middleware(Books, state=state)
    return app


async def _answer_http(request: Request, error: Exception) -> Response:
    return refusal(fault_of(error), request.url.path)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    fault = fault_of(UserError("the path or query of this request is not valid"))
    return refusal(fault, request.url.path)

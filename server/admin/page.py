"""GET / and its files: the status page, with a chat box.

The page needs no API key, but the data that it requests does, if the server has keys.
"""

import asyncio
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from config.errors import GaudiserveError
from server.http.body import json_response
from server.serving.state import AppState

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A new server's page must not use an older server's script.
    "cache-control": "no-cache",
}
SHAPES_TIMEOUT_S = 1.0
"""Time for a busy engine to report its launches; after it the page shows the rest without them."""


def page_routes(state: AppState) -> APIRouter:
    """The page, its files and its data; none if it is disabled. URLs in it are relative, so that a
    reverse proxy may add a path prefix."""
    router = APIRouter(include_in_schema=False)
    if not state.config.enable_page:
        return router
    folder = files("server") / "page"
    for path, (name, kind) in FILES.items():
        _serve_file(router, path, (folder / name).read_bytes(), kind)

    @router.get("/page/state")
    async def get_state() -> Response:
        response = json_response(page_state(state) | {"shapes": await _shapes(state)})
        response.headers["cache-control"] = "no-store"
        return response

    return router


def _serve_file(router: APIRouter, path: str, content: bytes, kind: str) -> None:
    # Clients ask with HEAD / whether a server is there.
    @router.api_route(path, methods=["GET", "HEAD"])
    async def get_file() -> Response:
        return Response(content, headers={"content-type": kind, **HEADERS})


async def _shapes(state: AppState) -> Any:
    """The engine's StepStats.shapes; None if it does not respond in time."""
    try:
        return await asyncio.wait_for(state.client.control("shapes"), SHAPES_TIMEOUT_S)
    except (GaudiserveError, asyncio.TimeoutError):
        return None


def page_state(state: AppState) -> dict[str, Any]:
    """The data of the page that this API server has itself."""
    stats, ready = state.client.stats, state.client.ready
    compiled = sum(n for name, n in stats.compilations.items() if name.endswith(".serving"))
    return {
        "model": state.model_names[0],
        "version": state.version,
        "status": state.status,
        "progress": state.progress if state.status == "starting" else "",
        "device": ready.device if ready else "",
        "dtype": ready.dtype if ready else "",
        "max_model_len": state.max_model_len,
        "pools": state.pools,
        "takes_images": state.images is not None and state.config.max_images > 0,
        "load": {
            "running": stats.running,
            "waiting": stats.waiting,
            "waiting_prompt_tokens": stats.waiting_prompt_tokens,
            "open": len(state.active_requests),
            "blocks_used": stats.blocks_used,
            "blocks_total": stats.blocks_total,
        },
        "lookups": stats.lookups,
        "useful_tokens": stats.useful_tokens,
        "padding_tokens": stats.padding_tokens,
        "graphs": stats.graphs,
        "compilations": max(compiled, stats.recompilations),
        "recent": list(state.recent_requests),
    }

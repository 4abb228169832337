"""GET / and its files: the page with a chat and the server state. The page needs no API key; the
data that it requests needs a key if the server has keys."""

import asyncio
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import GaudiserveError
from server.http.auth import PAGE_FILES
from server.http.body import json_response
from server.serving.state import AppState

KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    # Trusted types: a string becomes markup only through the sanitizer's policy.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # The page of a new server must not use the cached script of an older server.
    "cache-control": "no-cache",
}
SHAPES_TIMEOUT_S = 1.0
"""Time limit for a busy engine to report its launches; the page then shows the other data."""


def page_routes(state: AppState) -> APIRouter:
    """Routes of the page, its files and its data. URLs in the page are relative, so that a reverse
    proxy may add a path prefix."""
    router = APIRouter(include_in_schema=False)
    for path, file in _page_files().items():
        # Starlette's route: FastAPI reads the signature of each endpoint, which takes longer than
        # everything else that a start does for the page.
        router.add_route(path, file.respond, include_in_schema=False)

    @router.get("/page/state")
    async def get_state() -> Response:
        response = json_response(page_state(state) | {"shapes": await _shapes(state)})
        response.headers["cache-control"] = "no-store"
        return response

    return router


@dataclass(frozen=True, slots=True)
class _PageFile:
    content: bytes
    headers: Mapping[str, str]

    @classmethod
    def of(cls, content: bytes, kind: str) -> "_PageFile":
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, {"content-type": kind, "etag": tag, **HEADERS})

    async def respond(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


@functools.cache
def _page_files() -> Mapping[str, _PageFile]:
    """The page and its files by their paths."""
    folder = files("server") / "page"
    page = (folder / "page.html").read_bytes()
    found = {"/": _PageFile.of(page, "text/html; charset=utf-8")}
    for file in (*folder.iterdir(), *(folder / "vendor").iterdir()):
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[PAGE_FILES + file.name] = _PageFile.of(file.read_bytes(), kind)
    return found


async def _shapes(state: AppState) -> Any:
    """StepStats.shapes of the engine; None if the engine does not respond in time."""
    try:
        return await asyncio.wait_for(state.client.control("shapes"), SHAPES_TIMEOUT_S)
    except (GaudiserveError, asyncio.TimeoutError):
        return None


def page_state(state: AppState) -> dict[str, Any]:
    """Data of the page that this API server has without asking the engine."""
    stats, ready = state.client.stats, state.client.ready
    compiled = sum(n for name, n in stats.compilations.items() if name.endswith(".serving"))
    return {
        "model": state.model_names[0],
        "models": [*state.model_names, *state.client.adapters],
        "num_names": len(state.model_names),
        "version": state.version,
        "status": state.status,
        "progress": state.progress if state.status == "starting" else "",
        "device": ready.device if ready else "",
        "dtype": ready.dtype if ready else "",
        "max_model_len": state.max_model_len,
        "has_docs": state.config.enable_docs,
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

"""GET / and its files: the web page with a chat and the server state. The page needs no API key;
the data that it requests needs a key if the server has keys."""

import asyncio
import functools
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from config.errors import GaudiserveError
from config.json_text import Json
from server.http.auth import PAGE_FILES
from server.http.body import json_response
from server.http.static_files import StaticFile
from server.serving.state import AppState

SUFFIXES = (".css", ".js", ".txt")
"""Suffixes of the files that are served beside the page."""
HEADERS = {
    # Trusted Types: only the sanitizer's policy can turn a string into markup.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # The page must not use a cached script of an earlier server version.
    "cache-control": "no-cache",
}
SHAPES_TIMEOUT_S = 1.0
"""Time limit for the engines to report their launch shapes; without a report the page shows the
other data."""


def page_routes(state: AppState) -> APIRouter:
    """Routes of the page, its files and its data. URLs in the page are relative, so that a reverse
    proxy may add a path prefix."""
    router = APIRouter(include_in_schema=False)
    for path, file in _page_files().items():
        # Starlette's route, because FastAPI inspects each endpoint's signature, which takes time at
        # start-up.
        router.add_route(path, file.respond, include_in_schema=False)

    @router.get("/page/state")
    async def get_state() -> Response:
        response = json_response(page_state(state) | {"shapes": await _shapes(state)})
        response.headers["cache-control"] = "no-store"
        return response

    return router


@functools.cache
def _page_files() -> Mapping[str, StaticFile]:
    folder = Path(str(files("server") / "page"))
    found = {"/": StaticFile(folder / "page.html", HEADERS)}
    for file in (*folder.iterdir(), *(folder / "vendor").iterdir()):
        if file.suffix in SUFFIXES:
            found[PAGE_FILES + file.name] = StaticFile(file, HEADERS)
    return found


async def _shapes(state: AppState) -> Any:
    """Launch shapes (StepStats.shapes), summed over the engines; None if the call fails or takes
    too long."""
    try:
        return await asyncio.wait_for(state.client.control("shapes"), SHAPES_TIMEOUT_S)
    except (GaudiserveError, asyncio.TimeoutError):
        return None


def _reason(state: AppState) -> str:
    if state.client.failure is not None:
        return state.client.failure
    return state.client.lost.message if state.client.lost is not None else ""


def page_state(state: AppState) -> Json:
    """Data for the page that needs no call to the engine."""
    stats, ready = state.client.stats, state.client.ready
    compiled = sum(n for name, n in stats.compilations.items() if name.endswith(".serving"))
    return {
        "model": state.model_names[0],
        "models": [*state.model_names, *state.client.adapters],
        "num_names": len(state.model_names),
        "version": state.version,
        "status": state.status,
        "progress": state.progress if state.status == "starting" else "",
        "reason": _reason(state),
        "uptime_s": max(0, int(time.time()) - state.created),
        "restarts": [restart._asdict() for restart in state.engine_restarts],
        "device": ready.device if ready else "",
        "dtype": ready.dtype if ready else "",
        "max_model_len": state.max_model_len,
        "has_docs": state.config.enable_docs,
        "pools": state.pools,
        "has_no_template": bool(state.template and not state.template.source),
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

"""GET /docs and its files: Swagger UI that loads nothing from other hosts."""

import functools
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, Response

from server.http.auth import DOCS_FILES
from server.http.static_files import StaticFile

FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
CACHE_S = 86_400
DARK_MODE = b"""<meta name="color-scheme" content="light dark">
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();
</script>
"""
"""Enables the dark colours of Swagger UI in browsers that prefer them."""


def docs_routes(title: str) -> APIRouter:
    """Routes of the page and its files. URLs are relative, so that a reverse proxy may add a path
    prefix."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def get_docs() -> Response:
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
        )
        return HTMLResponse(bytes(page.body).replace(b"</head>", DARK_MODE + b"</head>", 1))

    for path, file in _docs_files().items():
        router.add_route(path, file.respond, include_in_schema=False)
    return router


@functools.cache
def _docs_files() -> Mapping[str, StaticFile]:
    folder = Path(str(files("fastapi_offline") / "static"))
    headers = {"cache-control": f"max-age={CACHE_S}"}
    return {f"{DOCS_FILES}{name}": StaticFile(folder / name, headers) for name in FILES}

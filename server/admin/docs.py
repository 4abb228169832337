"""GET /docs and its files: Swagger UI without files from other hosts."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, HTMLResponse, Response

PAGE_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
CACHE_S = 86_400
DARK_MODE = b"""<meta name="color-scheme" content="light dark">
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();
</script>
"""
"""Swagger UI has dark colours, but asks no browser whether to use them."""


def docs_routes(title: str) -> APIRouter:
    """The page and its files. URLs are relative, so that a reverse proxy may add a path prefix."""
    router = APIRouter(include_in_schema=False)
    folder = files("fastapi_offline") / "static"

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

    def serve_file(name: str, kind: str) -> None:
        @router.get(f"/docs/{name}")
        async def get_file() -> Response:
            return FileResponse(
                str(folder / name),
                media_type=kind,
                headers={"Cache-Control": f"max-age={CACHE_S}"},
            )

    for name, kind in PAGE_FILES.items():
        serve_file(name, kind)
    return router

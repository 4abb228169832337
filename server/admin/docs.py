"""GET /docs and its files: Swagger UI without files from other hosts."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, Response

PAGE_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
CACHE_S = 86_400


def docs_routes(title: str) -> APIRouter:
    """The page and its files. URLs are relative, so that a reverse proxy may add a path prefix."""
    router = APIRouter(include_in_schema=False)
    folder = files("fastapi_offline") / "static"

    @router.get("/docs")
    async def get_docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
        )

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

"""StaticFile: a file of the page or of the API docs, served from memory."""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.http.body import SENT_BYTES
from server.http.json_encoder import slices_of

KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "png": "image/png",
    "txt": "text/plain; charset=utf-8",
}
"""File suffix -> content type."""


class StaticFile:
    """A file that is read once. If each response opened the file, clients that do not read would
    use up the file descriptors."""

    def __init__(self, path: Path, headers: Mapping[str, str]) -> None:
        """`headers`: additional headers of each response."""
        content = path.read_bytes()
        self._pieces = tuple(slices_of(content, SENT_BYTES))
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        kind = KINDS[path.suffix.removeprefix(".")]
        self.headers = {"content-type": kind, "etag": tag, **headers}
        self._num_bytes = len(content)

    async def respond(self, request: Request) -> Response:
        """Handler of the file's route."""
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        return _SharedResponse(
            self._pieces, {**self.headers, "content-length": str(self._num_bytes)}
        )


class _SharedResponse(Response):
    """A 200 response with pieces that all responses share. Sends the next piece when the client has
    read most of the earlier pieces, since each TLS connection has a copy of what is sent."""

    def __init__(self, pieces: tuple[bytes, ...], headers: Mapping[str, str]) -> None:
        self._pieces = pieces
        super().__init__(headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

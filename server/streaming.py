"""Server-sent events: frames to the byte, and a stream that ends its work when it closes.
Knows no choices."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ClientGone
from server.record import straight_send
from server.serving import until_gone

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "Connection": "keep-alive",
    # Proxies of a common kind gather what they hand on, unless they are told not to.
    "X-Accel-Buffering": "no",
}

_encoder = msgspec.json.Encoder()
# Some clients split a stream with text tools, for which these characters end a line as well.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def json_text(text: str) -> bytes:
    """`text` as a JSON string on one line, for every idea of what a line is."""
    encoded = _encoder.encode(text)
    if text.isascii() or not _LINE_ENDS.search(text):
        return encoded
    safe = _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", encoded.decode())
    return safe.encode()


def json_line(value: Any) -> bytes:
    """`value` as JSON on one line, for every idea of what a line is."""
    encoded = _encoder.encode(value)
    if encoded.isascii():
        return encoded
    text = encoded.decode()
    if not _LINE_ENDS.search(text):
        return encoded
    return _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()


def frame(data: bytes) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n"


def named_frame(kind: str, value: Any) -> bytes:
    """One event that says what it is, as the newer interfaces have it."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_line(value))


class Envelope:
    """What all chunks of a stream share, encoded once: only the choice is written anew."""

    def __init__(self, kind: str, id: str, created: int, model: str, fingerprint: str) -> None:
        fields = {
            "id": id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.head = b"data: " + json_line(fields)[:-1] + b',"choices":['

    def chunk(self, choice: bytes, extra: dict[str, Any] | None = None) -> bytes:
        """A frame with one choice (or none, if empty), and more top-level fields."""
        if not extra:
            return b"%b%b]}\n\n" % (self.head, choice)
        return b"%b%b],%b\n\n" % (self.head, choice, json_line(extra)[1:])


class EventStream(Response):
    """Frames as they come. `on_close` is called once nothing more is sent, whoever ended it; a
    client that hangs up ends it at once."""

    media_type = "text/event-stream"
    background = None

    def __init__(
        self, frames: AsyncIterator[bytes], *, keep_alive_s: float, on_close: Callable[[], None]
    ) -> None:
        """A comment is sent after `keep_alive_s` of silence; 0: never."""
        # Without the library's own initializer, which would tell the length of a whole body.
        self.status_code = 200
        self.init_headers(HEADERS)
        self._frames = frames
        self._keep_alive_s = keep_alive_s
        self._on_close = on_close
        self._sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A stream that is cut before its first frame never starts the generator, so a `finally`
        # there would not run.
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            with contextlib.suppress(ClientGone):
                await until_gone(receive, self._send_all(straight_send(scope)))
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        pinging = None
        if self._keep_alive_s:
            pinging = asyncio.ensure_future(self._ping(send, self._keep_alive_s))
        try:
            async for data in self._frames:
                self._sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            if pinging is not None:
                pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send, keep_alive_s: float) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_s
            if silent_s >= keep_alive_s:
                silent_s, self._sent_s = 0.0, time.monotonic()
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            await asyncio.sleep(keep_alive_s - silent_s)

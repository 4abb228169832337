"""Server-sent events: frames, and the response that streams them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from config.json_text import Json
from server.http.access_log import record_of
from server.http.body import SENT_BYTES
from server.http.disconnect import CancelOnDisconnect
from server.http.errors import ClientGone
from server.http.json_encoder import json_pieces, slices_of
from server.http.unread_answers import UnreadAnswers

DONE = b"data: [DONE]\n\n"
PING = ServerSentEvent(comment="keep-alive", sep="\n").encode()

_encoder = msgspec.json.Encoder()
# Some clients split a stream with str.splitlines, which also splits at these characters.
_LINE_SEPARATORS = tuple(
    (character.encode(), f"\\u{ord(character):04x}".encode())
    for character in ("\x85", "\u2028", "\u2029")
)
"""Line separators in UTF-8, and their JSON escapes."""


def json_line(value: Any) -> bytes:
    """`value` as JSON without unescaped line separators."""
    return _escaped(_encoder.encode(value))


def long_json_line(value: Any) -> bytes:
    """Like `json_line`, but encodes large values in pieces. For a large value call it on a
    thread."""
    return b"".join(map(_escaped, json_pieces(value)))


def _escaped(encoded: bytes) -> bytes:
    if encoded.isascii():
        return encoded
    for separator, escape in _LINE_SEPARATORS:
        encoded = encoded.replace(separator, escape)
    return encoded


def frame(data: bytes) -> bytes:
    """An SSE event with `data`."""
    return b"data: " + data + b"\n\n"


def named_frame(kind: str, value: Any) -> bytes:
    """An SSE event with an event type and `value` as JSON."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_line(value))


def long_named_frame(kind: str, value: object) -> bytes:
    """Like `named_frame`, but encodes large values in pieces. For a large value call it on a
    thread. Encoded JSON in `value` must have no unescaped line separators."""
    pieces = map(_escaped, json_pieces(value))
    return b"".join([b"event: ", kind.encode(), b"\ndata: ", *pieces, b"\n\n"])


class Envelope:
    """The fields that all chunks of a stream share, encoded once."""

    def __init__(self, kind: str, id: str, created: int, model: str, fingerprint: str) -> None:
        fields = {
            "id": id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.head = b"data: " + json_line(fields)[:-1] + b',"choices":['

    def chunk(self, choice: bytes, extra: Json | None = None) -> bytes:
        """A frame with the encoded `choice` (empty: no choice) and the additional top-level fields
        `extra`."""
        if not extra:
            return b"%b%b]}\n\n" % (self.head, choice)
        return b"%b%b],%b\n\n" % (self.head, choice, json_line(extra)[1:])


class EventStream(EventSourceResponse):
    """Response that sends frames as they arrive. `on_close` is called at the end of the stream, for
    any reason."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        *,
        keep_alive_s: float,
        on_close: Callable[[], None],
        num_unread_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`keep_alive_s`: interval of keep-alive comments in seconds; 0: no comments.
        `num_unread_bytes`: returns the bytes of output that is not encoded as frames yet."""
        super().__init__(frames, headers={"Cache-Control": "no-cache"})
        self._frames = frames
        self._keep_alive_s = keep_alive_s
        self._on_close = on_close
        self._num_unread_bytes = num_unread_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Replaces the method of sse_starlette, which creates several tasks per
        stream and a cancel scope per frame."""
        # Call `on_close` here: the generator does not start if the stream is cancelled before its
        # first frame.
        try:
            unread: UnreadAnswers = scope["unread_answers"]
            held = unread.hold_stream(self._num_unread_bytes, scope["abort_connection"])
            with contextlib.suppress(ClientGone), CancelOnDisconnect(receive), held:
                await self._send_all(scope, send, record_of(scope).send)
        finally:
            self._on_close()

    async def _send_all(self, scope: Scope, send: Send, send_body: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        pings = None
        # A comment inside a frame would end the frame.
        frame_lock = asyncio.Lock()
        unread: UnreadAnswers = scope["unread_answers"]
        if self._keep_alive_s:
            pings = asyncio.ensure_future(_ping(send_body, frame_lock, self._keep_alive_s))
        try:
            async for data in self._frames:
                if len(data) <= SENT_BYTES:
                    await send_body({"type": "http.response.body", "body": data, "more_body": True})
                    continue
                abort = scope["abort_connection"]
                async with frame_lock:
                    with unread.hold(len(data), abort) as answer:
                        for piece in slices_of(data, SENT_BYTES):
                            await send_body(
                                {"type": "http.response.body", "body": piece, "more_body": True}
                            )
                            answer.read(len(piece))
                            await asyncio.sleep(0)
        finally:
            if pings is not None:
                pings.cancel()
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


async def _ping(send_body: Send, frame_lock: asyncio.Lock, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        async with frame_lock:
            await send_body({"type": "http.response.body", "body": PING, "more_body": True})

"""The front-ends beside this one: a request about what another one keeps is handed to that one, and
its answer handed back. Knows no routes and no bodies."""

import asyncio
import contextlib
import hmac
import logging
import os
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config.errors import Overloaded
from config.log import LimitedWarning
from server.http.access_log import record_of
from server.http.disconnect import CancelOnDisconnect
from server.http.errors import ClientGone

_NUMBER = re.compile(r"[0-9a-f]{34}")
_SIZE_BYTES = 4
_GONE = "The front-end that keeps this is gone."

TOKEN_TIMEOUT_S = 5.0
"""How long a connection may take to present the token."""

MAX_PENDING = 64
"""Connections that have not presented the token yet; one more closes the oldest."""

MAX_MESSAGE_BYTES = 2**30
"""Far more than a request or an answer has, far less than a length prefix can announce."""

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class ForwardedRequest(msgspec.Struct, array_like=True):
    """A request on its way to a sibling."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes


class Piece(msgspec.Struct, array_like=True):
    """A part of its answer: the first one has status and headers, the last one is empty."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Address(NamedTuple):
    """Where a front-end is asked, and what must be presented there first."""

    path: str
    token: str


@dataclass(frozen=True, slots=True)
class Peers:
    """All front-ends of a server by their sockets' paths; none where this one is alone."""

    index: int = 0
    paths: tuple[str, ...] = ()
    token: str = ""

    def new_id(self) -> str:
        """A number that nobody has yet, and that says whose it is."""
        return f"{self.index:02x}{os.urandom(16).hex()}"

    def peer_of(self, number: str) -> Address | None:
        """Where the front-end is that gave `number`; None if it is this one, or none of us."""
        if not _NUMBER.fullmatch(number):
            return None
        index = int(number[:2], 16)
        if index >= len(self.paths) or index == self.index:
            return None
        return Address(self.paths[index], self.token)


class ForwardedResponse(Response):
    """The answer of the sibling at `address` to a request whose body, JSON, was `body`."""

    def __init__(self, address: Address, request: Request, body: Any = None) -> None:
        super().__init__()
        self._address = address
        record = record_of(request.scope)
        # The other one counts it and writes its line.
        record.is_forwarded = True
        left_out = (b"content-length", b"transfer-encoding", b"x-request-id")
        headers = [(name, value) for name, value in request.headers.raw if name not in left_out]
        client = request.scope.get("client")
        self._request = ForwardedRequest(
            request.method,
            request.url.path,
            request.scope["query_string"],
            [*headers, (b"x-request-id", record.id.encode())],
            client and (str(client[0]), int(client[1])),
            b"" if body is None else msgspec.json.encode(body),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with CancelOnDisconnect(receive):
            await self._pass_on(send)

    async def _pass_on(self, send: Send) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._address.path)
        except OSError:
            raise Overloaded(_GONE, type="server_error") from None
        try:
            writer.write(self._address.token.encode())
            await _write(writer, self._request)
            async for piece in _pieces(reader):
                if piece.status:
                    start = {"status": piece.status, "headers": piece.headers}
                    await send({"type": "http.response.start", **start})
                    continue
                more = bool(piece.body)
                await send({"type": "http.response.body", "body": piece.body, "more_body": more})
        finally:
            writer.close()


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[Piece]:
    """To the last one. Raises Overloaded or ClientGone when the sibling ends first."""
    has_begun = False
    while True:
        data = await _read(reader)
        if data is None:
            # What has begun can only be cut off.
            raise ClientGone if has_begun else Overloaded(_GONE, type="server_error")
        piece = msgspec.msgpack.decode(data, type=Piece)
        yield piece
        has_begun = True
        if not piece.status and not piece.body:
            return


async def listen(app: ASGIApp, peers: Peers, on_rejected: Callable[[], None]) -> asyncio.Server:
    """Answer with `app` what siblings hand to this front-end. `on_rejected` is called for each
    connection that does not present their token."""
    path = peers.paths[peers.index]
    token = peers.token.encode()
    rejected = LimitedWarning(
        logger, f"{path}: %d connections closed so far that did not present the launcher's token"
    )
    pending: dict[asyncio.StreamWriter, None] = {}

    async def is_sibling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if len(pending) >= MAX_PENDING:
            oldest = next(iter(pending))
            del pending[oldest]
            oldest.transport.abort()
        pending[writer] = None
        try:
            offered = await asyncio.wait_for(reader.readexactly(len(token)), TOKEN_TIMEOUT_S)
            return hmac.compare_digest(offered, token)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError):
            return False
        finally:
            pending.pop(writer, None)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not await is_sibling(reader, writer):
                rejected.add()
                on_rejected()
                return
            data = await _read(reader)
            if data is not None:
                await _answer(
                    app, msgspec.msgpack.decode(data, type=ForwardedRequest), reader, writer
                )
        except OSError:
            pass  # the sibling hung up, or is gone
        except asyncio.CancelledError:
            pass  # the loop ends; asyncio of Python 3.10 logs a traceback for what stays cancelled
        finally:
            writer.close()

    return await asyncio.start_unix_server(serve, path)


async def _answer(
    app: ASGIApp,
    handed: ForwardedRequest,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    hung_up = asyncio.Event()

    async def watch() -> None:
        # Nothing more is ever sent on it but its end.
        with contextlib.suppress(OSError):
            await reader.read(1)
        hung_up.set()

    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": handed.body, "more_body": False}
        await hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await _write(writer, Piece(message["status"], list(message["headers"]), b""))
            return
        if body := message.get("body", b""):
            await _write(writer, Piece(0, [], bytes(body)))
        if not message.get("more_body", False):
            await _write(writer, Piece(0, [], b""))

    watching = asyncio.ensure_future(watch())
    try:
        await app(_scope(handed), receive, send)
    finally:
        watching.cancel()


def _scope(handed: ForwardedRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": handed.method,
        "scheme": "http",
        "path": handed.path,
        "raw_path": handed.path.encode(),
        "query_string": handed.query,
        "root_path": "",
        "headers": handed.headers,
        "client": handed.client,
        "server": None,
    }


async def _write(writer: asyncio.StreamWriter, value: ForwardedRequest | Piece) -> None:
    data = _encode(value)
    writer.write(len(data).to_bytes(_SIZE_BYTES, "big") + data)
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """The next value; None if there is none any more. Raises OSError for one that is too long."""
    try:
        size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "big")
        if size > MAX_MESSAGE_BYTES:
            raise OSError(f"the message has {size} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None

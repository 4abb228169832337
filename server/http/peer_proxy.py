"""Proxy between API server processes: a stored response exists only in the memory of the API server
that created it. Messages on the Unix socket are msgpack, each preceded by its length in 4 bytes,
big-endian."""

import asyncio
import contextlib
import hmac
import logging
import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config.errors import Overloaded
from config.fair_threads import current_client
from config.log import LimitedWarning
from server.http.access_log import record_of
from server.http.disconnect import CancelOnDisconnect
from server.http.errors import ClientGone
from server.http.fair_slots import FairSlots
from server.http.json_encoder import PIECE_WEIGHT, encode_json, slices_of, weighs_more

_ID = re.compile(r"[0-9a-f]{34}")
_SIZE_BYTES = 4
_GONE = "The API server that stored this response has exited or does not respond."

TOKEN_TIMEOUT_S = 5.0
"""Time for a connection to present the token, and for the peer to accept it."""

MAX_UNAUTHENTICATED = 1024
"""Maximum connections that have not presented the token yet; at this limit, a new connection closes
the oldest."""
MAX_HANDSHAKES, MAX_HANDSHAKES_PER_CLIENT = 8, 4
"""Maximum connections to a peer that has not accepted the token yet, in total and per client. The
sum over up to 100 API servers is below MAX_UNAUTHENTICATED and BACKLOG."""
MAX_WAITING_HANDSHAKES = 4096
BACKLOG = 1024
_ACCEPTED = b"\1"
"""Reply to a peer whose token is accepted."""

PIECE_BYTES = 256 * 2**10
"""Bytes of a message that are copied at once on the event loop."""
MAX_MESSAGE_BYTES = 2**30
"""Maximum message size; a length prefix can declare 4 GiB."""

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class ForwardedRequest(msgspec.Struct, array_like=True):
    """A request forwarded to a peer API server."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes


class ResponsePart(msgspec.Struct, array_like=True):
    """A part of a response: the first part has status and headers, the last part is empty."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def _handshake_slots() -> FairSlots:
    return FairSlots(
        "connections to another API server",
        total=MAX_HANDSHAKES,
        per_client=MAX_HANDSHAKES_PER_CLIENT,
        max_waiting=MAX_WAITING_HANDSHAKES,
    )


class Peer(NamedTuple):
    """A peer API server: its socket, the token to present first, and the slots for handshakes with
    it."""

    path: str
    token: str
    handshakes: FairSlots


@dataclass(frozen=True, slots=True)
class Peers:
    """The sockets of all API servers (none if there is only a single API server), and the token for
    them."""

    index: int = 0
    """Index of this server."""
    paths: tuple[str, ...] = ()
    token: str = ""
    handshakes: defaultdict[int, FairSlots] = field(
        default_factory=lambda: defaultdict(_handshake_slots)
    )
    """Slots for handshakes by the index of the peer, so that a peer that hangs holds only its own
    slots."""

    def new_id(self) -> str:
        """A random id that contains the index of this server."""
        return f"{self.index:02x}{os.urandom(16).hex()}"

    def peer_of(self, id: str) -> Peer | None:
        """The peer that created `id`; None if this server created it or `id` is invalid."""
        if not _ID.fullmatch(id):
            return None
        index = int(id[:2], 16)
        if index >= len(self.paths) or index == self.index:
            return None
        return Peer(self.paths[index], self.token, self.handshakes[index])


class ForwardedResponse(Response):
    """The response of `peer` to `request`, with `body` as JSON if it is not None."""

    def __init__(self, peer: Peer, request: Request, body: Any = None) -> None:
        super().__init__()
        self._peer = peer
        self._record = record_of(request.scope)
        excluded = (b"content-length", b"transfer-encoding", b"x-request-id")
        headers = [(name, value) for name, value in request.headers.raw if name not in excluded]
        client = request.scope.get("client")
        self._request = ForwardedRequest(
            request.method,
            request.url.path,
            request.scope["query_string"],
            [*headers, (b"x-request-id", self._record.id.encode())],
            client and (str(client[0]), int(client[1])),
            b"",
        )
        self._value = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with CancelOnDisconnect(receive):
            await self._forward(send)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with self._peer.handshakes.hold(current_client.get() or ""):
            try:
                reader, writer = await asyncio.open_unix_connection(self._peer.path)
            except OSError:
                raise Overloaded(_GONE, type="server_error") from None
            try:
                writer.write(self._peer.token.encode())
                await asyncio.wait_for(reader.readexactly(len(_ACCEPTED)), TOKEN_TIMEOUT_S)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                # The peer is gone or hangs.
                writer.close()
                raise Overloaded(_GONE, type="server_error") from None
            except BaseException:
                writer.close()
                raise
            return reader, writer

    async def _forward(self, send: Send) -> None:
        reader, writer = await self._connect()
        try:
            message = await self._with_body()
            try:
                await _write(writer, message)
            except OSError:
                raise Overloaded(_GONE, type="server_error") from None
            # The peer logs and counts the requests that it receives.
            self._record.is_forwarded = True
            async for part in _response_parts(reader):
                if part.status:
                    start = {"status": part.status, "headers": part.headers}
                    await send({"type": "http.response.start", **start})
                    continue
                more = bool(part.body)
                await send({"type": "http.response.body", "body": part.body, "more_body": more})
        except Overloaded:
            # The peer has exited before it logged the request.
            self._record.is_forwarded = False
            raise
        finally:
            writer.close()

    async def _with_body(self) -> ForwardedRequest:
        value, self._value = self._value, None
        if value is None:
            return self._request
        is_large = weighs_more(value, PIECE_WEIGHT)
        data = await asyncio.to_thread(encode_json, value) if is_large else encode_json(value)
        return msgspec.structs.replace(self._request, body=data)


async def _response_parts(reader: asyncio.StreamReader) -> AsyncIterator[ResponsePart]:
    """The parts of a response. Raises ClientGone if the peer disconnects within the response, and
    Overloaded if it disconnects before."""
    has_started = False
    while True:
        data = await _read(reader)
        if data is None:
            # Once a response has started, it can only be aborted.
            raise ClientGone if has_started else Overloaded(_GONE, type="server_error")
        part = msgspec.msgpack.decode(data, type=ResponsePart)
        yield part
        has_started = True
        if not part.status and not part.body:
            return


async def listen(app: ASGIApp, peers: Peers, on_rejected: Callable[[], None]) -> asyncio.Server:
    """Serve requests of peers with `app`. `on_rejected` is called for each connection that does not
    present the token."""
    path = peers.paths[peers.index]
    token = peers.token.encode()
    rejected = LimitedWarning(
        logger, f"{path}: closed connections that did not present the launcher's token, so far: %d"
    )
    unauthenticated: dict[asyncio.StreamWriter, None] = {}

    async def is_peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if len(unauthenticated) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(unauthenticated))
            del unauthenticated[oldest]
            oldest.transport.abort()
        unauthenticated[writer] = None
        try:
            candidate = await asyncio.wait_for(reader.readexactly(len(token)), TOKEN_TIMEOUT_S)
            return hmac.compare_digest(candidate, token)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError):
            return False
        finally:
            unauthenticated.pop(writer, None)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not await is_peer(reader, writer):
                rejected.add()
                on_rejected()
                return
            writer.write(_ACCEPTED)
            data = await _read(reader)
            if data is not None:
                # Decoding copies the body.
                decode = partial(msgspec.msgpack.decode, data, type=ForwardedRequest)
                is_large = len(data) > PIECE_BYTES
                request = await asyncio.to_thread(decode) if is_large else decode()
                del data, decode
                await _handle(app, request, reader, writer)
        except OSError:
            pass  # the peer disconnected
        except asyncio.CancelledError:
            pass  # the loop is closing; asyncio of Python 3.10 logs a traceback for cancelled tasks
        finally:
            writer.close()

    return await asyncio.start_unix_server(serve, path, backlog=BACKLOG)


async def _handle(
    app: ASGIApp,
    request: ForwardedRequest,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    disconnected = asyncio.Event()

    async def watch() -> None:
        # The peer sends no more data, so this read returns when it disconnects.
        with contextlib.suppress(OSError):
            await reader.read(1)
        disconnected.set()

    num_received = 0

    async def receive() -> Message:
        nonlocal num_received
        if num_received <= len(request.body):
            part = request.body[num_received : num_received + PIECE_BYTES]
            num_received += PIECE_BYTES
            # The loop runs other requests between the parts.
            await asyncio.sleep(0)
            more = num_received < len(request.body)
            if not more:
                num_received = len(request.body) + 1
            return {"type": "http.request", "body": part, "more_body": more}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        try:
            if message["type"] == "http.response.start":
                await _write(writer, ResponsePart(message["status"], list(message["headers"]), b""))
                return
            if body := message.get("body", b""):
                await _write(writer, ResponsePart(0, [], bytes(body)))
            if not message.get("more_body", False):
                await _write(writer, ResponsePart(0, [], b""))
        except OSError:
            # The peer closes the connection when its client disconnects.
            raise ClientGone from None

    watching = asyncio.ensure_future(watch())
    try:
        await app(_scope(request, writer.transport.abort), receive, send)
    finally:
        watching.cancel()


def _scope(request: ForwardedRequest, abort: Callable[[], None]) -> Scope:
    return {
        "abort_connection": abort,
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
    }


async def _write(writer: asyncio.StreamWriter, value: ForwardedRequest | ResponsePart) -> None:
    is_large = len(value.body) > PIECE_BYTES
    data = await asyncio.to_thread(_encode, value) if is_large else _encode(value)
    head = len(data).to_bytes(_SIZE_BYTES, "big")
    if not is_large:
        writer.write(head + data)
    else:
        writer.write(head)
        for piece in slices_of(data, PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytearray | None:
    """The next message; None at the end. Raises OSError for a message over MAX_MESSAGE_BYTES."""
    try:
        size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "big")
        if size > MAX_MESSAGE_BYTES:
            raise OSError(f"the message has {size} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
        data = bytearray()
        # `readexactly` would copy a large message in a single call.
        while len(data) < size:
            piece = await reader.read(min(size - len(data), PIECE_BYTES))
            if not piece:
                return None
            data += piece
            if size > PIECE_BYTES:
                await asyncio.sleep(0)
        return data
    except (asyncio.IncompleteReadError, ConnectionError):
        return None

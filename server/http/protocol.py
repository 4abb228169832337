"""uvicorn's HTTP/1.1 protocol with bounds: on headers, on the time a request may take to arrive, on
pipelined requests and on connections. Clients that half-close get their answers."""

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from config.server import ServerConfig
from server.http.errors import Fault

logger = logging.getLogger(__name__)

MIN_BODY_BYTES_PER_S = 1024
"""A body that arrives slower than this has `body_timeout_s` in all."""
MAX_FRAMING_PER_BODY_BYTE = 16
"""Chunk sizes and extensions that a chunked body may have for each of its bytes; the smallest
chunk, of one byte, needs 5."""
MAX_PIPELINED = 16
"""Requests that may wait on one connection for the answer before them. One read may hold 14,000."""
LINGER_S = 2.0
"""For how long the rest of a refused request is read and dropped. A socket that is closed with
unread data is reset, and the client may lose the answer."""
PROBE_S = 0.1
MAX_PROBES = 3
FULL_WARNING_S = 10.0
"""Seconds between two warnings that all connections are taken."""

_TCP_CLOSE = 7
"""TCP_CLOSE of Linux's tcp_states.h: what a reset connection is in."""
_STATUS_LINE_START = b"HTTP/1.1 "


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one connection may send, and how many there may be."""

    max_header_bytes: int
    max_header_count: int
    header_timeout_s: float
    body_timeout_s: float
    max_connections: int

    @classmethod
    def of(cls, config: ServerConfig, max_connections: int) -> "HttpLimits":
        return cls(
            config.h11_max_incomplete_event_size,
            config.h11_max_header_count,
            config.request_header_timeout_s,
            config.request_body_timeout_s,
            max_connections,
        )


class HttpConfig(uvicorn.Config):
    """uvicorn's settings, and the limits of HttpProtocol."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, **settings: Any) -> None:
        # Addresses are taken from proxies by server/http/trusted_proxies.py.
        super().__init__(app, http=HttpProtocol, ws="none", proxy_headers=False, **settings)
        self.limits = limits
        self.warned_full_s = -math.inf


class _Refused(Exception):
    """Raised in the parser's callbacks, which stops the parser."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.fault = Fault(status, message)


class _Reading(Enum):
    """What the next byte from the client belongs to."""

    NOTHING = 0
    """No request has begun."""
    HEADERS = 1
    BODY = 2
    DROPPED = 3
    """A request that was refused, or that comes behind one."""


class _BegunStatusLine:
    """Stands in for the transport of a response of which the first bytes were sent as probes, and
    removes them from what the response writes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_sent = 0

    def send_byte(self) -> None:
        self._transport.write(_STATUS_LINE_START[self._num_sent : self._num_sent + 1])
        self._num_sent += 1

    def write(self, data: bytes) -> None:
        self._transport.write(data[self._num_sent :])
        self._num_sent = 0

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class HttpProtocol(HttpToolsProtocol):
    """One connection. `expire` must be called when `deadline_s` of the event loop's clock is
    over."""

    def __init__(
        self,
        config: HttpConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.deadline_s = math.inf
        self._http_config = config
        self._limits = config.limits
        self._reading = _Reading.NOTHING
        self._responding: RequestResponseCycle | None = None
        """The oldest request without a complete response; `cycle` is the newest. It may be complete
        too."""
        self._num_begun = 0
        """Requests of this connection so far."""
        self._max_header_count = config.limits.max_header_count
        self._num_body_bytes = 0
        self._num_read_bytes = 0
        """Of the read that is being parsed."""
        self._num_fed_bytes = 0
        """In the headers: bytes so far, complete lines or not. In the body: those of data and
        framing. Reads that hold another request too are left out."""
        self._body_began_s = 0.0
        self._is_half_closed = False
        self._num_probes = 0

    # Calls from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        if len(self.connections) > self._limits.max_connections:
            self._refuse_connection()
            return
        self.deadline_s = self.loop.time() + self._limits.header_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn tells only the newest request.
        self.pipeline.clear()
        if self._is_responding():
            assert self._responding is not None
            self._responding.disconnected = True
            self._responding.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._reading is _Reading.DROPPED:
            return
        self._unset_keepalive_if_required()
        read_before, num_begun_before = self._reading, self._num_begun
        num_body_bytes_before = self._num_body_bytes
        self._num_read_bytes = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # There is no protocol to upgrade to: the request is answered as HTTP/1.1. What follows
            # it in this read was not parsed.
            if upgrade.args[0] < len(data):
                self._drop_input()
        except httptools.HttpParserError as error:
            reason = error.__context__
            if isinstance(reason, _Refused):
                self._refuse(reason.fault)
            else:
                self._refuse(Fault(400, "Invalid HTTP request received."))
            return
        reading = self._reading
        if reading is _Reading.NOTHING:
            # Empty lines before a request stop uvicorn's timer for idle connections.
            if self._num_begun == num_begun_before and self.deadline_s == math.inf:
                self.deadline_s = self.loop.time() + self._limits.header_timeout_s
            return
        num_begun = self._num_begun - num_begun_before
        if num_begun == 0 or (num_begun == 1 and read_before is _Reading.NOTHING):
            self._num_fed_bytes += len(data)
        if reading is _Reading.HEADERS:
            if self.deadline_s == math.inf:
                self.deadline_s = self.loop.time() + self._limits.header_timeout_s
            if self._num_fed_bytes > self._limits.max_header_bytes:
                self._refuse(Fault(431, _too_many_bytes("headers", self._limits)))
        elif reading is _Reading.BODY:
            if not self._has_sane_framing():
                return
            if num_begun or read_before is not _Reading.BODY:
                self._body_began_s = self.loop.time()
                self._set_body_deadline()
            elif self._num_body_bytes > num_body_bytes_before:
                self._set_body_deadline()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: only for responses to complete requests."""
        if self._reading is _Reading.BODY or not self._is_responding():
            return False
        self._drop_input()
        self._is_half_closed = True
        self._probe()
        return True

    # Calls from the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = _Reading.HEADERS
        if self._num_begun:
            # The first one's runs since the connection was made.
            self.deadline_s = math.inf
        self._num_begun += 1
        self._num_fed_bytes = 0
        self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._limits.max_header_bytes:
            raise _Refused(414, _too_many_bytes("URL", self._limits))

    def on_header(self, name: bytes, value: bytes) -> None:
        # As uvicorn's, which is not called: this runs some 20 times a request.
        headers = self.headers
        if len(headers) == self._max_header_count:
            raise _Refused(
                431,
                f"The request has at least {len(headers) + 1} headers, at most "
                f"{self._max_header_count} are allowed.",
            )
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        headers.append((name, value))

    def on_headers_complete(self) -> None:
        num_header_bytes = 0
        if self._num_fed_bytes + self._num_read_bytes > self._limits.max_header_bytes:
            num_header_bytes = len(self.url)
            # With the colon, the space and the line end of each.
            num_header_bytes += sum(len(name) + len(value) + 4 for name, value in self.headers)
            if num_header_bytes > self._limits.max_header_bytes:
                raise _Refused(431, _too_many_bytes("headers", self._limits))
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused(
                400,
                f"{len(self.pipeline) + 1} requests would wait on this connection, at most "
                f"{MAX_PIPELINED} may.",
            )
        if self.parser.should_upgrade():
            self._check_upgrade()
        super().on_headers_complete()
        self._reading = _Reading.BODY
        # What is fed counts for the body from here on, and this read holds headers too.
        self._num_fed_bytes = -num_header_bytes
        # Trailers are no headers: a proxy in front did not check them. They are dropped.
        self.headers = []
        if self.scope["http_version"] != "1.1":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign, assignment]
        if not self._is_responding():
            self._responding = self.cycle

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading = _Reading.NOTHING
        self.deadline_s = math.inf
        if self.cycle.response_complete:
            # Its timer for idle connections ended when the rest of the body came.
            self.deadline_s = self.loop.time() + self.timeout_keep_alive

    # Calls from a response, and from the server

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._responding = self.pipeline[-1][0]
        super().on_response_complete()

    def shutdown(self) -> None:
        super().shutdown()
        if self._reading is _Reading.DROPPED and not self._is_responding():
            self.transport.abort()

    def expire(self) -> None:
        """End what took too long."""
        if self._is_half_closed:
            self._probe()
        elif self.transport.is_closing() or self._reading is _Reading.DROPPED:
            self.transport.abort()
        elif self._reading is _Reading.BODY:
            self._expire_body()
        elif self._is_responding():
            # The client waits for this response before it sends more.
            self.deadline_s = self.loop.time() + self._limits.header_timeout_s
        elif self._reading is _Reading.HEADERS:
            self._refuse(
                Fault(
                    408,
                    "The headers of the request were not complete after "
                    f"{self._limits.header_timeout_s:g} s.",
                )
            )
        else:
            self.transport.close()

    def _expire_body(self) -> None:
        now_s = self.loop.time()
        cycle = self.cycle
        if self.flow.read_paused or cycle.waiting_for_100_continue or cycle is not self._responding:
            # It is we who do not read.
            self._body_began_s = now_s
            self.deadline_s = now_s + self._limits.body_timeout_s
            return
        self._refuse(
            Fault(
                408,
                f"After {now_s - self._body_began_s:.1f} s, {self._num_body_bytes} bytes of the "
                "body have arrived; the client must send some every "
                f"{self._limits.body_timeout_s:g} s, and after that time at least "
                f"{MIN_BODY_BYTES_PER_S} a second.",
            )
        )

    def _is_responding(self) -> bool:
        return self._responding is not None and not self._responding.response_complete

    def _check_upgrade(self) -> None:
        """Refuse an offer to upgrade on a request with a body: httptools takes that body for the
        next request."""
        headers = dict(self.headers)
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            offered = headers.get(b"upgrade", b"")[:40].decode("latin-1")
            raise _Refused(
                400,
                f"The request has a body and offers an upgrade to {offered!r}; send it as HTTP/1.1 "
                "without that offer.",
            )

    def _has_sane_framing(self) -> bool:
        num_framing = self._num_fed_bytes - self._num_body_bytes
        most = self._limits.max_header_bytes + MAX_FRAMING_PER_BODY_BYTE * self._num_body_bytes
        if num_framing > most:
            self._refuse(
                Fault(
                    400,
                    f"The body has {num_framing} bytes of chunk headers for "
                    f"{self._num_body_bytes} bytes of data, at most {most} are allowed.",
                )
            )
        return num_framing <= most

    def _set_body_deadline(self) -> None:
        earned_s = self._num_body_bytes / MIN_BODY_BYTES_PER_S
        since_s = min(self.loop.time(), self._body_began_s + earned_s)
        self.deadline_s = since_s + self._limits.body_timeout_s

    def _refuse(self, fault: Fault) -> None:
        """Answer with `fault`, and drop what else the client sends. Responses to requests before
        this one are completed first, and then nobody is told."""
        logger.info("refused a request from %s: %s", self._peer(), fault.message)
        if self.transport.is_closing():
            return
        is_read_for = self.cycle if self._reading is _Reading.BODY else None
        if is_read_for is None and self._is_responding():
            self._drop_input()
            return
        if is_read_for is not None and (
            is_read_for.response_started or is_read_for is not self._responding
        ):
            # Too late for another status, or too early.
            self.transport.abort()
            return
        if is_read_for is not None:
            # Its handler waits for the body, and must not answer too.
            is_read_for.disconnected = True
            is_read_for.message_event.set()
        self._reading = _Reading.DROPPED
        self.deadline_s = self.loop.time() + LINGER_S
        self._unset_keepalive_if_required()
        self.transport.write(_response(fault, self.server_state.default_headers))
        with contextlib.suppress(OSError):
            self.transport.write_eof()
        self.flow.resume_reading()

    def _refuse_connection(self) -> None:
        most = self._limits.max_connections
        now_s = self.loop.time()
        if now_s - self._http_config.warned_full_s > FULL_WARNING_S:
            self._http_config.warned_full_s = now_s
            logger.warning(
                "%d connections are open, at most %d may be: new ones get 503",
                len(self.connections) - 1,
                most,
            )
        message = f"{len(self.connections) - 1} connections are open, at most {most} may be."
        fault = Fault(503, message, "server_overloaded", headers={"Retry-After": "1"})
        self._reading = _Reading.DROPPED
        self.transport.write(_response(fault, self.server_state.default_headers))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Fault(400, msg))

    def _drop_input(self) -> None:
        """Read no further request; the connection ends after the responses that are due."""
        self._reading = _Reading.DROPPED
        self.deadline_s = math.inf
        self.cycle.keep_alive = False

    def _probe(self) -> None:
        """Find out whether the client closed its socket or only its sending side, which look the
        same from here. The system of a closed socket answers data with a reset; so the response
        begins with bytes that do not depend on it: those of its status line, or a leading zero of
        its next chunk's size."""
        responding = self._responding
        if responding is None or responding.response_complete:
            self.deadline_s = math.inf
            return
        self.deadline_s = self.loop.time() + PROBE_S
        if self._is_reset():
            self.transport.abort()
            return
        if self._num_probes == MAX_PROBES:
            return
        self._num_probes += 1
        if responding.response_started:
            if responding.chunked_encoding and responding.scope["method"] != "HEAD":
                self.transport.write(b"0")
            return
        if not isinstance(responding.transport, _BegunStatusLine):
            responding.transport = _BegunStatusLine(self.transport)  # type: ignore[assignment]
        responding.transport.send_byte()  # type: ignore[attr-defined]

    def _is_reset(self) -> bool:
        sock = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            state: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            return state == _TCP_CLOSE
        return True

    def _peer(self) -> str:
        return self.client[0] if self.client else "-"


def _too_many_bytes(what: str, limits: HttpLimits) -> str:
    return (
        f"The {what} of the request exceeded {limits.max_header_bytes} bytes, at most "
        f"{limits.max_header_bytes} are allowed."
    )


def _response(fault: Fault, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    body = fault.body()
    headers = [
        *default_headers,
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *((name.lower().encode(), value.encode()) for name, value in fault.headers.items()),
    ]
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[fault.status], *lines, b"\r\n", body])


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """`cycle.send` for clients older than HTTP/1.1: a body without content-length ends with the
    connection."""
    send = cycle.send
    ends_with_connection = False

    async def send_without_chunks(message: Message) -> None:
        nonlocal ends_with_connection
        if message["type"] == "http.response.start":
            headers = [one for one in message.get("headers", ()) if one[0].lower() != b"connection"]
            message["headers"] = [*headers, (b"connection", b"close")]
            if all(name.lower() != b"content-length" for name, _ in headers):
                ends_with_connection = True
                cycle.chunked_encoding = False
        elif ends_with_connection:
            # uvicorn counts what is left of a declared length.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cast(Any, message))

    return send_without_chunks

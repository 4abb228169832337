"""uvicorn's HTTP/1.1 protocol with limits on headers, on the time to receive a request, on
pipelined requests and on connections. Without TLS, clients that half-close their connection still
get their responses."""

import asyncio
import contextlib
import fcntl
import logging
import math
import socket
import termios
import time
import weakref
from array import array
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from config.server import ServerConfig
from server.http.errors import Fault
from server.http.input_pacing import PIECE_BYTES, InputPacer
from server.http.pacing import ClosingPacer
from server.http.tls import Tls

logger = logging.getLogger(__name__)

MIN_BODY_BYTES_PER_S = 1024
"""Minimum rate of a request body; see `_extend_body_deadline`."""
UNREAD_TIMEOUT_S = 600.0
"""Time in which a client must read MIN_READ_BYTES while a part of its response is unsent. A client
that reads 20 KB/s takes 300 s to empty a receive buffer of 6 MB; until then, no bytes are
acknowledged here."""
MIN_READ_BYTES = 64 * 2**10
"""Minimum progress of a reader, about 100 bytes per second over UNREAD_TIMEOUT_S."""
MAX_FRAMING_PER_BODY_BYTE = 16
"""Bytes of chunk sizes and extensions that a chunked body may have per body byte, in addition to
--h11-max-incomplete-event-size; a 1-byte chunk needs 5."""
MAX_PIPELINED = 16
"""Maximum requests per connection that wait for an earlier response. A single read can contain
14,000 requests."""
MAX_WAITING_BYTES = 2**29
"""Maximum total input of all connections that waits for parsing."""
LINGER_S = 2.0
"""Time for which the rest of a rejected request is read and dropped. Closing a socket with unread
data resets it, and the client may lose the response."""
ACCEPTS_PER_ITERATION = 8
"""Connections accepted per iteration of the event loop. libuv alone accepts a single connection: in
a flood, an iteration takes 10 ms, and new clients wait behind the flood's connections."""
PROBE_S = 0.1
MAX_PROBES = 3
FULL_WARNING_S = 10.0
"""Minimum interval between warnings about the connection limit."""

REJECTION_LOG_S = 1.0
"""Minimum interval between log lines about rejected requests."""

_TCP_CLOSE = 7
"""TCP_CLOSE in Linux's tcp_states.h, the state of a reset connection."""
_STATUS_LINE_START = b"HTTP/1.1 "
TLS_HANDSHAKE = b"\x16"
"""First byte of a TLS connection: the type of a handshake's record."""


class HttpConfig(uvicorn.Config):
    """uvicorn's settings, and the limits for HttpProtocol."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerConfig,
        max_connections: int,
        *,
        tls: Tls | None = None,
        **settings: Any,
    ) -> None:
        # Forwarding headers are handled in server/http/trusted_proxies.py.
        super().__init__(app, http=HttpProtocol, ws="none", proxy_headers=False, **settings)
        self.tls = tls
        self.limits = limits
        self.max_connections = max_connections
        self.input_pacer = InputPacer()
        self.closing_pacer = ClosingPacer()
        self.warned_full_s = -math.inf
        self.logged_rejection_s = -math.inf
        self.num_rejected = 0

    def warn_full(self, num_open: int) -> None:
        """Log that the connection limit is reached, at most once in FULL_WARNING_S."""
        now_s = time.monotonic()
        if now_s - self.warned_full_s > FULL_WARNING_S:
            self.warned_full_s = now_s
            logger.warning(
                "%d connections are open, at most %d are allowed: new connections are refused",
                num_open,
                self.max_connections,
            )


class _Rejected(Exception):
    """Raised in the parser's callbacks to stop the parser."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.fault = Fault(status, message)


class _ReadState(Enum):
    """Part of a request that the client's next byte belongs to."""

    IDLE = 0
    """Between requests."""
    HEADERS = 1
    BODY = 2
    DROPPED = 3
    """All further input is dropped."""


class _PartialStatusLine:
    """Transport for a response whose first bytes were already sent as probes: strips these bytes
    from the response."""

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


class _Flow(FlowControl):
    """uvicorn's flow control of a connection; also pauses reading while input waits for parsing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._has_waiting_input = False

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._resume()

    def input_waits(self) -> None:
        """Stop reading until `input_is_parsed`."""
        self._has_waiting_input = True
        self._transport.pause_reading()

    def input_is_parsed(self) -> None:
        self._has_waiting_input = False
        self._resume()

    def _resume(self) -> None:
        if not (self.read_paused or self._has_waiting_input or self._transport.is_closing()):
            self._transport.resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """A client connection. The server must call `expire` when the event loop's clock passes
    `deadline_s`, and `expire_response` when it passes `read_deadline_s`."""

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
        self._read_state = _ReadState.IDLE
        self._responding: RequestResponseCycle | None = None
        """The oldest request with an incomplete response; if all are complete, an earlier request
        or None. `cycle` is the newest request."""
        self._num_started = 0
        """Number of requests started on this connection."""
        self._max_header_count = config.limits.h11_max_header_count
        self._num_body_bytes = 0
        self._num_read_bytes = 0
        """Size of the current read."""
        self._num_fed_bytes = 0
        """In the headers: bytes so far, including incomplete lines. In the body: approximate bytes
        of data and framing, which may include headers from the read in which they end. Excludes
        reads that also contain part of another request."""
        self._body_started_s = 0.0
        self._body_paid_s = 0.0
        """Time until which the received body bytes satisfy the minimum rate."""
        self._input = memoryview(b"")
        """Input left for a later iteration of the event loop."""
        self._is_half_closed = False
        self._num_probes = 0
        self.read_deadline_s = math.inf
        """Deadline of a client that does not read; see `expire_response`."""
        self._num_unread_bytes = 0
        """Bytes of the response that the client had not received when the deadline was set."""

    # Calls from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.flow = self._input_flow = _Flow(self.transport)
        if len(self.connections) > self._http_config.max_connections:
            self._reject_connection()
            return
        self.deadline_s = self.loop.time() + self._limits.request_header_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._input = memoryview(b"")
        # uvicorn does not stop the idle timer after a reset, and the timer would keep the
        # connection's memory alive.
        self._unset_keepalive_if_required()
        # uvicorn notifies only the newest request of the disconnect.
        self.pipeline.clear()
        if self._has_pending_response():
            assert self._responding is not None
            self._responding.disconnected = True
            self._responding.message_event.set()
        # A request cycle refers to its protocol. Break this reference cycle: otherwise only the
        # garbage collector frees both, long after thousands of old connections have closed.
        self.cycle = self._responding = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        pacer = self._http_config.input_pacer
        if self._input:
            # Data that the TLS layer had already decrypted when reading was paused.
            self._input = memoryview(bytes(self._input) + data)
            return
        if len(data) <= PIECE_BYTES and pacer.has_time():
            self._parse(data)
            return
        self._input = memoryview(data)
        while self._input and pacer.has_time():
            self._parse_piece()
        if self._input:
            self._wait_for_time(pacer, len(data))

    def parse_next(self) -> bool:
        """Parse the next piece of the input; returns whether more input waits."""
        self._parse_piece()
        if self._input:
            return True
        self._input_flow.input_is_parsed()
        return False

    def _wait_for_time(self, pacer: InputPacer, num_bytes: int) -> None:
        if pacer.num_bytes + num_bytes > MAX_WAITING_BYTES:
            self._input = memoryview(b"")
            message = (
                f"{pacer.num_bytes + num_bytes} bytes of requests are waiting to be parsed, at "
                f"most {MAX_WAITING_BYTES} may wait."
            )
            self._reject(Fault(503, message, "server_overloaded", headers={"Retry-After": "1"}))
            return
        # A connection with waiting input is not idle.
        self._unset_keepalive_if_required()
        self._input_flow.input_waits()
        pacer.wait(self._peer(), self.parse_next, num_bytes)

    def _parse_piece(self) -> None:
        piece, self._input = self._input[:PIECE_BYTES], self._input[PIECE_BYTES:]
        self._parse(piece)
        if self._read_state is _ReadState.DROPPED or self.transport.is_closing():
            self._input = memoryview(b"")

    def _parse(self, data: bytes | memoryview) -> None:
        if self._read_state is _ReadState.DROPPED or not data:
            return
        self._unset_keepalive_if_required()
        state_before, num_started_before = self._read_state, self._num_started
        num_body_bytes_before = self._num_body_bytes
        self._num_read_bytes = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Upgrades are not supported: handle the request as HTTP/1.1. The rest of this read has
            # not been parsed.
            if upgrade.args[0] < len(data):
                self._drop_input()
        except httptools.HttpParserError as error:
            reason = error.__context__
            if isinstance(reason, _Rejected):
                self._reject(reason.fault)
            elif state_before is _ReadState.IDLE and data[:1] == TLS_HANDSHAKE:
                self._reject(
                    Fault(400, "This port serves HTTP without TLS: use an http:// address.")
                )
            else:
                self._reject(Fault(400, "Invalid HTTP request received."))
            return
        read_state = self._read_state
        if read_state is _ReadState.IDLE:
            # Empty lines before a request stop uvicorn's idle timer.
            is_empty = state_before is _ReadState.IDLE and self._num_started == num_started_before
            if is_empty and self.deadline_s == math.inf:
                self.deadline_s = self.loop.time() + self._limits.request_header_timeout_s
            return
        num_started = self._num_started - num_started_before
        if num_started == 0 or (num_started == 1 and state_before is _ReadState.IDLE):
            self._num_fed_bytes += len(data)
        if read_state is _ReadState.HEADERS:
            if self.deadline_s == math.inf:
                self.deadline_s = self.loop.time() + self._limits.request_header_timeout_s
            if self._num_fed_bytes > self._limits.h11_max_incomplete_event_size:
                self._reject(Fault(431, _too_many_bytes("head", self._num_fed_bytes, self._limits)))
        elif read_state is _ReadState.BODY:
            if not self._check_framing():
                return
            if num_started or state_before is not _ReadState.BODY:
                self._body_started_s = self._body_paid_s = self.loop.time()
                self._extend_body_deadline(self._num_body_bytes)
            elif num_new := self._num_body_bytes - num_body_bytes_before:
                self._extend_body_deadline(num_new)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection open: for responses to complete requests, or until its
        turn to be closed. False with TLS, where a connection cannot be half-closed."""
        if not self.transport.can_write_eof():
            return False
        if self._read_state is _ReadState.BODY or not self._has_pending_response():
            return not self._http_config.closing_pacer.may_close(self.transport)
        self._drop_input()
        self._is_half_closed = True
        self._probe()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_read_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.read_deadline_s = math.inf

    # Calls from the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._read_state = _ReadState.HEADERS
        if self._num_started:
            # The deadline of the first request began with the connection.
            self.deadline_s = math.inf
        self._num_started += 1
        self._num_fed_bytes = 0
        self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._limits.h11_max_incomplete_event_size:
            raise _Rejected(414, _too_many_bytes("URL", len(self.url), self._limits))

    def on_header(self, name: bytes, value: bytes) -> None:
        # Replaces uvicorn's method without calling it: this runs about 20 times per request.
        headers = self.headers
        if len(headers) == self._max_header_count:
            raise _Rejected(
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
        if self._num_fed_bytes + self._num_read_bytes > self._limits.h11_max_incomplete_event_size:
            num_header_bytes = len(self.url)
            # 4: colon, space and line break of each header.
            num_header_bytes += sum(len(name) + len(value) + 4 for name, value in self.headers)
            if num_header_bytes > self._limits.h11_max_incomplete_event_size:
                raise _Rejected(431, _too_many_bytes("head", num_header_bytes, self._limits))
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Rejected(
                400,
                f"{len(self.pipeline) + 1} requests would wait on this connection, at most "
                f"{MAX_PIPELINED} may wait.",
            )
        self._check_head()
        if self.parser.should_upgrade():
            self._check_upgrade()
        # A weak reference: a request must not keep its connection in memory.
        self.scope["abort_connection"] = partial(_abort, weakref.ref(self))  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._read_state = _ReadState.BODY
        # Start counting the body; the negative start value cancels the headers in this read.
        self._num_fed_bytes = -num_header_bytes
        # Drop trailers instead of treating them as headers, because a proxy in front did not check
        # them.
        self.headers = []
        if self.scope["http_version"] != "1.1":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign, assignment]
        if not self._has_pending_response():
            self._responding = self.cycle

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._read_state = _ReadState.IDLE
        self.deadline_s = math.inf
        if self.cycle.response_complete:
            # uvicorn stopped its idle timer when the rest of the body arrived.
            self.deadline_s = self.loop.time() + self.timeout_keep_alive

    # Calls from a response, and from the server

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._responding = self.pipeline[-1][0]
        super().on_response_complete()

    def shutdown(self) -> None:
        super().shutdown()
        if self._read_state is _ReadState.DROPPED and not self._has_pending_response():
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. A connection with unsent output is not idle."""
        if self._has_unsent():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def expire(self) -> None:
        """Handle `deadline_s`: close or reject the connection, or set a new deadline."""
        if self._is_half_closed:
            self._probe()
        elif self._input:
            # The server itself delays the request, so extend the deadline.
            self.deadline_s = self.loop.time() + self._limits.request_header_timeout_s
        elif self._is_over() and self._has_unsent():
            self.deadline_s = self.loop.time() + LINGER_S
        elif self.transport.is_closing() or self._read_state is _ReadState.DROPPED:
            self.transport.abort()
        elif self._read_state is _ReadState.BODY:
            self._expire_body()
        elif self._has_pending_response():
            # The client waits for a response before it sends more, so extend the deadline.
            self.deadline_s = self.loop.time() + self._limits.request_header_timeout_s
        elif self._read_state is _ReadState.HEADERS:
            self._reject(
                Fault(
                    408,
                    "The headers of the request were not complete after "
                    f"{self._limits.request_header_timeout_s:g} s.",
                )
            )
        else:
            self.transport.close()

    def expire_response(self) -> None:
        """Handle `read_deadline_s`: close the connection unless the transport's write buffer is
        empty, or the client has read MIN_READ_BYTES since the deadline was set."""
        num_unread = num_unread_bytes(self.transport)
        if not self.transport.get_write_buffer_size():
            self.read_deadline_s = math.inf
        elif self._num_unread_bytes - num_unread < MIN_READ_BYTES:
            self.transport.abort()
            self.read_deadline_s = math.inf
        else:
            self._set_read_deadline()

    def _set_read_deadline(self) -> None:
        self.read_deadline_s = self.loop.time() + UNREAD_TIMEOUT_S
        self._num_unread_bytes = num_unread_bytes(self.transport)

    def _expire_body(self) -> None:
        now_s = self.loop.time()
        cycle = self.cycle
        if self.flow.read_paused or cycle.waiting_for_100_continue or cycle is not self._responding:
            # The server itself is not reading the body, so restart the rate measurement.
            self._body_started_s = self._body_paid_s = now_s
            self.deadline_s = now_s + self._limits.request_body_timeout_s
            return
        self._reject(
            Fault(
                408,
                f"After {now_s - self._body_started_s:.1f} s, {self._num_body_bytes} bytes of the "
                "body have arrived; the client must send data every "
                f"{self._limits.request_body_timeout_s:g} s, and after that time at least "
                f"{MIN_BODY_BYTES_PER_S} a second.",
            )
        )

    def _is_over(self) -> bool:
        """Whether the connection is closing, or no request on it is being read or answered. The
        client may still be reading a response."""
        return self.transport.is_closing() or (
            self._read_state in (_ReadState.IDLE, _ReadState.DROPPED)
            and not self._has_pending_response()
        )

    def _has_unsent(self) -> bool:
        """Whether a part of a response is unsent. If so, sets `read_deadline_s` unless it is
        set already; see `expire_response`."""
        if not self.transport.get_write_buffer_size():
            return False
        if self.read_deadline_s == math.inf:
            self._set_read_deadline()
        return True

    def _has_pending_response(self) -> bool:
        return self._responding is not None and not self._responding.response_complete

    def _check_head(self) -> None:
        """Reject a request with a version other than 1.0 and 1.1, without the Host header that
        HTTP/1.1 requires, with several Host headers, or with a transfer coding other than chunked,
        which httptools ignores."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise _Rejected(400, f"The request is HTTP/{version}; send it as HTTP/1.1.")
        num_hosts, codings = 0, []
        for name, value in self.headers:
            if name == b"host":
                num_hosts += 1
            elif name == b"transfer-encoding":
                codings.append(value)
        if num_hosts > 1 or (not num_hosts and version == "1.1"):
            raise _Rejected(
                400, f"The request has {num_hosts} Host headers, HTTP/1.1 requires exactly 1."
            )
        coding = b", ".join(codings).strip().lower()
        if codings and coding != b"chunked":
            raise _Rejected(
                400,
                f"The transfer encoding of the body is {coding[:40].decode('latin-1')!r}, only "
                "'chunked' is supported.",
            )

    def _check_upgrade(self) -> None:
        """Reject an upgrade request with a body: httptools would parse the body as the next
        request."""
        headers = dict(self.headers)
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            protocol = headers.get(b"upgrade", b"")[:40].decode("latin-1")
            raise _Rejected(
                400,
                f"The request has a body and offers an upgrade to {protocol!r}; send it as "
                "HTTP/1.1 without that offer.",
            )

    def _check_framing(self) -> bool:
        num_framing = self._num_fed_bytes - self._num_body_bytes
        max_framing = self._limits.h11_max_incomplete_event_size
        max_framing += MAX_FRAMING_PER_BODY_BYTE * self._num_body_bytes
        if num_framing > max_framing:
            self._reject(
                Fault(
                    400,
                    f"The body has {num_framing} bytes of chunk headers for "
                    f"{self._num_body_bytes} bytes of data, at most {max_framing} are allowed.",
                )
            )
        return num_framing <= max_framing

    def _extend_body_deadline(self, num_new: int) -> None:
        """Extend the deadline for `num_new` received body bytes. The credit does not accumulate:
        after a burst, the client may not send slowly for hours."""
        paid_s = self._body_paid_s + num_new / MIN_BODY_BYTES_PER_S
        self._body_paid_s = min(self.loop.time(), paid_s)
        self.deadline_s = self._body_paid_s + self._limits.request_body_timeout_s

    def _reject(self, fault: Fault) -> None:
        """Respond with `fault` and drop further input. If earlier responses are pending, complete
        them instead and do not send `fault`; in the body of a request that cannot get a status any
        more, abort the connection."""
        self._log_rejection(fault)
        if self.transport.is_closing():
            return
        reading_cycle = self.cycle if self._read_state is _ReadState.BODY else None
        if reading_cycle is None and self._has_pending_response():
            self._drop_input()
            return
        if reading_cycle is not None and (
            reading_cycle.response_started or reading_cycle is not self._responding
        ):
            # The response has started, or an earlier response is pending: no status can be sent.
            self.transport.abort()
            return
        if reading_cycle is not None:
            # The request's handler is waiting for the body and must not respond too.
            reading_cycle.disconnected = True
            reading_cycle.message_event.set()
        self._read_state = _ReadState.DROPPED
        self.deadline_s = self.loop.time() + LINGER_S
        self._unset_keepalive_if_required()
        self.transport.write(_response(fault, self.server_state.default_headers))
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):
                self.transport.write_eof()
        self.flow.resume_reading()

    def _log_rejection(self, fault: Fault) -> None:
        """Log a rejected request, at most once in REJECTION_LOG_S: a client may send only such
        requests, and --disable-access-log does not suppress these lines."""
        config, now_s = self._http_config, self.loop.time()
        config.num_rejected += 1
        if now_s - config.logged_rejection_s >= REJECTION_LOG_S:
            config.logged_rejection_s = now_s
            logger.info(
                "Rejected a request from %s, %d so far: %s",
                self._peer(),
                config.num_rejected,
                fault.message,
            )

    def _reject_connection(self) -> None:
        num_open, max_connections = len(self.connections) - 1, self._http_config.max_connections
        self._http_config.warn_full(num_open)
        message = f"{num_open} connections are open, at most {max_connections} are allowed."
        fault = Fault(503, message, "server_overloaded", headers={"Retry-After": "1"})
        self._read_state = _ReadState.DROPPED
        self.transport.write(_response(fault, self.server_state.default_headers))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._reject(Fault(400, msg))

    def _drop_input(self) -> None:
        """Ignore further requests; close the connection after the pending responses."""
        self._read_state = _ReadState.DROPPED
        self.deadline_s = math.inf
        self.cycle.keep_alive = False

    def _probe(self) -> None:
        """Determine whether the client has closed its socket or only its sending side. Both look
        the same here, but a closed socket answers data with a reset. So send bytes of the response
        that are known in advance: bytes of the status line, or a leading zero of the next chunk
        size."""
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
        if not isinstance(responding.transport, _PartialStatusLine):
            responding.transport = _PartialStatusLine(self.transport)  # type: ignore[assignment]
        responding.transport.send_byte()  # type: ignore[attr-defined]

    def _is_reset(self) -> bool:
        sock = self.transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            # On a Unix socket, a write to a closed peer fails and ends the connection.
            return False
        with contextlib.suppress(OSError):
            state: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            return state == _TCP_CLOSE
        return True

    def _peer(self) -> str:
        return self.client[0] if self.client else "-"


def _abort(connection: "weakref.ref[HttpProtocol]") -> None:
    if protocol := connection():
        protocol.transport.abort()


def num_unread_bytes(transport: asyncio.Transport) -> int:
    """Number of written bytes that the client has not received. Some MiB of them may be in the
    kernel's buffer, which accepts more only when a third of it is free."""
    count = array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
    return transport.get_write_buffer_size() + count[0]


def _too_many_bytes(what: str, num_bytes: int, limits: ServerConfig) -> str:
    most = limits.h11_max_incomplete_event_size
    return (
        f"The request has a {what} of at least {num_bytes} bytes, at most {most} are allowed "
        "(--h11-max-incomplete-event-size)."
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
    """`cycle.send` for HTTP/1.0 clients: a body without content-length ends with the connection."""
    send = cycle.send
    ends_with_connection = False

    async def send_without_chunks(message: Message) -> None:
        nonlocal ends_with_connection
        if message["type"] == "http.response.start":
            headers = [
                header
                for header in message.get("headers", ())
                if header[0].lower() != b"connection"
            ]
            message["headers"] = [*headers, (b"connection", b"close")]
            if all(name.lower() != b"content-length" for name, _ in headers):
                ends_with_connection = True
                cycle.chunked_encoding = False
        elif ends_with_connection:
            # uvicorn compares the body with the declared length.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cast(Any, message))

    return send_without_chunks

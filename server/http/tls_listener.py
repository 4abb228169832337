"""Listener for TLS connections. Handshakes in progress count as connections."""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable, Iterator

from uvicorn.server import ServerState

from config.log import LimitedWarning
from server.http.pacing import LoopPacer
from server.http.protocol import (
    ACCEPTS_PER_ITERATION,
    TLS_HANDSHAKE,
    HttpConfig,
    HttpProtocol,
)
from server.http.tls import Tls

logger = logging.getLogger(__name__)

ACCEPT_RETRY_S = 1.0
"""Delay before the next attempt if no socket can be opened."""
MIN_HANDSHAKE_S = 1.0
"""Minimum timeout for the rest of a handshake after the ClientHello."""
MAX_SECOND_HELLOS = 8
"""Maximum handshakes in progress that may need a second ClientHello. OpenSSL processes each second
ClientHello on the event loop in 0.3 to 5 ms, depending on the key; the limit bounds how many can
arrive at once."""
MAX_HELLO_BYTES = 2**14
"""Maximum bytes of a ClientHello that are examined; a typical ClientHello has at most 2 KiB."""
_METHOD = re.compile(rb"[A-Z]{3,} ")
"""Start of an HTTP request without TLS."""
_SUPPORTED_GROUPS, _SUPPORTED_VERSIONS, _KEY_SHARE = 10, 43, 51
_CLASSIC_GROUPS = {23, 24, 25, 29, 30}
"""P-256, P-384, P-521, X25519 and X448, whose key shares OpenSSL 1.1.1 and newer accept."""
_X25519_MLKEM768 = 4588
"""OpenSSL 3.5 and newer request a key share of this group from clients that support the group."""


class TlsListener:
    """Accepts TLS connections on `sock` until `close`. At the connection limit, new connections are
    closed without a response, which would need a handshake. Replaces asyncio's server, which
    reports a connection only after its handshake."""

    def __init__(
        self,
        sock: socket.socket,
        tls: Tls,
        config: HttpConfig,
        server_state: ServerState,
        make_protocol: Callable[[], HttpProtocol],
    ) -> None:
        self._sock = sock
        self._tls = tls
        self._config = config
        self._server_state = server_state
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        # A single handshake in an iteration: with an RSA key of 4096 bits it takes 3.5 ms.
        self._pacer = LoopPacer(1)
        self._without_tls = LimitedWarning(
            logger,
            "A request from %s came without TLS, %d so far: this port serves HTTPS only, use an "
            "https:// address",
        )
        self._second_hellos = asyncio.Semaphore(MAX_SECOND_HELLOS)
        self._handshakes: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        sock.listen(config.backlog)
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting, and cancel all handshakes."""
        for task in [self._accepting, *self._handshakes]:
            task.cancel()

    async def wait_closed(self) -> None:
        """After `close`, wait for all handshakes to end."""
        await asyncio.wait([self._accepting, *self._handshakes])

    @property
    def num_open(self) -> int:
        """Number of connections, including handshakes in progress."""
        return len(self._server_state.connections) + len(self._handshakes)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._sock)
            except ConnectionAbortedError:
                continue
            except OSError:
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._admit(connection)
            # OSError: no further connection waits; other errors recur in `sock_accept`.
            with contextlib.suppress(OSError):
                for _ in range(ACCEPTS_PER_ITERATION - 1):
                    self._admit(self._sock.accept()[0])

    def _admit(self, connection: socket.socket) -> None:
        if self.num_open >= self._config.max_connections:
            self._config.warn_full(self.num_open)
            connection.close()
            return
        connection.setblocking(False)
        handshake = self._loop.create_task(self._connect(connection))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _connect(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeout_s = self._config.limits.request_header_timeout_s
        end_s = self._loop.time() + timeout_s
        async with contextlib.AsyncExitStack() as slots:
            try:
                # Many ClientHellos may arrive in the same iteration of the event loop.
                hello = await asyncio.wait_for(self._hello(connection), timeout_s)
                if _METHOD.match(hello):
                    self._without_tls.add(_address_of(connection))
                await self._pacer.wait(_address_of(connection))
                if may_need_second(hello):
                    slot = slots.enter_async_context(self._second_hellos)
                    await asyncio.wait_for(slot, end_s - self._loop.time())
            except (OSError, asyncio.TimeoutError):
                connection.close()
                return
            except asyncio.CancelledError:
                connection.close()
                raise
            # OSError: the client disconnects, is too slow or does not speak TLS.
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(
                    self._make_protocol,
                    connection,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=max(MIN_HANDSHAKE_S, end_s - self._loop.time()),
                )

    async def _hello(self, connection: socket.socket) -> bytes:
        """Peek at the first bytes of a connection, normally a ClientHello, without consuming them.
        Returns a part of the ClientHello if it is longer than MAX_HELLO_BYTES, if the client closes
        the connection, or if a Unix socket has only a part, because Unix sockets ignore
        SO_RCVLOWAT."""
        num_awaited = 1
        try:
            while True:
                await self._readable(connection)
                hello = connection.recv(MAX_HELLO_BYTES, socket.MSG_PEEK)
                num_bytes = _num_hello_bytes(hello)
                if len(hello) >= num_bytes or len(hello) < num_awaited:
                    return hello
                # Let the kernel wait for the rest: polling for thousands of clients would saturate
                # the event loop.
                num_awaited = num_bytes
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_awaited)
        finally:
            if num_awaited > 1:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    async def _readable(self, connection: socket.socket) -> None:
        is_readable = asyncio.Event()
        self._loop.add_reader(connection, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            self._loop.remove_reader(connection)


def _address_of(connection: socket.socket) -> str:
    name = connection.getpeername()
    return str(name[0]) if isinstance(name, tuple) else ""


def _num_hello_bytes(data: bytes) -> int:
    """Number of bytes up to the end of the ClientHello, at most MAX_HELLO_BYTES; 0 if `data`, the
    first bytes of a connection, does not start a handshake. While `data` has fewer than 9 bytes,
    the result is 9, the size of the headers that contain the length."""
    if not data.startswith(TLS_HANDSHAKE):
        return 0
    num_bytes = 9 + int.from_bytes(data[6:9], "big") if len(data) >= 9 else 9
    return min(num_bytes, MAX_HELLO_BYTES)


def may_need_second(hello: bytes) -> bool:
    """Whether the server may answer a ClientHello (RFC 8446, section 4.1.2) with a
    HelloRetryRequest, after which the client sends a second ClientHello. True if `hello` cannot be
    parsed: split into several records, longer than MAX_HELLO_BYTES, or malformed."""
    try:
        extensions = dict(_extensions(hello))
        if _SUPPORTED_VERSIONS not in extensions:
            # TLS 1.2 has no second ClientHello.
            return False
        groups = extensions.get(_SUPPORTED_GROUPS, b"")[2:]
        supported = {int.from_bytes(groups[at : at + 2], "big") for at in range(0, len(groups), 2)}
        shared = {group for group, _ in _entries(extensions.get(_KEY_SHARE, b"")[2:])}
    except ValueError:
        return True
    needs_mlkem = _X25519_MLKEM768 in supported and _X25519_MLKEM768 not in shared
    return needs_mlkem or not shared & _CLASSIC_GROUPS


def _extensions(hello: bytes) -> Iterator[tuple[int, bytes]]:
    """Types and contents of the extensions of `hello`. Raises ValueError unless `hello` is exactly
    one record with a well-formed ClientHello."""
    num_record_bytes, num_bytes = (int.from_bytes(hello[a:b], "big") for a, b in ((3, 5), (6, 9)))
    if not len(hello) - 5 == num_record_bytes == 4 + num_bytes:
        raise ValueError
    # Headers of the record (5) and of the message (4), version (2), random (32).
    position = 43
    # Session id, cipher suites and compression methods: a length of 1, 2 and 1 bytes before each.
    for num_length_bytes in (1, 2, 1):
        end = position + num_length_bytes
        position = end + int.from_bytes(hello[position:end], "big")
    if position > len(hello):
        raise ValueError
    yield from _entries(hello[position + 2 :])


def _entries(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Entries (type, content) of a list, encoded as a type of 2 bytes, a length of 2 bytes, and the
    content. Raises ValueError if the last entry is truncated."""
    position = 0
    while position < len(data):
        begin = position + 4
        position = begin + int.from_bytes(data[position + 2 : begin], "big")
        if position > len(data):
            raise ValueError
        yield int.from_bytes(data[begin - 4 : begin - 2], "big"), data[begin:position]

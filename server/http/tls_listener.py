"""Listener for TLS connections. Handshakes in progress count as connections."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from uvicorn.server import ServerState

from server.http.pacing import LoopPacer
from server.http.protocol import HttpConfig, HttpProtocol
from server.http.tls import Tls

ACCEPT_RETRY_S = 1.0
"""Time until the next attempt when the system cannot open a further socket."""
MIN_HANDSHAKE_S = 1.0
"""Minimum time of a handshake whose hello has arrived."""
MAX_HELLO_BYTES = 2**14
"""Part of a client's hello that must have arrived before the handshake starts; usually it has 2 KiB
at most."""
PARTIAL_HELLO_S = 0.05
"""Interval of checks for the rest of a hello."""
_HANDSHAKE_RECORD = 22


class TlsListener:
    """Accepts TLS connections on `sock` until `close`. At the connection limit it closes a new
    connection without a response, which would need a handshake.

    Not asyncio's server, which reports a connection only after its handshake.
    """

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
        self._pacer = LoopPacer()
        self._handshakes: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        sock.listen(config.backlog)
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting, and cancel all handshakes."""
        for task in [self._accepting, *self._handshakes]:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until handshakes have ended, after `close`."""
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
            if self.num_open >= self._config.max_connections:
                self._config.warn_full(self.num_open)
                connection.close()
                continue
            handshake = self._loop.create_task(self._connect(connection))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _connect(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeout_s = self._config.limits.request_header_timeout_s
        end_s = self._loop.time() + timeout_s
        try:
            # The hellos of many clients may arrive in the same iteration of the event loop.
            await asyncio.wait_for(self._hello_arrives(connection), timeout_s)
            await self._pacer.wait(_address_of(connection))
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

    async def _hello_arrives(self, connection: socket.socket) -> None:
        is_readable = asyncio.Event()
        self._loop.add_reader(connection, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            self._loop.remove_reader(connection)
        while not _has_hello(connection.recv(MAX_HELLO_BYTES, socket.MSG_PEEK)):  # noqa: ASYNC110
            await asyncio.sleep(PARTIAL_HELLO_S)


def _has_hello(data: bytes) -> bool:
    """Whether `data`, the first bytes of a connection, include the client's whole hello, or begin
    no handshake."""
    if not data or data[0] != _HANDSHAKE_RECORD:
        return True
    num_bytes = 9 + int.from_bytes(data[6:9], "big") if len(data) >= 9 else 9
    return len(data) >= min(num_bytes, MAX_HELLO_BYTES)


def _address_of(connection: socket.socket) -> str:
    name = connection.getpeername()
    return str(name[0]) if isinstance(name, tuple) else ""

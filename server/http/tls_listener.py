"""Listener for TLS connections. Handshakes in progress count as connections."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from uvicorn.server import ServerState

from server.http.protocol import HttpConfig, HttpProtocol
from server.http.tls import Tls

ACCEPT_RETRY_S = 1.0
"""Time until the next attempt when the system cannot open a further socket."""


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
        # OSError: the client disconnects, is too slow or does not speak TLS.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._tls.context,
                ssl_handshake_timeout=self._config.limits.request_header_timeout_s,
            )

"""ZmqClient: EngineClient with the engine in another process."""

import asyncio
from collections.abc import Callable

from engine.client.base import SingleEngineClient
from engine.client.queue_limits import QueueLimits
from engine.client.state import Failure
from engine.transport.channels import (
    RouterSocket,
    ZmqContext,
    process_of,
    rejection_warning,
)
from engine.transport.messages import FromEngine, Hello, Ready, ToEngine

SOCKETS_PER_ENGINE = 2
"""Connections per engine: a receiving and a sending socket."""

DISCONNECTED = "the engine has disconnected"
DISCONNECT_GRACE_S = 1.0
"""Wait after a disconnect for a more precise reason (the exit code)."""


class ZmqClient(SingleEngineClient):
    """EngineClient over a request channel. Belongs to a single asyncio loop."""

    def __init__(
        self,
        endpoint: str,
        index: int,
        limits: QueueLimits,
        *,
        token: str,
        engine: int = 0,
        restart: int = 0,
    ) -> None:
        """`index`: number of this front end, which listens at `endpoint` for engine `engine`; the
        engine presents `token`. The other arguments are documented in SingleEngineClient."""
        super().__init__(index, limits, engine=engine, restart=restart)
        self._endpoint = endpoint
        self._context = ZmqContext(token)
        self._rejected = rejection_warning(endpoint)
        self._on_rejected_peer: Callable[[], None] = lambda: None
        self._socket: RouterSocket[ToEngine, FromEngine] | None = None
        self._engine: bytes | None = None
        self._early_ready: Ready | None = None

    async def start(self) -> None:
        """Listen for the engine. Raises ConfigError when the address is not available."""
        # Once the engine has connected, accept no other connections, unless a restarted engine may
        # connect later.
        num_peers = 0 if self._resumes else SOCKETS_PER_ENGINE
        self._socket = self._context.bind_router(self._endpoint, FromEngine, num_peers=num_peers)
        self._socket.listen(self._receive_from, self._on_disconnect, self._reject)

    def on_rejected_peer(self, observe: Callable[[], None]) -> None:
        """Call `observe` for each rejected connection."""
        self._on_rejected_peer = observe

    async def close(self) -> None:
        self.fail("the client was closed")
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._context.close()

    def _send(self, message: ToEngine) -> bool:
        return (
            self._socket is not None
            and self._engine is not None
            and self._socket.send(self._engine, message)
        )

    def _receive_from(self, peer: bytes, message: FromEngine) -> None:
        if isinstance(message, Hello):
            if self._resumes and self._engine not in (None, peer):
                # The engine was restarted before this process noticed the disconnect.
                self._lose_engine()
            # The engine sends Hello on its receiving socket; its other socket only sends.
            self._engine, self.pid = peer, message.pid
        elif isinstance(message, Ready):
            self._early_ready = message
        else:
            self._receive(message)
            return
        if self._engine is not None and self._early_ready is not None:
            self._receive(self._early_ready)

    def _reject(self) -> None:
        self._rejected.add()
        self._on_rejected_peer()

    def _on_disconnect(self, peer: bytes) -> None:
        failure = Failure(DISCONNECTED, is_external=None)
        # An engine that was never ready is not restarted.
        if not self._resumes or self.ready is None:
            asyncio.get_running_loop().call_later(DISCONNECT_GRACE_S, self._lose, failure)
        elif self._engine is None or process_of(peer) == process_of(self._engine):
            self._lose_engine()

    def _lose_engine(self) -> None:
        # A restarted engine sends Hello and Ready again.
        self._engine = self._early_ready = None
        self._stop_reloading()
        self._lose(Failure(DISCONNECTED, is_external=None))

"""FairSlots: slots for concurrent work that clients share fairly. For a single event loop."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from config.errors import Overloaded


class FairSlots:
    """Slots for concurrent work, `total` in all and at most `per_client` for each client. A free
    slot goes to the client with the fewest slots; clients with equally many slots alternate, and a
    new client comes last. A client's requests are served in order of arrival.

    Waiting work is limited in number, and waiting and running work in bytes. When a limit is
    reached, a client may still add work up to its share, the limit divided by the number of clients
    with work, so that a client that fills the queue does not lock out other clients.
    """

    def __init__(
        self, nouns: str, *, total: int, per_client: int, max_waiting: int, max_bytes: int = 0
    ) -> None:
        """`nouns`: plural name of the work, for error messages. `max_bytes`: limit on the bytes of
        work that waits or runs; 0 if bytes are not counted."""
        self._nouns = nouns
        self._num_free = total
        self._per_client = per_client
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        """Clients with work, in the order of their turns: new clients and the client with the most
        recent slot are at the end."""
        self._num_waiting = 0
        self._num_bytes = 0

    @asynccontextmanager
    async def hold(self, client: str, num_bytes: int = 0) -> AsyncIterator[None]:
        """Wait for a slot, and keep it until the context ends. Raises Overloaded if a limit is
        exceeded."""
        self._check(client, num_bytes)
        entry = self._clients.setdefault(client, _Client())
        entry.num_bytes += num_bytes
        self._num_bytes += num_bytes
        turn = asyncio.get_running_loop().create_future()
        entry.waiting.append(turn)
        self._num_waiting += 1
        try:
            self._serve()
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                entry.num_running -= 1
                self._num_free += 1
            elif turn in entry.waiting:
                entry.waiting.remove(turn)
                self._num_waiting -= 1
            entry.num_bytes -= num_bytes
            self._num_bytes -= num_bytes
            is_idle = not entry.waiting and not entry.num_running
            # If several requests are cancelled at once, the first one removes their client.
            if is_idle and self._clients.get(client) is entry:
                del self._clients[client]
            self._serve()

    def _serve(self) -> None:
        while self._num_free:
            ready = [
                (entry.num_running, name)
                for name, entry in self._clients.items()
                if entry.waiting and entry.num_running < self._per_client
            ]
            if not ready:
                return
            # `min` returns the first of several minimal clients.
            name = min(ready, key=lambda pair: pair[0])[1]
            self._clients.move_to_end(name)
            entry = self._clients[name]
            turn = entry.waiting.popleft()
            self._num_waiting -= 1
            # A turn can be cancelled before its task has removed it from the queue.
            if not turn.cancelled():
                entry.num_running += 1
                self._num_free -= 1
                turn.set_result(None)

    def _check(self, client: str, num_bytes: int) -> None:
        entry = self._clients.get(client) or _Client()
        num_clients = len(self._clients) + (client not in self._clients)
        for own, added, whole, limit, what in (
            (
                len(entry.waiting),
                1,
                self._num_waiting,
                self._max_waiting,
                f"{self._nouns} of this client wait",
            ),
            (
                *(entry.num_bytes, num_bytes, self._num_bytes, self._max_bytes),
                f"bytes of {self._nouns} of this client wait or run",
            ),
        ):
            share = max(1, limit // num_clients)
            if whole + added > limit and own + added > share:
                raise Overloaded(
                    f"{own} {what} and {added} would be added, at most {share} are allowed"
                )


class _Client:
    __slots__ = ("num_bytes", "num_running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.num_running = 0
        self.num_bytes = 0

"""Accounts for the memory of decoded request bodies, from before their decoding until they are
freed."""

import asyncio
import contextlib
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection

from config.errors import Overloaded
from server.http.json_decoder import MAX_OBJECTS, MAX_VALUES

VALUE_BYTES = 48
"""Assumed memory of a decoded value beyond its text; an integer in a list takes 40 bytes."""
OBJECT_BYTES = 192
"""Assumed memory of a decoded list or object beyond its values."""
KEY_BYTES = 64
"""Assumed memory of an entry of an object beyond the text of its key and its value."""
MAX_VALUES_BYTES = VALUE_BYTES * MAX_VALUES + (OBJECT_BYTES + KEY_BYTES) * MAX_OBJECTS
"""Maximum memory beyond the text of a body that the decoder accepts. `decoded_bytes` also counts
commas, colons and brackets inside strings."""
MAX_OVERCOMMIT = 2
"""Clients below their share may raise the memory of all bodies to this multiple of the limit."""
MAX_WAIT_S = 30.0
"""Maximum time that a body waits until other bodies free memory."""
MAX_WAITING = 4_096
"""Maximum number of bodies of a client that wait. Freed memory is offered to each of them, which
takes 1 ms for this number."""


def decoded_bytes(data: bytes) -> int:
    """Estimated memory of the JSON in `data` once decoded. Commas, colons and brackets inside
    strings count too, which adds half or more to the estimate for ordinary text."""
    num_objects = data.count(b"{") + data.count(b"[")
    num_values, num_keys = data.count(b","), data.count(b":")
    num_bytes = VALUE_BYTES * num_values + KEY_BYTES * num_keys + OBJECT_BYTES * num_objects
    return len(data) + num_bytes


def memory_of(value: object) -> int:
    """Estimated memory of a decoded value. Takes up to 0.5 us for each value in it."""
    num_bytes = 0
    pending: list[Collection[object]] = [[value]]
    while pending:
        container = pending.pop()
        num_bytes += OBJECT_BYTES + VALUE_BYTES * len(container)
        if isinstance(container, dict):
            num_bytes += KEY_BYTES * len(container) + sum(map(sys.getsizeof, container))
            container = container.values()
        for entry in container:
            if isinstance(entry, (dict, list, tuple)):
                pending.append(entry)
            elif isinstance(entry, str):
                num_bytes += sys.getsizeof(entry)
    return num_bytes


class HeldBody:
    """Accounted memory of a decoded body, until `free` is called or this object is deleted."""

    __slots__ = ("_on_freed", "num_bytes")

    def __init__(self, num_bytes: int, on_freed: Callable[[int], None]) -> None:
        """`on_freed` is called with the number of freed bytes, on any thread."""
        self.num_bytes = num_bytes
        self._on_freed = on_freed

    def free(self, left: int = 0) -> None:
        """Reduce the accounted memory to `left` bytes."""
        if left < self.num_bytes:
            freed, self.num_bytes = self.num_bytes - left, left
            self._on_freed(freed)

    def __del__(self) -> None:
        self.free()


NOT_HELD = HeldBody(0, lambda freed: None)
"""Placeholder for a body that was not received over HTTP."""


class HeldBodies:
    """Limits the memory of all decoded bodies. Bodies wait for memory, and get a 503 after a
    timeout. When the limit is reached, a client may still hold bodies up to its share, the limit
    divided by the number of clients with bodies, so that a client that fills the memory does not
    lock out other clients."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._of_client: dict[str, int] = {}
        """Accounted memory of each client that has bodies."""
        # A deque, to which threads can append without a lock.
        self._freed: deque[tuple[str, int]] = deque()
        self._waiting: dict[asyncio.Future[None], tuple[str, int, int]] = {}
        """Bodies that wait, in the order of their arrival: client, size and limit."""
        self._num_waiting = Counter[str]()
        """Number of waiting bodies of each client that has any."""
        self._is_scheduled = False
        """Whether `_admit` will run."""

    @property
    def num_bytes(self) -> int:
        """Accounted memory of all bodies."""
        while self._freed:
            client, freed = self._freed.popleft()
            self._num_bytes -= freed
            self._of_client[client] -= freed
            if not self._of_client[client]:
                del self._of_client[client]
        return self._num_bytes

    async def hold(self, num_bytes: int, max_bytes: int, client: str = "") -> HeldBody:
        """Wait until a body of `num_bytes` fits into `max_bytes` together with all other bodies, or
        into the share of `client` and MAX_OVERCOMMIT times `max_bytes`, or until there is no other
        body, and account for it. Raises Overloaded after MAX_WAIT_S, and at once if MAX_WAITING
        bodies of the client wait."""
        loop = asyncio.get_running_loop()

        def on_freed(freed: int) -> None:
            self._freed.append((client, freed))
            # Many bodies may be freed in the same iteration of the event loop.
            if self._waiting and not self._is_scheduled:
                self._is_scheduled = True
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(self._admit)

        if not self._take((client, num_bytes, max_bytes), self._num_clients(client)):
            if self._num_waiting[client] >= MAX_WAITING:
                raise Overloaded(
                    f"{self._num_waiting[client]} bodies of this client wait for memory, at most "
                    f"{MAX_WAITING} are allowed"
                )
            turn = loop.create_future()
            self._waiting[turn] = client, num_bytes, max_bytes
            self._num_waiting[client] += 1
            try:
                # `wait_for` may raise TimeoutError (from Python 3.12), or not raise CancelledError
                # (before 3.12), if `turn` is done in the same iteration.
                await asyncio.wait([turn], timeout=MAX_WAIT_S)
            except asyncio.CancelledError:
                if turn.done():
                    on_freed(num_bytes)
                raise
            finally:
                self._waiting.pop(turn, None)
                self._num_waiting[client] -= 1
                if not self._num_waiting[client]:
                    del self._num_waiting[client]
            if not turn.done():
                raise Overloaded(
                    f"the bodies of running requests take {self._num_bytes} bytes and this body "
                    f"takes {num_bytes}, at most {max_bytes} are allowed"
                )
        return HeldBody(num_bytes, on_freed)

    def _take(self, body: tuple[str, int, int], num_clients: int) -> bool:
        """Account for a body, if there is memory for it."""
        client, num_bytes, max_bytes = body
        num_total, own = self.num_bytes, self._of_client.get(client, 0)
        fits = not num_total or num_total + num_bytes <= max_bytes
        is_in_share = own + num_bytes <= max_bytes // num_clients
        if not (fits or (is_in_share and num_total + num_bytes <= MAX_OVERCOMMIT * max_bytes)):
            return False
        self._num_bytes += num_bytes
        if num_bytes:
            self._of_client[client] = own + num_bytes
        return True

    def _num_clients(self, *more: str) -> int:
        """Number of distinct clients that have or wait for memory, including `more`."""
        return len({*more, *self._of_client, *self._num_waiting})

    def _admit(self) -> None:
        """Account for the waiting bodies for which there is memory, and end their waits."""
        # Cleared first: what threads free from now on is for the next call.
        self._is_scheduled = False
        num_clients = self._num_clients()
        for turn, body in list(self._waiting.items()):
            if self._take(body, num_clients):
                del self._waiting[turn]
                turn.set_result(None)

"""Memory of decoded request bodies, from decoding until only the prompt is left of the body."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from config.errors import Overloaded

VALUE_BYTES = 48
"""Assumed memory of a decoded value in addition to its text; integers take 36 bytes."""
OBJECT_BYTES = 192
"""Assumed memory of a decoded list or object in addition to its values."""
MAX_WAIT_S = 30.0
"""Maximum wait of a body for the memory of other bodies."""


def decoded_bytes(data: bytes) -> int:
    """Estimated memory of the decoded JSON of a part of a body. Commas and brackets within strings
    count too: an ordinary text counts half more."""
    num_objects = data.count(b"{") + data.count(b"[")
    return len(data) + VALUE_BYTES * data.count(b",") + OBJECT_BYTES * num_objects


class HeldBody:
    """The counted memory of a decoded body. It is freed by `free`, or when nothing refers to the
    body."""

    __slots__ = ("_on_freed", "num_bytes")

    def __init__(self, num_bytes: int, on_freed: Callable[[int], None]) -> None:
        """`on_freed` is called with freed bytes, on any thread."""
        self.num_bytes = num_bytes
        self._on_freed = on_freed

    def free(self, left: int = 0) -> None:
        """Count only `left` bytes from now on, if these are fewer."""
        if left < self.num_bytes:
            freed, self.num_bytes = self.num_bytes - left, left
            self._on_freed(freed)

    def __del__(self) -> None:
        self.free()


NOT_HELD = HeldBody(0, lambda freed: None)
"""A body that was not received."""


class HeldBodies:
    """Bounds the memory of all decoded bodies. Bodies wait for memory, then get a 503."""

    def __init__(self) -> None:
        self._num_bytes = 0
        # A deque and not a count: threads append to it without a lock.
        self._freed: deque[int] = deque()
        self._waiting: list[asyncio.Event] = []

    @property
    def num_bytes(self) -> int:
        """Memory of the bodies that are held."""
        while self._freed:
            self._num_bytes -= self._freed.popleft()
        return self._num_bytes

    async def hold(self, num_bytes: int, max_bytes: int) -> HeldBody:
        """Count a body of `num_bytes` when all bodies have at most `max_bytes` together, or when no
        other body is held. Raises Overloaded after MAX_WAIT_S."""
        loop = asyncio.get_running_loop()
        has_room = asyncio.Event()

        def on_freed(freed: int) -> None:
            self._freed.append(freed)
            for waiting in self._waiting:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(waiting.set)

        self._waiting.append(has_room)
        try:
            end_s = loop.time() + MAX_WAIT_S
            while self.num_bytes and self._num_bytes + num_bytes > max_bytes:
                has_room.clear()
                await asyncio.wait_for(has_room.wait(), end_s - loop.time())
        except asyncio.TimeoutError:
            raise Overloaded(
                f"the bodies of requests that have begun take {self._num_bytes} bytes and this "
                f"body takes {num_bytes}, at most {max_bytes} may"
            ) from None
        finally:
            self._waiting.remove(has_room)
        self._num_bytes += num_bytes
        return HeldBody(num_bytes, on_freed)

"""Accounts for the memory of decoded request bodies, from before their decoding until they are
freed."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from config.errors import Overloaded

VALUE_BYTES = 48
"""Assumed memory of a decoded value beyond its text; an integer in a list takes 40 bytes."""
OBJECT_BYTES = 192
"""Assumed memory of a decoded list or object beyond its values."""
KEY_BYTES = 64
"""Assumed memory of an entry of an object beyond the text of its key and its value."""
MAX_WAIT_S = 30.0
"""Maximum time that a body waits until other bodies free memory."""


def decoded_bytes(data: bytes) -> int:
    """Estimated memory of the JSON in `data` once decoded. Commas, colons and brackets inside
    strings count too, which adds half or more to the estimate for ordinary text."""
    num_objects = data.count(b"{") + data.count(b"[")
    num_values, num_keys = data.count(b","), data.count(b":")
    num_bytes = VALUE_BYTES * num_values + KEY_BYTES * num_keys + OBJECT_BYTES * num_objects
    return len(data) + num_bytes


class HeldBody:
    """Accounted memory of a decoded body, until `free` is called or the body is no longer
    referenced."""

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
    timeout."""

    def __init__(self) -> None:
        self._num_bytes = 0
        # A deque, to which threads can append without a lock.
        self._freed: deque[int] = deque()
        self._waiting: list[asyncio.Event] = []

    @property
    def num_bytes(self) -> int:
        """Accounted memory of all bodies."""
        while self._freed:
            self._num_bytes -= self._freed.popleft()
        return self._num_bytes

    async def hold(self, num_bytes: int, max_bytes: int) -> HeldBody:
        """Wait until a body of `num_bytes` fits into `max_bytes` together with all other bodies, or
        until there is no other body, and account for it. Raises Overloaded after MAX_WAIT_S."""
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
                f"the bodies of running requests take {self._num_bytes} bytes and this body takes "
                f"{num_bytes}, at most {max_bytes} are allowed"
            ) from None
        finally:
            self._waiting.remove(has_room)
        self._num_bytes += num_bytes
        return HeldBody(num_bytes, on_freed)

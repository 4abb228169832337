"""Memory of decoded request bodies, from decoding until only the prompt is left of the body."""

import asyncio
from collections import deque

from config.errors import Overloaded

VALUE_BYTES = 48
"""Assumed memory of a decoded value in addition to its text; integers take 36 bytes."""
OBJECT_BYTES = 192
"""Assumed memory of a decoded list or object in addition to its values."""
MAX_WAIT_S = 30.0
"""Maximum wait of a body for the memory of other bodies."""
POLL_S = 0.02


def decoded_bytes(data: bytes) -> int:
    """Estimated memory of the decoded JSON of a part of a body. Characters in strings count as
    values: an ordinary text counts a tenth more."""
    num_objects = data.count(b"{") + data.count(b"[")
    return len(data) + VALUE_BYTES * data.count(b",") + OBJECT_BYTES * num_objects


class HeldBody:
    """The counted memory of a decoded body. It is freed by `free`, or when nothing refers to the
    body."""

    __slots__ = ("_freed", "num_bytes")

    def __init__(self, num_bytes: int, freed: deque[int]) -> None:
        """`freed` gets the bytes that are no longer held."""
        self.num_bytes = num_bytes
        self._freed = freed

    def free(self, left: int = 0) -> None:
        """Count only `left` bytes from now on, if these are fewer."""
        if left < self.num_bytes:
            self._freed.append(self.num_bytes - left)
            self.num_bytes = left

    def __del__(self) -> None:
        self.free()


class HeldBodies:
    """Bounds the memory of all decoded bodies. Bodies wait for memory, then get a 503."""

    def __init__(self) -> None:
        self._num_bytes = 0
        # The last reference to a body may end on any thread.
        self._freed: deque[int] = deque()

    @property
    def num_bytes(self) -> int:
        """Memory of the bodies that are held."""
        while self._freed:
            self._num_bytes -= self._freed.popleft()
        return self._num_bytes

    async def hold(self, num_bytes: int, max_bytes: int) -> HeldBody:
        """Count a body of `num_bytes` when all bodies have at most `max_bytes` together, or when no
        other body is held. Raises Overloaded after MAX_WAIT_S."""
        deadline_s = asyncio.get_running_loop().time() + MAX_WAIT_S
        while self.num_bytes and self._num_bytes + num_bytes > max_bytes:
            if asyncio.get_running_loop().time() > deadline_s:
                raise Overloaded(
                    f"the bodies of requests that have begun take {self._num_bytes} bytes and this "
                    f"body takes {num_bytes}, at most {max_bytes} may"
                )
            await asyncio.sleep(POLL_S)
        self._num_bytes += num_bytes
        return HeldBody(num_bytes, self._freed)

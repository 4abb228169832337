"""InputPacer: limits the time for parsing input in each iteration of the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

BUDGET_S = 0.004
"""CPU time for parsing per iteration. uvloop reads all ready sockets in an iteration, up to 256 KiB
of each, which takes 60 ms to parse with 1-byte chunks."""
PIECE_BYTES = 8_192
"""Maximum input that is parsed without checking the time: 2 ms with 1-byte chunks."""


ParseNext = Callable[[], bool]
"""Parses the next piece of a connection's input; returns whether more input waits."""


class InputPacer:
    """Lets connections parse input for BUDGET_S in each iteration of the event loop. Further
    connections wait and get a piece per turn, round-robin over clients and over the connections of
    a client. A waiting connection does not read, so it has only one entry."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Memory of the waiting input."""
        self._waiting: dict[str, deque[tuple[ParseNext, int]]] = {}
        """Client -> its connections with the size of their input. Clients are in the order of their
        turns. The memory of an input is freed when all of it is parsed."""
        self._end_s = 0.0
        """End of this iteration's budget, in time.thread_time() seconds."""
        self._is_scheduled = False

    def has_time(self) -> bool:
        """Whether input may be parsed now."""
        now_s = time.thread_time()
        if not self._is_scheduled:
            self._start_iteration(now_s)
        return now_s < self._end_s

    def wait(self, client: str, parse_next: ParseNext, num_bytes: int) -> None:
        """Call `parse_next` in later iterations until it returns False. `num_bytes`: size of the
        waiting input."""
        self.num_bytes += num_bytes
        self._waiting.setdefault(client, deque()).append((parse_next, num_bytes))

    def _start_iteration(self, now_s: float) -> None:
        self._is_scheduled = True
        self._end_s = now_s + BUDGET_S
        asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._is_scheduled = False
        while self._waiting and self.has_time():
            client = next(iter(self._waiting))
            connections = self._waiting.pop(client)
            parse_next, num_bytes = connections.popleft()
            if parse_next():
                connections.append((parse_next, num_bytes))
            else:
                self.num_bytes -= num_bytes
            if connections:
                self._waiting[client] = connections

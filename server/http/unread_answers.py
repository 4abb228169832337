"""Memory of long responses and of output for streams that clients have not read."""

import asyncio
import contextlib
import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator

from config.fair_threads import current_client
from config.log import LimitedWarning
from config.malloc import trim_memory
from server.http.errors import ClientGone

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 512 * 2**20
"""Bytes of unread responses and stream output above which responses to slow clients are dropped."""
MIN_BYTES_PER_S = 256 * 2**10
SLOW_AFTER_S = 5.0
"""A client is slow if it has read less than MIN_BYTES_PER_S on average for at least this time."""
SLOW_STREAM_BYTES = 2**20
"""Unread output of a stream above which its client is slow."""
MAX_DROPS = 256
"""Maximum responses dropped at once: closing a connection takes 30 us on the event loop."""
TRIMMED_BYTES = 2**20
"""Response size above which freed memory is returned to the OS after the response."""
TRIM_DELAY_S = 2.0


class UnreadAnswer:
    """A long response that is being sent."""

    def __init__(
        self, client: str, num_bytes: int, started_s: float, abort: Callable[[], None]
    ) -> None:
        self.client = client
        self.num_bytes = num_bytes
        self.num_left = num_bytes
        self.is_dropped = False
        self._started_s = started_s
        self._abort = abort

    def is_slow(self, now_s: float) -> bool:
        waited_s = now_s - self._started_s
        num_read = self.num_bytes - self.num_left
        return waited_s >= SLOW_AFTER_S and num_read < MIN_BYTES_PER_S * waited_s

    def read(self, num_bytes: int) -> None:
        """Account for bytes that were sent. Raises ClientGone if the response was dropped."""
        if self.is_dropped:
            raise ClientGone
        self.num_left -= num_bytes

    def drop(self) -> None:
        """Close the connection. A `send` that waits for the client then returns."""
        self.is_dropped = True
        self._abort()


class UnreadStream(UnreadAnswer):
    """A stream, whose output accumulates while the client does not read."""

    def __init__(self, client: str, count: Callable[[], int], abort: Callable[[], None]) -> None:
        """`count` returns the bytes of output that the client has not read."""
        super().__init__(client, 0, 0.0, abort)
        self._count = count

    def count(self) -> None:
        """Update `num_left`."""
        self.num_left = self._count()

    def is_slow(self, now_s: float) -> bool:
        return self.num_left > SLOW_STREAM_BYTES


class UnreadAnswers:
    """Bounds the memory of unread responses and streams. Over `max_bytes`, drops responses to slow
    clients, and over twice `max_bytes`, responses to any client. The client with the most unread
    bytes is first; it loses its long responses, oldest first, and then its streams. The only long
    response is kept."""

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._answers: dict[UnreadAnswer, None] = {}
        """Long responses in start order."""
        self._streams: dict[UnreadStream, None] = {}
        """Streams in start order."""
        self._counts: set[asyncio.TimerHandle] = set()
        self._checks: set[asyncio.TimerHandle] = set()
        self._trims: set[asyncio.TimerHandle] = set()
        self._dropped = LimitedWarning(
            logger,
            f"Clients have not read {max_bytes} bytes of responses: closed the connection of a "
            "response with %d unread bytes, %d so far",
        )

    @contextlib.contextmanager
    def hold(self, num_bytes: int, abort: Callable[[], None]) -> Iterator[UnreadAnswer]:
        """Count a response of `num_bytes` inside the block. `abort` closes its connection."""
        loop = asyncio.get_running_loop()
        answer = UnreadAnswer(current_client.get() or "", num_bytes, loop.time(), abort)
        self._answers[answer] = None
        if not self._checks:
            self._check()
        try:
            yield answer
        finally:
            self._answers.pop(answer, None)
            self._trim_after(num_bytes)

    @contextlib.contextmanager
    def hold_stream(self, count: Callable[[], int], abort: Callable[[], None]) -> Iterator[None]:
        """Count the unread output of a stream, `count()` bytes, while the block runs. `abort`
        closes the client's connection."""
        stream = UnreadStream(current_client.get() or "", count, abort)
        self._streams[stream] = None
        if not self._counts:
            self._count_soon()
        try:
            yield
        finally:
            self._streams.pop(stream, None)
            self._trim_after(stream.num_left)

    def _count_soon(self) -> None:
        loop = asyncio.get_running_loop()
        self._counts.add(loop.call_later(SLOW_AFTER_S / 5, self._count))

    def _count(self) -> None:
        self._counts.clear()
        if not self._streams:
            return
        for stream in self._streams:
            stream.count()
        if not self._checks:
            self._check()
        self._count_soon()

    def _check(self) -> None:
        """Drop responses that the limits do not allow; repeats while the unread bytes exceed
        `max_bytes`."""
        self._checks.clear()
        loop = asyncio.get_running_loop()
        held: list[UnreadAnswer] = [*self._answers, *self._streams]
        num_unread = sum(answer.num_left for answer in held)
        if num_unread <= self._max_bytes:
            return
        takes_all = num_unread > 2 * self._max_bytes
        most = 2 * self._max_bytes if takes_all else self._max_bytes
        candidates: dict[str, deque[UnreadAnswer]] = {}
        for answer in held:
            if answer.num_left and (takes_all or answer.is_slow(loop.time())):
                candidates.setdefault(answer.client, deque()).append(answer)
        sizes = [
            (-sum(answer.num_left for answer in answers), client)
            for client, answers in candidates.items()
        ]
        heapq.heapify(sizes)
        num_dropped = 0
        while sizes and num_unread > most:
            if num_dropped == MAX_DROPS:
                self._checks.add(loop.call_later(SLOW_AFTER_S / 250, self._check))
                return
            negative_size, client = heapq.heappop(sizes)
            answer = candidates[client].popleft()
            if candidates[client]:
                heapq.heappush(sizes, (negative_size + answer.num_left, client))
            num_unread -= answer.num_left
            if len(self._answers) == 1 and answer in self._answers:
                # Keep a single long response: the request limits bound its size.
                continue
            self._forget(answer)
            self._dropped.add(answer.num_left)
            answer.drop()
            num_dropped += 1
        self._checks.add(loop.call_later(SLOW_AFTER_S / 5, self._check))

    def _forget(self, answer: UnreadAnswer) -> None:
        if isinstance(answer, UnreadStream):
            del self._streams[answer]
        else:
            del self._answers[answer]

    def _trim_after(self, num_bytes: int) -> None:
        if num_bytes > TRIMMED_BYTES and not self._trims:
            loop = asyncio.get_running_loop()
            self._trims.add(loop.call_later(TRIM_DELAY_S, self._trim))

    def _trim(self) -> None:
        self._trims.clear()
        asyncio.get_running_loop().run_in_executor(None, trim_memory)

    def close(self) -> None:
        """Stop the timers."""
        for timer in (*self._checks, *self._counts, *self._trims):
            timer.cancel()

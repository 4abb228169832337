"""RequestOutputQueue: the output of one request. OutputRouter: all queues of a front end for one
engine."""

import asyncio
import itertools

import msgspec

from config.errors import EngineDied, Overloaded
from engine.transport.messages import Finish, StepOutput
from hpu.protocol import Logprobs


class Update(msgspec.Struct, gc=False):
    """Everything that a request gained since its queue was last read."""

    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    prompt_logprobs: list[Logprobs] = []
    vectors: tuple[int, memoryview] | None = None
    """(rows, float32 little-endian): the result of a pooling request."""
    num_cached_tokens: int | None = None
    """Set once, when the request is first scheduled."""
    finish: Finish | None = None


class RequestOutputQueue:
    """The output of one request, for one reader. Unread updates are merged into one, so that a slow
    reader never has a backlog."""

    __slots__ = ("_failure", "_reader", "_update", "key", "num_waiting_tokens")

    def __init__(self, key: int, num_waiting_tokens: int) -> None:
        self.key = key
        self.num_waiting_tokens = num_waiting_tokens
        """Prompt tokens that wait to be scheduled; -1 once the request was scheduled."""
        self._update: Update | None = None
        self._failure: str | None = None
        self._reader: asyncio.Future[None] | None = None

    async def get(self) -> Update:
        """Wait for an update and take it. Raises EngineDied after the last update of an engine that
        died; after an update with `finish` nothing follows."""
        while self._update is None:
            if self._failure is not None:
                raise EngineDied(self._failure)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        update, self._update = self._update, None
        if update.finish is not None:
            self._failure = f"request {self.key} has ended ({update.finish.reason})"
        return update

    def unread(self) -> Update:
        """The unread update, to be extended by the caller; wakes the reader."""
        self._wake_reader()
        if self._update is None:
            self._update = Update()
        return self._update

    def fail(self, message: str) -> None:
        """Make `get` raise EngineDied once everything was read."""
        self._failure = message
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None


class QueueLimits:
    """The waiting requests of one front end, over all of its engines, and their limits."""

    def __init__(self, *, max_requests: int, max_prompt_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._num_requests = 0
        self._num_tokens = 0

    def enter(self, num_tokens: int, *, is_continuation: bool = False) -> None:
        """Count a request with so many prompt tokens. Raises Overloaded when too many requests or
        tokens wait, unless it continues a request that was accepted before."""
        if self._num_requests >= self._max_requests and not is_continuation:
            raise Overloaded(
                f"{self._num_requests} requests are waiting, and at most {self._max_requests} may."
            )
        num_waiting = self._num_tokens + num_tokens
        if num_waiting > self._max_prompt_tokens and not is_continuation:
            raise Overloaded(
                f"{self._num_tokens} prompt tokens are waiting and this request has "
                f"{num_tokens}, and at most {self._max_prompt_tokens} may wait."
            )
        self._num_requests += 1
        self._num_tokens = num_waiting

    def leave(self, num_tokens: int) -> None:
        """Undo `enter`."""
        self._num_requests -= 1
        self._num_tokens -= num_tokens


class OutputRouter:
    """The output queues of one front end for one engine.

    A request waits from `open` until it is scheduled, gains a token or finishes.
    """

    def __init__(self, first_key: int, limits: QueueLimits) -> None:
        self.num_waiting_tokens = 0
        """Prompt tokens of the requests that wait."""
        self._queues: dict[int, RequestOutputQueue] = {}
        self._keys = itertools.count(first_key)
        self._limits = limits

    def open(self, num_prompt_tokens: int, *, is_continuation: bool = False) -> RequestOutputQueue:
        """The queue of a new request. Raises Overloaded like QueueLimits.enter."""
        self._limits.enter(num_prompt_tokens, is_continuation=is_continuation)
        queue = RequestOutputQueue(next(self._keys), num_prompt_tokens)
        self._queues[queue.key] = queue
        self.num_waiting_tokens += num_prompt_tokens
        return queue

    def deliver(self, output: StepOutput) -> None:
        """Distribute a step's columns to the queues; what belongs to closed ones is dropped."""
        queues = self._queues
        for key, num_cached in zip(output.started, output.started_cached, strict=True):
            if (queue := queues.get(key)) is not None:
                self._leave_waiting(queue)
                queue.unread().num_cached_tokens = num_cached
        for key, prompt_logprobs in output.prompt_logprobs:
            if (queue := queues.get(key)) is not None:
                queue.unread().prompt_logprobs.append(prompt_logprobs)
        for key, logprobs in output.logprobs:
            if (queue := queues.get(key)) is not None:
                queue.unread().logprobs.append(logprobs)
        for key, num_rows, data in output.vectors:
            if (queue := queues.get(key)) is not None:
                queue.unread().vectors = (num_rows, data)
        tokens, start = output.tokens, 0
        counts = output.counts or [1] * len(output.keys)
        for key, count in zip(output.keys, counts, strict=True):
            end = start + count
            if (queue := queues.get(key)) is not None:
                if queue.num_waiting_tokens >= 0:
                    self._leave_waiting(queue)
                queue.unread().tokens += tokens[start:end]
            start = end
        for finish in output.finished:
            if (queue := self._close(finish.key)) is not None:
                queue.unread().finish = finish

    def abort(self, keys: list[int]) -> list[int]:
        """Finish these queues with reason abort; the keys of those that were open."""
        closed = [queue for key in keys if (queue := self._close(key)) is not None]
        for queue in closed:
            queue.unread().finish = Finish(queue.key, "abort")
        return [queue.key for queue in closed]

    def discard(self, key: int) -> None:
        """Undo `open` for a request that could not be sent."""
        self._close(key)

    def fail(self, message: str) -> None:
        """End every queue with EngineDied."""
        queues, self._queues = list(self._queues.values()), {}
        for queue in queues:
            self._leave_waiting(queue)
            queue.fail(message)

    def _close(self, key: int) -> RequestOutputQueue | None:
        queue = self._queues.pop(key, None)
        if queue is not None:
            self._leave_waiting(queue)
        return queue

    def _leave_waiting(self, queue: RequestOutputQueue) -> None:
        if queue.num_waiting_tokens >= 0:
            self._limits.leave(queue.num_waiting_tokens)
            self.num_waiting_tokens -= queue.num_waiting_tokens
            queue.num_waiting_tokens = -1

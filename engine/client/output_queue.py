"""RequestOutputQueue: the output of a request. OutputRouter: the queues of a front end for a single
engine."""

import asyncio
import itertools
import time
from array import array
from collections.abc import Collection

import msgspec

from config.errors import EngineDied
from engine.client.queue_limits import QueueLimits
from engine.client.ttft import Share
from engine.transport.messages import AddRequest, Finish, Resumption, StepOutput
from hpu.protocol import TOKEN_BYTES, Logprobs

MIN_TIMEOUT_S = 1e-3
MAX_READ_VALUES = 1_000
"""Maximum output tokens that `get` returns at once. With log-probabilities, the limit counts their
entries, and at least one step is returned. 1,000 take 5 ms of the event loop, including their JSON
encoding for a stream."""
UNREAD_TOKEN_BYTES = 36
UNREAD_PART_BYTES = 1_200
"""Memory of an unread token, and of a Logprobs object without its arrays."""


class Update(msgspec.Struct, gc=False):
    """Output of a request that the reader has not read, or a part of it (see `take_first`)."""

    tokens: list[int] = []
    num_merged: int = 0
    """Number of steps merged into this update after the first step with tokens."""
    logprobs: list[Logprobs] = []
    prompt_logprobs: list[Logprobs] = []
    vectors: tuple[int, memoryview] | None = None
    """Result of a pooling request: (number of vectors, their values as little-endian float32)."""
    num_cached_tokens: int | None = None
    """Set once, when the request is first scheduled."""
    finish: Finish | None = None

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the tokens and their log-probabilities."""
        num_bytes = UNREAD_TOKEN_BYTES * len(self.tokens)
        for part in self.logprobs[-1:]:
            num_bytes += (UNREAD_PART_BYTES + 2 * part.ids.nbytes) * len(self.logprobs)
        return num_bytes

    def take_first(self) -> "Update":
        """Remove and return the first MAX_READ_VALUES tokens or log-probabilities (at least one
        step), with all prompt log-probabilities; returns the update itself if it holds no more
        tokens."""
        num_tokens, num_parts = MAX_READ_VALUES, 0
        if self.logprobs:
            num_tokens = num_values = 0
            for part in self.logprobs:
                num_values += part.ids.nbytes // TOKEN_BYTES
                if num_parts and num_values > MAX_READ_VALUES:
                    break
                num_tokens += part.ranks.nbytes // TOKEN_BYTES
                num_parts += 1
        if num_tokens >= len(self.tokens):
            return self
        first = Update(
            self.tokens[:num_tokens],
            max(0, min(self.num_merged, num_tokens - 1)),
            self.logprobs[:num_parts],
            self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )
        # In place: copying the rest for each part would take seconds for a long output.
        del self.tokens[:num_tokens]
        del self.logprobs[:num_parts]
        self.num_merged = max(0, self.num_merged - num_tokens)
        self.prompt_logprobs, self.num_cached_tokens = [], None
        return first


class RequestOutputQueue:
    """The output of a request, for a single reader. Unread updates are merged, so that a slow
    reader reads few updates."""

    __slots__ = (
        "_failure",
        "_num_prompt_logprobs",
        "_num_resumed",
        "_output",
        "_reader",
        "_update",
        "deadline_s",
        "has_started",
        "is_suspect",
        "key",
        "message",
        "num_deaths",
        "num_external_deaths",
        "num_waiting_tokens",
        "share",
    )

    def __init__(self, key: int, num_waiting_tokens: int, share: Share = (0, 0)) -> None:
        self.key = key
        self.share = share
        self.deadline_s: float | None = None
        """Deadline of the request (see RequestLimits.deadline_s)."""
        self.num_waiting_tokens = num_waiting_tokens
        """Prompt tokens that wait to be scheduled; -1 once the request was scheduled or closed."""
        self.has_started = False
        """Whether any engine has scheduled the request."""
        self.message: AddRequest | None = None
        """The request as first sent, kept for resumption; None if the request cannot be resumed."""
        self.is_suspect = False
        """Whether an engine crashed after it had scheduled this request and before it sent any
        output for it. Reset at a later crash if the request has progressed since."""
        self.num_deaths = 0
        """Crashes with this request as the only suspect; reset at a crash if the request has
        progressed, or if the crash has no suspect."""
        self.num_external_deaths = 0
        """How many of `num_deaths` were external (see find_poison_request)."""
        self._output = array("I")
        """Output tokens, kept only if the request can be resumed. `_num_prompt_logprobs` counts the
        prompt positions with log-probabilities."""
        self._num_prompt_logprobs = 0
        self._num_resumed = (0, 0)
        """(output tokens, prompt positions with log-probabilities) when the request was last
        resumed."""
        self._update: Update | None = None
        self._failure: str | None = None
        self._reader: asyncio.Future[None] | None = None

    async def get(self) -> Update:
        """Wait for an update and return it. A long update is returned in parts; the event loop runs
        between the parts. An update with `finish` is the last. Once all updates were read, raises
        EngineDied if the engine died or the request has ended."""
        if self._update is not None:
            await asyncio.sleep(0)
        while self._update is None:
            if self._failure is not None:
                raise EngineDied(self._failure)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        update = self._update.take_first()
        if update is self._update:
            self._update = None
        if update.finish is not None:
            self._failure = f"request {self.key} has ended ({update.finish.reason})"
        return update

    @property
    def num_unread_bytes(self) -> int:
        """Estimated memory of the unread tokens and their log-probabilities."""
        return 0 if self._update is None else self._update.num_bytes

    def unread(self) -> Update:
        """The unread update, which the caller extends; wakes the reader."""
        self._wake_reader()
        if self._update is None:
            self._update = Update()
        return self._update

    def fail(self, message: str) -> None:
        """Make `get` raise EngineDied once all updates were read."""
        self._failure = message
        self._wake_reader()

    def add_tokens(self, tokens: list[int]) -> None:
        """Add sampled tokens to the unread update."""
        update = self.unread()
        if update.tokens:
            update.num_merged += 1
        update.tokens += tokens
        if self.message is not None:
            self._output.extend(tokens)

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Add log-probabilities of sampled tokens to the unread update. The first entry is a view
        of the received message; later entries are copied, so that they do not keep messages with
        the output of all requests alive."""
        parts = self.unread().logprobs
        parts.append(_copied(logprobs) if parts else logprobs)

    def add_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Add log-probabilities of prompt positions to the unread update."""
        self.unread().prompt_logprobs.append(logprobs)
        self._num_prompt_logprobs += logprobs.ranks.nbytes // TOKEN_BYTES

    @property
    def has_progressed(self) -> bool:
        """Whether the request has output since it was last sent to an engine."""
        return (len(self._output), self._num_prompt_logprobs) != self._num_resumed

    def resumed_message(self) -> AddRequest:
        """The message that resumes this request on an engine, with the current key."""
        assert self.message is not None, f"request {self.key} cannot be resumed"
        self._num_resumed = len(self._output), self._num_prompt_logprobs
        resumption = Resumption(
            memoryview(self._output.tobytes()), self._num_prompt_logprobs, self.is_suspect
        )
        timeout_s = self.message.timeout_s
        if self.deadline_s is not None:
            # Not 0, which means no limit: the engine fails a request whose deadline has passed.
            timeout_s = max(self.deadline_s - time.perf_counter(), MIN_TIMEOUT_S)
        return msgspec.structs.replace(
            self.message, key=self.key, resumption=resumption, timeout_s=timeout_s
        )

    def _wake_reader(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None


def _copied(logprobs: Logprobs) -> Logprobs:
    ids, values, ranks = logprobs.ids, logprobs.values, logprobs.ranks
    return Logprobs(
        logprobs.k,
        memoryview(ids.tobytes()),
        memoryview(values.tobytes()),
        memoryview(ranks.tobytes()),
    )


class OutputRouter:
    """The output queues of a front end for a single engine.

    A request counts as waiting from `open` until it is scheduled, gets a token or ends.
    """

    def __init__(self, first_key: int, limits: QueueLimits, *, by_share: bool = False) -> None:
        """`by_share`: whether to count `shares`."""
        self.num_waiting_tokens = 0
        """Prompt tokens of the waiting requests."""
        self.shares: dict[Share, int] | None = {} if by_share else None
        """Prompt tokens of the waiting requests by (priority, tenant); None: not counted."""
        self._queues: dict[int, RequestOutputQueue] = {}
        self._keys = itertools.count(first_key)
        self._limits = limits

    def open(
        self, num_prompt_tokens: int, *, is_continuation: bool = False, share: Share = (0, 0)
    ) -> RequestOutputQueue:
        """Open the queue of a new request. Raises Overloaded like QueueLimits.enter."""
        self._limits.enter(num_prompt_tokens, is_continuation=is_continuation, tenant=share[1])
        queue = RequestOutputQueue(next(self._keys), num_prompt_tokens, share)
        self._queues[queue.key] = queue
        self._count_waiting(share, num_prompt_tokens)
        return queue

    def deliver(self, output: StepOutput) -> None:
        """Distribute a step's output to the queues; output of closed queues is dropped."""
        queues = self._queues
        for key, num_cached in zip(output.started, output.started_cached, strict=True):
            if (queue := queues.get(key)) is not None:
                self._leave_waiting(queue)
                if not queue.has_started:
                    queue.has_started = True
                    queue.unread().num_cached_tokens = num_cached
        for key, prompt_logprobs in output.prompt_logprobs:
            if (queue := queues.get(key)) is not None:
                queue.add_prompt_logprobs(prompt_logprobs)
        for key, logprobs in output.logprobs:
            if (queue := queues.get(key)) is not None:
                queue.add_logprobs(logprobs)
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
                queue.add_tokens(tokens[start:end])
            start = end
        for finish in output.finished:
            if (queue := self._close(finish.key)) is not None:
                queue.unread().finish = finish

    def abort(self, keys: list[int]) -> list[int]:
        """Finish these queues with reason abort; returns the keys of the queues that were open."""
        closed = [queue for key in keys if (queue := self._close(key)) is not None]
        for queue in closed:
            queue.unread().finish = Finish(queue.key, "abort")
        return [queue.key for queue in closed]

    def discard(self, key: int) -> None:
        """Undo `open` for a request that could not be sent."""
        self._close(key)

    @property
    def queues(self) -> Collection[RequestOutputQueue]:
        """Open queues, in the order in which they were opened here or moved here."""
        return self._queues.values()

    @property
    def is_empty(self) -> bool:
        return not self._queues

    def is_open(self, queue: RequestOutputQueue) -> bool:
        """Whether `queue` belongs to this router and has not ended."""
        return self._queues.get(queue.key) is queue

    def finish(self, queue: RequestOutputQueue, error: str) -> None:
        """End an open queue with an error."""
        self._close(queue.key)
        queue.unread().finish = Finish(queue.key, "error", error=error)

    def move(self, queue: RequestOutputQueue, other: "OutputRouter") -> None:
        """Move an open queue to `other` (which may be this router) under a new key. The request
        counts as waiting again, and late output for the old key is dropped."""
        del self._queues[queue.key]
        if queue.num_waiting_tokens < 0:
            assert queue.message is not None, f"request {queue.key} cannot be resumed"
            queue.num_waiting_tokens = queue.message.prompt.nbytes // TOKEN_BYTES
            self._limits.enter(
                queue.num_waiting_tokens, is_continuation=True, tenant=queue.share[1]
            )
        else:
            self._count_waiting(queue.share, -queue.num_waiting_tokens)
        other._count_waiting(queue.share, queue.num_waiting_tokens)
        queue.key = next(other._keys)
        other._queues[queue.key] = queue

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
            self._limits.leave(queue.num_waiting_tokens, tenant=queue.share[1])
            self._count_waiting(queue.share, -queue.num_waiting_tokens)
            queue.num_waiting_tokens = -1

    def _count_waiting(self, share: Share, num_tokens: int) -> None:
        self.num_waiting_tokens += num_tokens
        if self.shares is not None:
            count = self.shares.get(share, 0) + num_tokens
            if count:
                self.shares[share] = count
            else:
                del self.shares[share]

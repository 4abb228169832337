"""RequestOutputQueue: the output of one request. OutputRouter: all queues of a front end for one
engine."""

import asyncio
import itertools
import time
from array import array
from collections.abc import Iterable

import msgspec

from config.errors import EngineDied, Overloaded
from engine.client.ttft import Share
from engine.transport.messages import AddRequest, Finish, Resumption, StepOutput
from hpu.protocol import TOKEN_BYTES, Logprobs

MAX_DEATHS, MAX_EXTERNAL_DEATHS = 2, 3
"""So often in a row an engine may die while it computes the next token of this request and of no
other whose next token it has not computed before: then the request is the cause. More often, if
another one ended the engine at any of them, as a person or the kernel for want of memory: that may
hit the same request twice by chance."""


MIN_TIMEOUT_S = 1e-3


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
        """As RequestTerms.deadline_s."""
        self.num_waiting_tokens = num_waiting_tokens
        """Prompt tokens that wait to be scheduled; -1 once the request was scheduled."""
        self.has_started = False
        """Whether any engine has scheduled it."""
        self.message: AddRequest | None = None
        """As it was sent first; set if it can be resumed by another engine."""
        self.is_suspect = False
        """Whether its engine died while it computed its next token."""
        self.num_deaths = 0
        """How often it was the only such request, since it last gained a token and since an engine
        died without any."""
        self.num_external_deaths = 0
        """At how many of these another one ended the engine."""
        self._output = array("I")
        """Its tokens, and the prompt positions with log-probabilities; counted if there is a
        message."""
        self._num_prompt_logprobs = 0
        self._num_resumed = (0, 0)
        """What it had of both when it was sent to its engine."""
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

    def add_tokens(self, tokens: list[int]) -> None:
        """Add sampled tokens to the unread update."""
        self.unread().tokens += tokens
        if self.message is not None:
            self._output.extend(tokens)

    def add_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Add some positions to the unread update."""
        self.unread().prompt_logprobs.append(logprobs)
        self._num_prompt_logprobs += logprobs.ranks.nbytes // TOKEN_BYTES

    @property
    def has_gained(self) -> bool:
        """Whether its engine has given it anything."""
        return (len(self._output), self._num_prompt_logprobs) != self._num_resumed

    def resumed_message(self) -> AddRequest:
        """What another engine has to be sent, under the key that it has now."""
        assert self.message is not None, f"request {self.key} cannot be resumed"
        self._num_resumed = len(self._output), self._num_prompt_logprobs
        resumption = Resumption(
            memoryview(self._output.tobytes()), self._num_prompt_logprobs, self.is_suspect
        )
        timeout_s = self.message.timeout_s
        if self.deadline_s is not None:
            # One that has passed is the engine's to report.
            timeout_s = max(self.deadline_s - time.perf_counter(), MIN_TIMEOUT_S)
        return msgspec.structs.replace(
            self.message, key=self.key, resumption=resumption, timeout_s=timeout_s
        )

    def _wake_reader(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None


class QueueLimits:
    """The waiting requests of one front end, over all of its engines, and their limits.

    With `fair_share` a tenant may exceed what is left of a limit up to its share of the whole, the
    limit divided by the tenants that wait: one that fills the queue keeps no other out. So at most
    limit * (1 + 1/2 + 1/3 + ...) requests wait, over the tenants.
    """

    def __init__(
        self, *, max_requests: int, max_prompt_tokens: int, fair_share: bool = False
    ) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._num_requests = 0
        self._num_tokens = 0
        self._tenants: dict[int, list[int]] | None = {} if fair_share else None
        """Waiting requests and tokens of each tenant that has any."""

    def enter(self, num_tokens: int, *, is_continuation: bool = False, tenant: int = 0) -> None:
        """Count a request with so many prompt tokens. Raises Overloaded when too many requests or
        tokens wait, unless it continues a request that was accepted before."""
        num_waiting = self._num_tokens + num_tokens
        is_full = self._num_requests >= self._max_requests or num_waiting > self._max_prompt_tokens
        if is_full and not is_continuation:
            self._check_share(num_tokens, tenant)
        self._num_requests += 1
        self._num_tokens = num_waiting
        if self._tenants is not None:
            counts = self._tenants.setdefault(tenant, [0, 0])
            counts[0] += 1
            counts[1] += num_tokens

    def leave(self, num_tokens: int, *, tenant: int = 0) -> None:
        """Undo `enter`."""
        self._num_requests -= 1
        self._num_tokens -= num_tokens
        if self._tenants is not None:
            counts = self._tenants[tenant]
            counts[0] -= 1
            counts[1] -= num_tokens
            if not counts[0]:
                del self._tenants[tenant]

    def _check_share(self, num_tokens: int, tenant: int) -> None:
        """Raise Overloaded for a request beyond a limit, and beyond its tenant's share of it."""
        num_requests, num_waiting, num_tenants, whose = self._num_requests, self._num_tokens, 1, ""
        if self._tenants is not None:
            num_requests, num_waiting = self._tenants.get(tenant, (0, 0))
            num_tenants = len(self._tenants) + (tenant not in self._tenants)
            whose = " of this API key"
        max_requests = max(1, self._max_requests // num_tenants)
        if num_requests >= max_requests and self._num_requests >= self._max_requests:
            raise Overloaded(
                f"{num_requests} requests{whose} are waiting, and at most {max_requests} may."
            )
        max_tokens = self._max_prompt_tokens // num_tenants
        is_full = self._num_tokens + num_tokens > self._max_prompt_tokens
        if num_waiting + num_tokens > max_tokens and is_full:
            raise Overloaded(
                f"{num_waiting} prompt tokens{whose} are waiting and this request has "
                f"{num_tokens}, and at most {max_tokens} may wait."
            )


class OutputRouter:
    """The output queues of one front end for one engine.

    A request waits from `open` until it is scheduled, gains a token or finishes.
    """

    def __init__(self, first_key: int, limits: QueueLimits, *, by_share: bool = False) -> None:
        """`by_share`: count `shares`."""
        self.num_waiting_tokens = 0
        """Prompt tokens of the requests that wait."""
        self.shares: dict[Share, int] | None = {} if by_share else None
        """The same by (priority, tenant)."""
        self._queues: dict[int, RequestOutputQueue] = {}
        self._keys = itertools.count(first_key)
        self._limits = limits

    def open(
        self, num_prompt_tokens: int, *, is_continuation: bool = False, share: Share = (0, 0)
    ) -> RequestOutputQueue:
        """The queue of a new request. Raises Overloaded like QueueLimits.enter."""
        self._limits.enter(num_prompt_tokens, is_continuation=is_continuation, tenant=share[1])
        queue = RequestOutputQueue(next(self._keys), num_prompt_tokens, share)
        self._queues[queue.key] = queue
        self._count_waiting(share, num_prompt_tokens)
        return queue

    def deliver(self, output: StepOutput) -> None:
        """Distribute a step's columns to the queues; what belongs to closed ones is dropped."""
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
                queue.add_tokens(tokens[start:end])
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

    @property
    def queues(self) -> Iterable[RequestOutputQueue]:
        """Those that are open, the first opened first."""
        return self._queues.values()

    @property
    def is_empty(self) -> bool:
        return not self._queues

    def is_open(self, queue: RequestOutputQueue) -> bool:
        """Whether it is one of these, and has not ended."""
        return self._queues.get(queue.key) is queue

    def finish(self, queue: RequestOutputQueue, error: str) -> None:
        """End an open queue with an error."""
        self._close(queue.key)
        queue.unread().finish = Finish(queue.key, "error", error=error)

    def suspect(self, *, is_external: bool) -> int:
        """The engine has died, ended by another one if `is_external`: suspect the requests that it
        had started and given nothing, and end the one that is the cause. Returns the number of
        those that were ended."""
        suspects = []
        for queue in self._queues.values():
            if queue.has_gained:
                queue.is_suspect = False
                queue.num_deaths = queue.num_external_deaths = 0
            elif queue.num_waiting_tokens < 0:
                queue.is_suspect = True
                suspects.append(queue)
        if not suspects:
            # Deaths have another cause than a request.
            for queue in self._queues.values():
                queue.num_deaths = queue.num_external_deaths = 0
        if len(suspects) != 1:
            return 0
        (queue,) = suspects
        queue.num_deaths += 1
        queue.num_external_deaths += is_external
        max_deaths = MAX_EXTERNAL_DEATHS if queue.num_external_deaths else MAX_DEATHS
        if queue.num_deaths < max_deaths:
            return 0
        self.finish(
            queue,
            f"the engine died {queue.num_deaths} times while it computed this request, which is "
            "not tried again",
        )
        return 1

    def move(self, queue: RequestOutputQueue, other: "OutputRouter") -> None:
        """Give an open queue, which waits from now on, to `other` or to this router, with a new
        key: what a dead engine said of the old one is dropped."""
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

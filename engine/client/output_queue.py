"""The front-end's mailboxes: who waits for what, and which share of the line that takes.
Knows no process and no socket."""

import asyncio
import itertools
from collections.abc import Callable

import msgspec

from config.errors import ConfigError, EngineDied, Overloaded
from engine.transport.messages import (
    FRONT_END_SHIFT,
    EngineStats,
    Finish,
    Progress,
    Ready,
    StepOutput,
)
from hpu.protocol import Logprobs


class Update(msgspec.Struct, gc=False):
    """All that a request has gained since its mailbox was last read."""

    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    prompt_logprobs: list[Logprobs] = []
    vectors: tuple[int, memoryview] | None = None
    """(rows, float32 little-endian): what a pooling request asked for."""
    num_cached_tokens: int | None = None
    """Set once, when the request left the waiting line."""
    finish: Finish | None = None


class Box:
    """The one RequestOutputQueue. What comes in while nobody reads is merged, never queued
    twice."""

    __slots__ = ("_failure", "_reader", "_update", "key", "waiting_tokens")

    def __init__(self, key: int, waiting_tokens: int) -> None:
        self.key = key
        self.waiting_tokens = waiting_tokens
        """Prompt tokens that still wait in line; -1 once the request has left it."""
        self._update: Update | None = None
        self._failure: str | None = None
        self._reader: asyncio.Future[None] | None = None

    async def get(self) -> Update:
        """Wait for something new and take all of it. Raises EngineDied; what came before the death
        is handed out first, and so is the finish."""
        while self._update is None:
            if self._failure is not None:
                raise EngineDied(self._failure)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        update, self._update = self._update, None
        if update.finish is not None:
            self._failure = f"request {self.key} has ended ({update.finish.reason})"
        return update

    def gain(self) -> Update:
        """The unread update, to be extended; wakes the reader."""
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None
        if self._update is None:
            self._update = Update()
        return self._update

    def fail(self, message: str) -> None:
        """End with EngineDied."""
        self._failure = message
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
            self._reader = None


class OutputRouter:
    """Every open mailbox of one front-end, its share of the waiting line, and what the engine says.

    A request waits from `open` until its key starts, gains a token or finishes. After a failure the
    room is empty for good.
    """

    def __init__(self, index: int, *, max_requests: int, max_prompt_tokens: int) -> None:
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.failure: str | None = None
        self.is_config = False
        """Whether a setting is to blame for the failure."""
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        """Sees every EngineStats, so that no sample in it is missed."""
        self.settled = asyncio.Event()
        """Set when the engine is ready, or will never be."""
        self._boxes: dict[int, Box] = {}
        self._keys = itertools.count(index << FRONT_END_SHIFT)
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._num_waiting = 0
        self._num_waiting_tokens = 0

    def check_ready(self) -> None:
        """Raise EngineDied, or Overloaded with where start-up stands, unless requests may come."""
        if self.failure is not None:
            raise EngineDied(self.failure)
        if self.ready is None:
            stage = self.progress
            doing = f" ({stage.stage}: {stage.done} of {stage.total})" if stage else ""
            raise Overloaded(
                f"The engine is starting{doing}, it takes no requests yet.",
                retry_after_s=5,
                type="server_error",
            )

    def open(self, num_prompt_tokens: int, *, goes_on: bool = False) -> Box:
        """A mailbox for a new request. Raises what `check_ready` does, and Overloaded when the line
        is full; what `goes_on` with a request that was let in before is taken all the same."""
        self.check_ready()
        if self._num_waiting >= self._max_requests and not goes_on:
            raise Overloaded(
                f"{self._num_waiting} requests are waiting, and at most {self._max_requests} may."
            )
        wanted = self._num_waiting_tokens + num_prompt_tokens
        if wanted > self._max_prompt_tokens and not goes_on:
            raise Overloaded(
                f"{self._num_waiting_tokens} prompt tokens are waiting and this request has "
                f"{num_prompt_tokens}, and at most {self._max_prompt_tokens} may wait."
            )
        box = Box(next(self._keys), num_prompt_tokens)
        self._boxes[box.key] = box
        self._num_waiting += 1
        self._num_waiting_tokens = wanted
        return box

    def deliver(self, step: StepOutput) -> None:
        """Put a step's columns into mailboxes; what is for closed ones is dropped."""
        boxes = self._boxes
        for key, cached in zip(step.started, step.started_cached, strict=True):
            if (box := boxes.get(key)) is not None:
                self._leave_line(box)
                box.gain().num_cached_tokens = cached
        for key, prompt_logprobs in step.prompt_logprobs:
            if (box := boxes.get(key)) is not None:
                box.gain().prompt_logprobs.append(prompt_logprobs)
        for key, logprobs in step.logprobs:
            if (box := boxes.get(key)) is not None:
                box.gain().logprobs.append(logprobs)
        for key, num_rows, data in step.vectors:
            if (box := boxes.get(key)) is not None:
                box.gain().vectors = (num_rows, data)
        tokens, position = step.tokens, 0
        for key, count in zip(step.keys, step.counts, strict=True):
            end = position + count
            if (box := boxes.get(key)) is not None:
                if box.waiting_tokens >= 0:
                    self._leave_line(box)
                box.gain().tokens += tokens[position:end]
            position = end
        for finish in step.finished:
            if (box := self._close(finish.key)) is not None:
                box.gain().finish = finish
        if step.stats is not None:
            self.stats = step.stats
            if self.on_stats is not None:
                self.on_stats(step.stats)

    def abort(self, keys: list[int]) -> list[int]:
        """End these mailboxes at once; the keys that were open."""
        closed = [box for key in keys if (box := self._close(key)) is not None]
        for box in closed:
            box.gain().finish = Finish(box.key, "abort")
        return [box.key for box in closed]

    def forget(self, key: int) -> None:
        """Undo `open` for a request that could not be sent."""
        self._close(key)

    def fail(self, message: str, *, is_config: bool = False) -> None:
        """End every mailbox with EngineDied. The first reason given is kept."""
        if self.failure is not None:
            return
        self.failure, self.is_config = message, is_config
        boxes, self._boxes = list(self._boxes.values()), {}
        for box in boxes:
            self._leave_line(box)
            box.fail(message)
        self.settled.set()

    def become_ready(self, ready: Ready) -> None:
        """Requests may come."""
        self.ready = ready
        self.settled.set()

    async def wait_ready(self) -> Ready:
        """Wait for start-up to end. Raises EngineDied when it fails, ConfigError if a setting is
        to blame."""
        await self.settled.wait()
        if self.failure is not None and self.is_config:
            raise ConfigError(self.failure)
        if self.failure is not None or self.ready is None:
            raise EngineDied(self.failure)
        return self.ready

    def _close(self, key: int) -> Box | None:
        box = self._boxes.pop(key, None)
        if box is not None:
            self._leave_line(box)
        return box

    def _leave_line(self, box: Box) -> None:
        if box.waiting_tokens >= 0:
            self._num_waiting -= 1
            self._num_waiting_tokens -= box.waiting_tokens
            box.waiting_tokens = -1

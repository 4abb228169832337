"""A request for vectors while it runs: inputs go to the engine, some of them at a time, and their
vectors come back. Knows no HTTP and no text."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from config.errors import Overloaded, RequestFailed
from config.params.pooling import PoolingParams
from engine.client.zmq import EngineClient, RequestOutputQueue, Update
from server.generation.outputs import Delta, PositionLogprobs
from server.generation.pipeline import check_finish

Vectors = npt.NDArray[np.float32]
"""(rows, width): one row, or one a token."""

MAX_AT_ONCE = 256
"""Inputs of one request that are in the engine at a time: it is kept busy, and others are not
kept waiting behind thousands."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One text or pair, ready for the engine, and what to make of it."""

    token_ids: list[int]
    params: PoolingParams


class Pooling:
    """The inputs of one request. Iterate it once: every item says which inputs are done, in order.

    Raises what the engine's client does, RequestFailed when an input broke in the engine and
    UserError when the engine refuses one; whatever is still open is aborted then.
    """

    def __init__(
        self,
        client: EngineClient,
        inputs: list[PoolingInput],
        *,
        priority: int = 0,
        cache_salt: str = "",
        name: str = "",
        at_once: int = MAX_AT_ONCE,
    ) -> None:
        """Sends the first inputs; raises Overloaded or EngineDied, and then leaves none behind."""
        self._client = client
        self._unsent = deque(enumerate(inputs))
        self._inputs = inputs
        self._priority, self._salt, self._name = priority, cache_salt, name
        self._at_once = at_once
        self._boxes: deque[tuple[int, RequestOutputQueue]] = deque()
        self._vectors: dict[int, Vectors] = {}
        self._is_cut = False
        self.cached_tokens = [0] * len(inputs)
        """Of each input, found in the prefix cache."""
        self.num_preemptions = 0
        self.queue_s = 0.0
        """Seconds until the last input left the waiting line, of those that were there at once."""
        self.prefill_s = 0.0
        """Seconds of work on the slowest input."""
        self.decode_s = 0.0
        try:
            self._send()
        except BaseException:
            self.abort()
            raise

    @property
    def num_prompt_tokens(self) -> int:
        """Of all inputs; once it was cut short, of those that were done by then."""
        if self._is_cut:
            return sum(len(self._inputs[place].token_ids) for place in self._vectors)
        return sum(len(one.token_ids) for one in self._inputs)

    @property
    def num_inputs(self) -> int:
        """Texts or pairs."""
        return len(self._inputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, of all inputs."""
        return sum(self.cached_tokens)

    @property
    def num_output_tokens(self) -> int:
        """There are none."""
        return 0

    @property
    def prompt_logprobs(self) -> list[list[PositionLogprobs | None] | None]:
        """There are none."""
        return [None] * len(self._inputs)

    @property
    def vectors(self) -> list[Vectors]:
        """Of all inputs, in order, once iteration has ended."""
        return [self._vectors[place] for place in range(len(self._inputs))]

    def __aiter__(self) -> "Pooling":
        return self

    async def __anext__(self) -> list[Delta]:
        if not self._boxes:
            raise StopAsyncIteration
        place, box = self._boxes[0]
        try:
            while (update := await box.get()).finish is None:
                self._take(place, update)
            # A request that was aborted meanwhile has no more boxes, nor readers.
            if not self._boxes:
                raise StopAsyncIteration
            self._boxes.popleft()
            check_finish(update.finish)
            self._take(place, update)
            self._send()
        except BaseException:
            self.abort()
            raise
        return [Delta(place, finish_reason="stop")]

    def abort(self) -> None:
        """Forget what is still open, now. Iteration ends; safe at any moment, and twice."""
        self._is_cut = self._is_cut or bool(self._boxes or self._unsent)
        self._unsent.clear()
        boxes, self._boxes = self._boxes, deque()
        if boxes:
            self._client.abort([box.key for _, box in boxes])

    def _send(self) -> None:
        """Send as many as may be in the engine at once. When the line is full, those that wait in
        it for us make room: only a request that has none there is turned away."""
        while self._unsent and len(self._boxes) < self._at_once:
            place, one = self._unsent[0]
            tokens = np.asarray(one.token_ids, dtype="<u4").tobytes()
            try:
                box = self._client.add(
                    tokens,
                    priority=self._priority,
                    cache_salt=self._salt,
                    name=self._name,
                    pooling=one.params,
                )
            except Overloaded:
                if not self._boxes:
                    raise
                return
            self._boxes.append((place, box))
            self._unsent.popleft()

    def _take(self, place: int, update: Update) -> None:
        if update.num_cached_tokens is not None:
            self.cached_tokens[place] = update.num_cached_tokens
        if update.vectors is not None:
            rows, data = update.vectors
            made = np.frombuffer(data, dtype="<f4").reshape(rows, -1)
            if not np.isfinite(made).all():
                raise RequestFailed(
                    f"the vectors of input {place} hold numbers that are not finite"
                )
            self._vectors[place] = made
        finish = update.finish
        if finish is not None:
            self.num_preemptions += finish.num_preemptions
            self.queue_s = max(self.queue_s, finish.queue_s)
            self.prefill_s = max(self.prefill_s, finish.prefill_s)

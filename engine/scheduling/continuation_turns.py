"""ContinuationTurns: alternates beam-search continuations with new requests."""

from engine.request import Request
from engine.scheduling.waiting_queue import WaitingQueue

MIN_CONTINUED = 4
TURN_SHARE = 4
"""A waiting new request of the same or a higher priority gets a turn at the latest after
max_num_seqs // TURN_SHARE continuations (MIN_CONTINUED, if larger)."""
STEP_SHARE = 16
"""At most max_num_seqs / STEP_SHARE continuations (MIN_CONTINUED, if larger) start in a step that
other requests share: a step of all beams of a wide search takes several times as long and delays
every request."""
SHARED_STEPS = 16
"""Steps for which STEP_SHARE still applies after the last other request ran or waited: a client
that sends short requests in sequence often has no request open."""


class ContinuationTurns:
    """Selects the waiting request to start next. Continuations (a request for each token of a beam)
    precede new requests in the queue, and beam searches may have thousands of them. New requests
    therefore get a turn after a number of continuations."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_continued = max(MIN_CONTINUED, max_num_seqs // TURN_SHARE)
        self._max_in_step = max(MIN_CONTINUED, max_num_seqs // STEP_SHARE)
        self._num_continued = 0
        """Continuations that have started since the last turn of a new request."""
        self._num_in_step = 0
        self._num_running = 0
        """Running requests that are not continuations."""
        self._step = self._last_shared_step = -SHARED_STEPS
        self._turn: Request | None = None
        """The new request that has its turn now."""

    def begin_step(self, step: int, waiting: WaitingQueue) -> None:
        """Reset the step's count of continuations, and record whether new requests run or wait."""
        self._step = step
        self._num_in_step = 0
        if self._num_running or waiting.peek(is_new=True):
            self._last_shared_step = step

    def next(self, waiting: WaitingQueue) -> Request | None:
        """The waiting request to start next; None if no request may start in this step."""
        request = waiting.peek()
        if not (request and request.is_continuation):
            return request
        if self._num_in_step >= self._max_in_step and self._is_shared:
            return self._give_turn(waiting.peek(is_new=True))
        if self._num_continued < self._max_continued:
            return request
        new = waiting.peek(is_new=True)
        if not new or new.priority_key[0] > request.priority_key[0]:
            return request
        return self._give_turn(new)

    def start(self, request: Request) -> None:
        """Count a request that starts to run."""
        self._num_running += not request.is_continuation
        self._num_continued += request.is_continuation
        self._num_in_step += request.is_continuation

    def remove(self, request: Request) -> None:
        """Count a request that has stopped running."""
        self._num_running -= not request.is_continuation

    def has_turn(self, request: Request) -> bool:
        """Whether it is the turn of the new request `request`, before the waiting continuations."""
        return request is self._turn

    @property
    def _is_shared(self) -> bool:
        return self._step - self._last_shared_step < SHARED_STEPS

    def _give_turn(self, new: Request | None) -> Request | None:
        # The turn ends even if the request cannot start now.
        self._num_continued = 0
        self._turn = new
        return new

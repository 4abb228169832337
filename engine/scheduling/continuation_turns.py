"""ContinuationTurns: the beams of beam searches take turns with other requests."""

from engine.request import Request
from engine.scheduling.waiting_queue import WaitingQueue

MIN_CONTINUED = 4
TURN_SHARE = 4
"""After 1/4 of a full batch of continuations a new request has its turn."""
STEP_SHARE = 16
"""A step that other requests share starts continuations for 1/16 of a full batch: a step of all
beams of a wide search takes several times as long, and every request waits for it."""
SHARED_STEPS = 16
"""Steps for which the limit of a shared step holds after the last other request: a client that
sends short requests one after the other is often absent between two of them."""


class ContinuationTurns:
    """Selects the waiting request to start next. Continuations, which are sent for each token of a
    beam, are first; but beam searches may have thousands of them."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_continued = max(MIN_CONTINUED, max_num_seqs // TURN_SHARE)
        self._max_in_step = max(MIN_CONTINUED, max_num_seqs // STEP_SHARE)
        self._num_continued = 0
        """Continuations that have started since a new request had its turn."""
        self._num_in_step = 0
        self._num_running = 0
        """Requests that run and continue no other request."""
        self._step = self._last_shared_step = -SHARED_STEPS
        self._turn: Request | None = None
        """The new request that has its turn in place of continuations."""

    def begin_step(self, step: int, waiting: WaitingQueue) -> None:
        """Begin a step."""
        self._step = step
        self._num_in_step = 0
        if self._num_running or waiting.peek(is_new=True):
            self._last_shared_step = step

    def next(self, waiting: WaitingQueue) -> Request | None:
        """The waiting request to start next; None if none may start in this step."""
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
        """Count a request that starts."""
        self._num_running += not request.is_continuation
        self._num_continued += request.is_continuation
        self._num_in_step += request.is_continuation

    def remove(self, request: Request) -> None:
        """Count a request that runs no more."""
        self._num_running -= not request.is_continuation

    def has_turn(self, request: Request) -> bool:
        """Whether `request` is a new request that has its turn in place of continuations."""
        return request is self._turn

    @property
    def _is_shared(self) -> bool:
        return self._step - self._last_shared_step < SHARED_STEPS

    def _give_turn(self, new: Request | None) -> Request | None:
        # The turn is over even if the request cannot start now.
        self._num_continued = 0
        self._turn = new
        return new

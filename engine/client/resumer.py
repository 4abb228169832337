"""Resumer: sends requests of a crashed engine to its replacement or to another engine."""

from collections import deque
from collections.abc import Callable, Iterable

from engine.client.output_queue import OutputRouter, RequestOutputQueue
from engine.transport.messages import AddRequest


class Resumer:
    """Queue of requests to resume on an engine."""

    def __init__(self, router: OutputRouter, send: Callable[[AddRequest], bool]) -> None:
        """`send` returns False while the engine takes no more messages."""
        self._router = router
        self._send = send
        self._unsent: deque[RequestOutputQueue] = deque()

    def adopt(self, queues: Iterable[RequestOutputQueue], before: OutputRouter) -> None:
        """Send open requests of a crashed engine in this order; `before` is the router of that
        engine."""
        for queue in queues:
            before.move(queue, self._router)
            self._unsent.append(queue)
        self.proceed()

    def withdraw(self) -> None:
        """Handle a crash of this engine: unsent requests wait in its router for `adopt`."""
        self._unsent.clear()

    @property
    def is_done(self) -> bool:
        """Whether all requests were sent."""
        return not self._unsent

    def proceed(self) -> None:
        """Send as many requests as the engine takes now. Call it after each StepOutput of the
        engine."""
        while self._unsent and self._resume(self._unsent[0]):
            self._unsent.popleft()

    def _resume(self, queue: RequestOutputQueue) -> bool:
        """Send the request; True if it was sent or has ended."""
        if not self._router.is_open(queue):
            return True
        try:
            return self._send(queue.resumed_message())
        except (TypeError, ValueError) as error:
            # The request was accepted while no engine ran, before any attempt to encode it.
            self._router.finish(queue, f"the request cannot be encoded: {error}")
            return True

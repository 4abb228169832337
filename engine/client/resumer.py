"""Resumer: sends an engine the requests that another one, or its predecessor, had when it died."""

from collections import deque
from collections.abc import Callable, Iterable

from engine.client.output_queue import OutputRouter, RequestOutputQueue
from engine.transport.messages import AddRequest


class Resumer:
    """Requests on their way to one engine."""

    def __init__(self, router: OutputRouter, send: Callable[[AddRequest], bool]) -> None:
        """`send` returns False while the engine takes no more messages."""
        self._router = router
        self._send = send
        self._unsent: deque[RequestOutputQueue] = deque()

    def adopt(self, queues: Iterable[RequestOutputQueue], before: OutputRouter) -> None:
        """Send open requests of a dead engine's router, `before`, in this order."""
        for queue in queues:
            before.move(queue, self._router)
            self._unsent.append(queue)
        self.proceed()

    def withdraw(self) -> None:
        """The engine has died: what was not sent stays in its router, to be adopted again."""
        self._unsent.clear()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to send."""
        return not self._unsent

    def proceed(self) -> None:
        """Send what the engine takes now. To be called after each of its messages."""
        while self._unsent and self._resume(self._unsent[0]):
            self._unsent.popleft()

    def _resume(self, queue: RequestOutputQueue) -> bool:
        """Whether it was sent, or need not be."""
        if not self._router.is_open(queue):
            return True
        try:
            return self._send(queue.resumed_message())
        except (TypeError, ValueError) as error:
            # It was accepted while no engine ran, before anyone tried to encode it.
            self._router.finish(queue, f"the request cannot be encoded: {error}")
            return True

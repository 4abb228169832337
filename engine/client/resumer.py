"""Resumer: sends an engine the requests that another one, or its predecessor, had when it died."""

from collections import deque
from collections.abc import Callable, Iterable

from engine.client.output_queue import OutputRouter, RequestOutputQueue
from engine.transport.messages import AddRequest


class Resumer:
    """Requests on their way to one engine. One that an engine died over without giving it a token
    may be the cause: such requests are sent one at a time, each when the one before has gained a
    token or has ended, so that the next death tells which it is."""

    def __init__(self, router: OutputRouter, send: Callable[[AddRequest], bool]) -> None:
        """`send` returns False while the engine takes no more messages."""
        self._router = router
        self._send = send
        self._unsent: deque[RequestOutputQueue] = deque()
        self._suspects: deque[RequestOutputQueue] = deque()
        self._suspect: RequestOutputQueue | None = None
        """The one that was sent last, and has gained nothing yet."""

    def adopt(self, queues: Iterable[RequestOutputQueue], before: OutputRouter) -> None:
        """Send the open requests of a dead engine's router, `before`."""
        for queue in queues:
            before.move(queue, self._router)
            (self._suspects if queue.is_suspect else self._unsent).append(queue)
        self.proceed()

    def withdraw(self) -> None:
        """The engine has died: what was not sent stays in its router, to be adopted again."""
        self._unsent.clear()
        self._suspects.clear()
        self._suspect = None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to send."""
        return not (self._unsent or self._suspects)

    def proceed(self) -> None:
        """Send what can be sent now. To be called after each message of the engine."""
        while self._unsent:
            if not self._resume(self._unsent[0]):
                return
            self._unsent.popleft()
        while self._suspects:
            last = self._suspect
            if last is not None and self._router.is_open(last) and not last.has_gained:
                return
            self._suspect = None
            if not self._resume(self._suspects[0]):
                return
            self._suspect = self._suspects.popleft()

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

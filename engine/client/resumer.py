"""Resumer: sends an engine the requests that another one, or its predecessor, had when it died."""

from collections import deque
from collections.abc import Callable, Iterable

from engine.client.output_queue import OutputRouter, RequestOutputQueue
from engine.transport.messages import AddRequest


class Resumer:
    """Requests on their way to one engine. One that an engine died over without giving it a token
    may be the cause: such requests are sent one at a time, behind all others that had started, each
    when the ones before have gained a token or have ended, so that the next death tells which it
    is. The one that was alone at a death is tried behind the others: if deaths have another cause,
    it is another one that is alone at the next."""

    def __init__(self, router: OutputRouter, send: Callable[[AddRequest], bool]) -> None:
        """`send` returns False while the engine takes no more messages."""
        self._router = router
        self._send = send
        self._unsent: deque[RequestOutputQueue] = deque()
        self._suspects: deque[RequestOutputQueue] = deque()
        self._first_tokens: deque[RequestOutputQueue] = deque()
        """Sent, but suspects wait until these have gained something."""

    def adopt(self, queues: Iterable[RequestOutputQueue], before: OutputRouter) -> None:
        """Send the open requests of a dead engine's router, `before`."""
        self._first_tokens = deque(one for one in self._first_tokens if self._has_nothing(one))
        for queue in queues:
            before.move(queue, self._router)
            (self._suspects if queue.is_suspect else self._unsent).append(queue)
        self._suspects = deque(sorted(self._suspects, key=lambda queue: queue.num_deaths))
        self.proceed()

    def withdraw(self) -> None:
        """The engine has died: what was not sent stays in its router, to be adopted again."""
        self._unsent.clear()
        self._suspects.clear()
        self._first_tokens.clear()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to send."""
        return not (self._unsent or self._suspects)

    def proceed(self) -> None:
        """Send what can be sent now. To be called after each message of the engine, and each
        abort."""
        while self._unsent:
            queue = self._unsent[0]
            if not self._resume(queue):
                return
            self._unsent.popleft()
            if queue.has_started:
                self._first_tokens.append(queue)
        while self._suspects:
            while self._first_tokens:
                if self._has_nothing(self._first_tokens[0]):
                    return
                self._first_tokens.popleft()
            if not self._resume(self._suspects[0]):
                return
            self._first_tokens.append(self._suspects.popleft())

    def _has_nothing(self, queue: RequestOutputQueue) -> bool:
        return self._router.is_open(queue) and not queue.has_gained

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

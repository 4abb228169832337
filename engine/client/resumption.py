"""Resumption of the requests of a crashed engine: resume order, detection of the poison request (a
request that repeatedly crashes engines), and sending to the new engine."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

from engine.client.output_queue import OutputRouter, RequestOutputQueue
from engine.client.state import Pause
from engine.transport.messages import AddRequest

MAX_DEATHS, MAX_EXTERNAL_DEATHS = 2, 3
"""Number of crashes, each with a request as the only suspect, after which the request is failed.
The second limit applies if the cause of any of these crashes was outside of the engine (for example
the OOM killer) or is unknown: two such crashes may hit the same request by chance."""

Client = TypeVar("Client", contravariant=True)


class ResumptionObserver(Protocol[Client]):
    """Observer of engine crashes and replacements."""

    def engine_lost(self, client: Client, *, has_poison: bool) -> None:
        """The engine of `client` crashed; its open requests are kept. `has_poison`: a poison
        request was failed."""

    def engine_restored(self, client: Client, pause: Pause) -> None:
        """The engine of `client` was replaced, and its requests are being resumed."""


class NoObserver:
    """A ResumptionObserver that does nothing."""

    def engine_lost(self, client: object, *, has_poison: bool) -> None:
        pass

    def engine_restored(self, client: object, pause: Pause) -> None:
        pass


class Resumer:
    """Queue of requests to resume on an engine."""

    def __init__(self, router: OutputRouter, send: Callable[[AddRequest], bool]) -> None:
        """`send` returns False while the engine accepts no more messages."""
        self._router = router
        self._send = send
        self._unsent: deque[RequestOutputQueue] = deque()

    def adopt(self, queues: Iterable[RequestOutputQueue], before: OutputRouter) -> None:
        """Take over open requests of a crashed engine and send them in the order of `queues`.
        `before`: the router of the crashed engine."""
        for queue in queues:
            before.move(queue, self._router)
            self._unsent.append(queue)
        self.proceed()

    def withdraw(self) -> None:
        """Handle a crash of this engine: drop the send queue. Unsent requests stay in its router
        for `adopt`."""
        self._unsent.clear()

    @property
    def is_done(self) -> bool:
        """Whether all requests were sent."""
        return not self._unsent

    def proceed(self) -> None:
        """Send as many requests as the engine accepts now. Call it after each StepOutput of the
        engine."""
        while self._unsent and self._resume(self._unsent[0]):
            self._unsent.popleft()

    def _resume(self, queue: RequestOutputQueue) -> bool:
        if not self._router.is_open(queue):
            return True
        try:
            return self._send(queue.resumed_message())
        except (TypeError, ValueError) as error:
            # The request was accepted while no engine ran, before any attempt to encode it.
            self._router.finish(queue, f"the request cannot be encoded: {error}")
            return True


def find_poison_request(
    queues: Collection[RequestOutputQueue], *, is_external: bool
) -> RequestOutputQueue | None:
    """Update the crash counts of `queues`, the requests that were open when an engine crashed, and
    return the poison request if there is one. `is_external`: the cause of the crash was outside of
    the engine (for example the OOM killer) or is unknown.

    A request is a suspect if the engine had scheduled it and sent no output for it. Suspects are
    marked, and the engine runs them one at a time. The crash is counted against a single suspect
    only.
    """
    suspects = []
    for queue in queues:
        if queue.has_progressed:
            queue.is_suspect = False
            queue.num_deaths = queue.num_external_deaths = 0
        elif queue.num_waiting_tokens < 0:
            queue.is_suspect = True
            suspects.append(queue)
    if not suspects:
        # A crash without suspects has another cause: reset all counts.
        for queue in queues:
            queue.num_deaths = queue.num_external_deaths = 0
    if len(suspects) != 1:
        return None
    (queue,) = suspects
    queue.num_deaths += 1
    queue.num_external_deaths += is_external
    max_deaths = MAX_EXTERNAL_DEATHS if queue.num_external_deaths else MAX_DEATHS
    return queue if queue.num_deaths >= max_deaths else None


def fail_poison_request(router: OutputRouter, *, is_external: bool) -> bool:
    """Fail the poison request among the open requests of a crashed engine; returns whether there
    was a poison request."""
    cause = find_poison_request(router.queues, is_external=is_external)
    if cause is not None:
        router.finish(
            cause,
            f"the engine died {cause.num_deaths} times while it computed this request, which is "
            "not retried",
        )
    return cause is not None


def resume_order(queue: RequestOutputQueue) -> tuple[int, int]:
    """Sort key for resuming requests: requests that had started and are not suspects, then suspects
    (which the engine runs one at a time), then requests that never started.

    Suspects with fewer crashes go first, so that a crash with an unrelated cause is not counted
    against the same request twice.
    """
    if queue.is_suspect:
        return 1, queue.num_deaths
    return (0 if queue.has_started else 2), 0

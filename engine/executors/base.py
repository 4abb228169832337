"""Executor: the message channel between an engine and its workers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from engine.transport.channels import Pollables
from hpu.protocol import FromWorker, ToWorker, WarmupProgress, WorkerReady

Report = Callable[[WarmupProgress], None]
"""Takes the progress of the workers' start and of each wake-up."""


class Executor(ABC):
    """A group of workers that all take every message. The results of plans arrive in the order of
    the plans; other answers may overtake them. All methods run on the same thread."""

    rank = 0
    """Rank of this engine in a group of engines, a rank each, that must decide the same steps; the
    decisions of rank 0 hold for all ranks."""
    pollables = Pollables()
    """Ready when `receive` may return a message."""
    poll_s = math.inf
    """Interval at which to call `receive` for a result, if `pollables` do not announce it."""

    @abstractmethod
    def start(self, report: Report) -> WorkerReady:
        """Load the model, measure memory, warm up. Raises ConfigError or EngineDied with the
        worker's message."""

    @abstractmethod
    def send(self, message: ToWorker) -> None:
        """Send a message; does not wait for its answer. Send GrammarMasks when the result of their
        plan is the next to arrive, and before another plan. Send WARM_UP_NEXT only with no plan in
        flight."""

    @abstractmethod
    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        """Messages that have arrived since the last call: StepResult, WarmedBuckets, AdapterLoaded
        and BlocksFetched, one for all workers. `waits`: wait for a message if there is none. Raises
        EngineDied when a worker has died."""

    @abstractmethod
    def call(self, name: str, level: int = 0) -> str:
        """Send a WorkerCall (except WAKE_UP and WARM_UP_NEXT) to every worker and wait for the
        answer. Raises UserError or RequestFailed with a worker's message, or EngineDied."""

    @abstractmethod
    def wake_up(self) -> WorkerReady:
        """End the sleep that a SLEEP call started. Raises RequestFailed with the message of a
        worker, which then stays asleep, or EngineDied."""

    def share(self, data: bytes) -> bytes:
        """The `data` of rank 0, on all ranks; waits for rank 0. Raises EngineDied when this rank
        has sent other plans than rank 0."""
        return data

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and wait for them; safe to call twice."""

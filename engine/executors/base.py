"""Executor: starts the workers of an engine and exchanges messages with them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from engine.transport.channels import Pollables
from hpu.protocol import FromWorker, ToWorker, WarmupProgress, WorkerReady

Report = Callable[[WarmupProgress], None]
"""Callback for the progress of the workers' start-up and of each wake-up."""


class Executor(ABC):
    """A group of workers that all receive every message. The results of plans arrive in the order
    of the plans; other answers may arrive before them. Call all methods on the same thread."""

    rank = 0
    """Rank of this engine among engines that must make the same decisions (an engine per rank);
    rank 0 decides for all."""
    pollables = Pollables()
    """Readable when `receive` may return a message."""
    poll_s = math.inf
    """Interval in seconds at which to call `receive` for a result if `pollables` do not announce
    results."""

    @abstractmethod
    def start(self, report: Report) -> WorkerReady:
        """Load the model, measure memory and warm up. Raises ConfigError, or EngineDied with the
        message of a worker process."""

    @abstractmethod
    def send(self, message: ToWorker) -> None:
        """Send a message without waiting for its answer. Send GrammarMasks when their plan is the
        oldest plan in flight, and before another plan. Send WARM_UP_NEXT only with no plan in
        flight."""

    @abstractmethod
    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        """Messages that have arrived since the last call: StepResult, WarmedBuckets, AdapterLoaded
        and BlocksFetched, one for the whole group of workers. `waits`: block until there is a
        message. Raises EngineDied or ConfigError when a worker has died or failed."""

    @abstractmethod
    def call(self, name: str, level: int = 0) -> str:
        """Send a WorkerCall (except WAKE_UP and WARM_UP_NEXT) to every worker and wait for the
        answer. Raises UserError or RequestFailed with a worker's message, or EngineDied."""

    @abstractmethod
    def wake_up(self) -> WorkerReady:
        """End the sleep that a SLEEP call started. Raises EngineDied, or RequestFailed with the
        message of a worker that failed and stays asleep."""

    def share(self, data: bytes) -> bytes:
        """Broadcast `data` of rank 0 to all ranks; waits for the other ranks. Raises EngineDied
        when this rank has sent other plans or masks than rank 0."""
        return data

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and wait for them; safe to call twice."""

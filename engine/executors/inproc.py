"""InprocExecutor: a worker in the engine's process, called by the engine's thread."""

from typing import TYPE_CHECKING

from engine.executors.base import Executor, Report
from engine.transport.channels import Pollables, Waiter, WakeUp
from hpu.protocol import (
    FromWorker,
    Handlers,
    StepPlan,
    ToWorker,
    WarmedBuckets,
    WorkerCall,
    WorkerReady,
)

if TYPE_CHECKING:
    from hpu.worker.worker import Worker

POLL_S = 0.001
"""Interval at which to poll for a result while the engine waits for other engines: device events
have no file descriptor. Seconds."""


class InprocExecutor(Executor):
    """Executor without a worker process and without message copies. The worker's Python runs on the
    engine's thread.

    On a CPU, `send` computes the plan, so its result exists before the next plan is scheduled, and
    no mask is deferred. On a card, masks are deferred as with other executors.
    """

    poll_s = POLL_S

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._handlers: Handlers = {
            StepPlan: self._submit,
            WorkerCall: self._warm_up_next,
        }
        self._num_inflight = 0
        self._warmed: list[WarmedBuckets] = []
        self._arrival = WakeUp()
        worker.on_message = self._arrival.set
        self.pollables = Pollables(fds=(self._arrival.fd,))
        self._waiter = Waiter(*self.pollables)
        self._report: Report = lambda progress: None

    def start(self, report: Report) -> WorkerReady:
        self._report = report
        return self._worker.start(report)

    def send(self, message: ToWorker) -> None:
        self._handlers.get(type(message), self._worker.handle)(message)

    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        self._arrival.clear()
        messages: list[FromWorker] = [*self._warmed, *self._worker.take_messages()]
        self._warmed.clear()
        # With a plan in flight, `waits` means waiting for its result, so that ranks in lockstep
        # collect the same plan.
        if self._num_inflight and (waits or self.has_result()):
            self._num_inflight -= 1
            messages.append(self._worker.collect())
        elif waits and not messages:
            self._waiter.wait()
            messages += self._worker.take_messages()
        return messages

    def has_result(self) -> bool:
        """Whether the oldest result can be collected without waiting."""
        return self._worker.has_result()

    def call(self, name: str, level: int = 0) -> str:
        return self._worker.call(name, level)

    def wake_up(self) -> WorkerReady:
        return self._worker.wake_up(self._report)

    def close(self) -> None:
        self._worker.close()

    def _submit(self, plan: StepPlan) -> None:
        self._worker.submit(plan)
        self._num_inflight += 1

    def _warm_up_next(self, call: WorkerCall) -> None:
        self._warmed.append(self._worker.idle() or WarmedBuckets([], 0))

"""MultiprocExecutor: runs each worker in its own process and watches the processes. All workers
share one sending and one receiving socket of the engine. The launcher decides where the processes
run."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied, ProfileWritten, RequestFailed, UserError
from config.log import applied as applied_log
from engine.executors.base import Executor, Report
from engine.executors.worker_launcher import WorkerLauncher
from engine.executors.worker_main import WorkerOrders
from engine.process.child_process import ProcessEnd
from engine.transport.channels import (
    PairSocket,
    Pollables,
    Publisher,
    Waiter,
    ZmqContext,
    new_token,
)
from hpu.protocol import (
    WAKE_UP,
    AdapterLoaded,
    BlocksFetched,
    DropFiles,
    FetchBlocks,
    FromWorker,
    GrammarMasks,
    StepPlan,
    StepResult,
    ToWorker,
    WarmedBuckets,
    WarmupProgress,
    WorkerAnswer,
    WorkerCall,
    WorkerFailed,
    WorkerReady,
)

logger = logging.getLogger(__name__)

LAST_MESSAGE_S = 0.2
"""Maximum wait for the last message of a worker that has died; seconds."""

STOP_TIMEOUT_S = 5.0

STALLED_S = 300.0
"""Time without messages during a warm-up after which the bucket of each worker is logged; seconds.
Longer than a compilation usually takes. Ranks that disagree on a bucket would block forever."""


_NOUNS = {
    StepPlan: "plans",
    GrammarMasks: "masks",
    FetchBlocks: "reads",
    DropFiles: "files to delete",
}
"""Names of message types in errors about unread messages; all other types are named "calls"."""


def _merge_results(results: Sequence[StepResult], output: int) -> StepResult:
    """Result of rank `output`, with the corrupt blocks of all ranks."""
    merged = results[output]
    merged.corrupt_loads = sorted(set().union(*(result.corrupt_loads for result in results)))
    return merged


def _merge_reads(reads: Sequence[BlocksFetched], output: int) -> BlocksFetched:
    """Merge a read of all ranks. A block has been read if every rank has read its part."""
    corrupt = {index for read in reads for index in read.corrupt}
    missing = {index for read in reads for index in read.missing} - corrupt
    seconds = max(read.seconds for read in reads)
    return BlocksFetched(seconds, sorted(missing), sorted(corrupt))


def _merge_loads(loads: Sequence[AdapterLoaded], output: int) -> AdapterLoaded:
    """The first failed load, if any, else the load of rank `output`."""
    return next((loaded for loaded in loads if loaded.error is not None), loads[output])


def _merge_answers(answers: Sequence[WorkerAnswer], output: int) -> WorkerAnswer:
    """The first failed answer, else the answer of rank 0, the only rank that writes files with
    user-given names."""
    return next((answer for answer in answers if answer.error is not None), answers[0])


def _merge_warmed(warmed: Sequence[WarmedBuckets], output: int) -> WarmedBuckets:
    """Message of rank `output`; all ranks warm up the same bucket."""
    return warmed[output]


def _merge_ready(messages: Sequence[WorkerReady], output: int) -> WorkerReady:
    """Report of the output rank. With several ranks, it contains the facts of all ranks. Raises
    EngineDied if a rank has a different number of blocks."""
    merged = messages[output]
    for rank, message in enumerate(messages):
        if message.num_blocks != merged.num_blocks:
            raise EngineDied(
                f"worker {rank} has {message.num_blocks} KV blocks, "
                f"worker {output} has {merged.num_blocks}"
            )
    facts = [message.rank_facts(rank) for rank, message in enumerate(messages)]
    merged.ranks = facts if len(facts) > 1 else []
    return merged


MERGES: Mapping[type, Callable[..., FromWorker]] = {
    StepResult: _merge_results,
    BlocksFetched: _merge_reads,
    AdapterLoaded: _merge_loads,
    WorkerAnswer: _merge_answers,
    WarmedBuckets: _merge_warmed,
    WorkerReady: _merge_ready,
}
"""Functions that merge a message of every rank, by message type. Arguments: the messages by rank,
and the output rank. All ranks send messages of the same type in the same order."""


class WorkerProcess:
    """A worker's process."""

    def __init__(
        self,
        orders: WorkerOrders,
        launcher: WorkerLauncher,
        on_exit: Callable[[ProcessEnd], None],
    ) -> None:
        self.name = f"worker {orders.ranks.rank}"
        self.child = launcher.launch(self.name, orders, on_exit)
        self.bucket = ""
        """Bucket that the worker is preparing in a warm-up; empty if none is known."""


class MultiprocExecutor(Executor):
    """Executor with a process for each worker. Call all methods on the same thread.

    Every worker receives every message; only the worker `output_rank` sends results, unless the
    plan loads blocks. The first death of a worker is reported at once: to the caller that waits for
    a message, and through `on_death`, which is called on another thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: WorkerLauncher,
        on_death: Callable[[EngineDied], None],
        *,
        num_workers: int = 1,
        output_rank: int = 0,
    ) -> None:
        """`output_rank`: first rank of the last pipeline stage. The executor owns and closes
        `launcher`."""
        self._launcher = launcher
        self._on_death = on_death
        self._has_died = threading.Lock()
        token = new_token()
        self._context = ZmqContext(token)
        places = launcher.place(num_workers)
        self._plans: Publisher[ToWorker] = self._context.bind_publisher(
            launcher.endpoint("plans"), num_workers
        )
        self._results: PairSocket[None, tuple[int, FromWorker]] = self._context.bind_collector(
            launcher.endpoint("results"), tuple[int, FromWorker]
        )
        self._workers = [
            WorkerProcess(
                WorkerOrders(
                    config,
                    self._plans.endpoint,
                    self._results.endpoint,
                    token,
                    ranks,
                    applied_log(),
                    sends_results=ranks.rank == output_rank,
                ),
                launcher,
                self._on_exit,
            )
            for ranks in places
        ]
        self._output_rank = output_rank
        self._sentinels = [worker.child.sentinel for worker in self._workers]
        self.pollables = Pollables([self._results], self._sentinels)
        self._waiter = Waiter(*self.pollables)
        self._report: Report = lambda progress: None
        self._handlers: Mapping[type, Callable[[int, Any], None]] = {
            WarmupProgress: self._on_progress,
            WorkerFailed: self._on_failure,
            StepResult: self._on_result,
        }
        """Handlers of messages by type, called with (rank, message); messages of other types are
        merged."""
        self._parts: dict[type, list[deque[FromWorker]]] = {
            kind: [deque() for _ in self._workers] for kind in MERGES
        }
        """Received messages that wait for the other ranks' messages, by type and rank."""
        self._merged: list[FromWorker] = []
        self._answers: deque[WorkerAnswer] = deque()
        self._ready: deque[WorkerReady] = deque()
        self._outboxes: Mapping[type, deque[Any]] = {
            WorkerAnswer: self._answers,
            WorkerReady: self._ready,
        }
        """Queues of merged messages that `receive` does not return, by type."""
        self._loads: deque[bool] = deque()
        """For each plan in flight, whether it loads blocks and there are several workers; if so,
        every worker sends its result."""
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [worker.child.pid for worker in self._workers]

    def start(self, report: Report) -> WorkerReady:
        self._report = report
        while not self._ready:
            self._wait()
        self._wait_for_connections()
        return self._ready.popleft()

    def send(self, message: ToWorker) -> None:
        if not self._plans.send(message):
            raise self._send_error(_NOUNS.get(type(message), "calls"))
        if type(message) is StepPlan:
            self._loads.append(bool(message.loaded_blocks) and len(self._workers) > 1)

    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        while not self._merged and (waits or self._take()):
            if waits:
                self._wait()
        merged, self._merged = self._merged, []
        return merged

    def call(self, name: str, level: int = 0) -> str:
        self.send(WorkerCall(name, level))
        while not self._answers:
            self._wait()
        answer = self._answers.popleft()
        if answer.is_refusal:
            raise UserError(answer.error or name, code=answer.code)
        if answer.error is not None:
            raise RequestFailed(answer.error)
        return answer.value

    def wake_up(self) -> WorkerReady:
        try:
            self.call(WAKE_UP)
        finally:
            # If a rank failed, the reports of the other ranks remain: drop them.
            for parts in self._parts[WorkerReady]:
                parts.clear()
        return self._ready.popleft()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._workers:
            worker.child.stop()
        for worker in self._workers:
            worker.child.close(STOP_TIMEOUT_S)
        self._plans.close()
        self._results.close()
        self._context.close()
        self._launcher.close()

    def _on_exit(self, end: ProcessEnd) -> None:
        if self._has_died.acquire(blocking=False):
            self._on_death(_death(end))

    def _send_error(self, what: str) -> ConfigError | EngineDied:
        """Error that explains why a worker has not read `what`."""
        while (received := self._results.receive()) is not None:
            if isinstance(received[1], WorkerFailed):
                return self._cause(received[1])
        for worker in self._workers:
            if worker.child.poll() is not None:
                return _death(worker.child.end)
        return EngineDied(f"a worker does not read its {what}")

    def _wait_for_connections(self) -> None:
        """Wait until every worker has subscribed to the plans. Raises EngineDied when a worker has
        died."""
        self._results.stop_accepting()
        waiter = Waiter([self._plans], self._sentinels)
        while not self._plans.has_all_peers():
            waiter.wait()
            for worker in self._workers:
                if worker.child.poll() is not None:
                    raise _death(worker.child.end)

    def _wait(self) -> None:
        """Wait for a message of any worker. Raises EngineDied when a worker has died."""
        if self._take():
            return
        is_silent = not self._waiter.wait(STALLED_S if self._is_warming_up else math.inf)
        if self._take():
            return
        if is_silent:
            self._log_stall()
        for worker in self._workers:
            if worker.child.poll() is not None:
                Waiter([self._results]).wait(LAST_MESSAGE_S)
                if not self._take():
                    raise _death(worker.child.end)
                return

    def _take(self) -> bool:
        """Handle a worker's message, if any has arrived; returns whether there was a message.
        Raises ConfigError or EngineDied when a worker failed."""
        received = self._results.receive()
        if received is None:
            return False
        rank, message = received
        self._handlers.get(type(message), self._on_part)(rank, message)
        return True

    def _on_progress(self, rank: int, progress: WarmupProgress) -> None:
        worker = self._workers[rank]
        worker.bucket = progress.bucket or worker.bucket
        if rank == self._output_rank:
            self._report(progress)

    def _on_failure(self, rank: int, failure: WorkerFailed) -> None:
        raise self._cause(failure)

    def _on_result(self, rank: int, result: StepResult) -> None:
        parts = self._parts[StepResult]
        parts[rank].append(result)
        output = parts[self._output_rank]
        while output and (not self._loads[0] or all(parts)):
            if self._loads.popleft():
                self._merge(StepResult)
            else:
                self._merged.append(output.popleft())

    def _on_part(self, rank: int, message: FromWorker) -> None:
        kind = type(message)
        self._workers[rank].bucket = ""
        self._parts[kind][rank].append(message)
        if all(self._parts[kind]):
            self._merge(kind)

    def _merge(self, kind: type) -> None:
        parts = [messages.popleft() for messages in self._parts[kind]]
        merged = MERGES[kind](parts, self._output_rank)
        self._outboxes.get(kind, self._merged).append(merged)

    @property
    def _is_warming_up(self) -> bool:
        return any(worker.bucket for worker in self._workers)

    def _log_stall(self) -> None:
        """Log the bucket of each worker: different buckets show ranks that wait for each other."""
        places = (f"{each.name}: {each.bucket or 'no bucket'}" for each in self._workers)
        logger.warning(
            "The warm-up has made no progress for %.0f s: %s", STALLED_S, "; ".join(places)
        )

    def _cause(self, failure: WorkerFailed) -> ConfigError | EngineDied:
        """Error of the group after `failure` of a worker. The first report may be a consequence of
        another worker's end: a worker killed by a signal is the cause, else the earliest failure
        that arrives within the launcher's `notice_s`."""
        failures = [failure]
        deadline = time.monotonic() + self._launcher.notice_s
        others = [worker for worker in self._workers if worker.child.poll() is None]
        while len(self._workers) > 1 and others and time.monotonic() < deadline:
            if any((worker.child.poll() or 0) < 0 for worker in self._workers):
                break
            time.sleep(0.01)
            while (received := self._results.receive()) is not None:
                if isinstance(received[1], WorkerFailed):
                    failures.append(received[1])
        for worker in self._workers:
            if (worker.child.poll() or 0) < 0:
                return _death(worker.child.end)
        return _failure(min(failures, key=lambda failure: failure.time))


def _death(end: ProcessEnd) -> EngineDied:
    return EngineDied(end.description, is_external=end.is_external)


def _failure(message: WorkerFailed) -> ConfigError | EngineDied:
    if message.is_profile:
        return ProfileWritten(message.message)
    if message.is_config:
        return ConfigError(message.message)
    error = EngineDied(message.message)
    error.is_logged = True
    return error

"""MultiprocExecutor: runs each worker in its own process and watches the processes. A single socket
sends to all workers and a single socket receives from all workers, so the work of the engine's
thread does not grow with their number. The launcher decides where the processes run."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied, ProfileWritten, RequestFailed, UserError
from config.log import applied as applied_log
from engine.executors.base import Executor
from engine.executors.worker_launcher import WorkerLauncher
from engine.executors.worker_main import WorkerOrders
from engine.process.child_process import ProcessEnd
from engine.transport.channels import PairSocket, Publisher, Waiter, ZmqContext, new_token
from hpu.protocol import (
    WAKE_UP,
    WARM_UP_NEXT,
    AdapterLoaded,
    BlocksFetched,
    DropAdapter,
    DropFiles,
    FetchBlocks,
    FromWorker,
    GrammarMasks,
    LoadAdapter,
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
"""Maximum wait for the last message of a dead worker; seconds."""

STOP_TIMEOUT_S = 5.0

STALLED_S = 300.0
"""Time without any message during a start, after which the log names the bucket of each worker.
More than a compilation takes; ranks that disagree wait for each other forever."""


class WorkerProcess:
    """A worker's process and its received messages."""

    def __init__(
        self,
        orders: WorkerOrders,
        launcher: WorkerLauncher,
        on_exit: Callable[[ProcessEnd], None],
    ) -> None:
        self.name = f"worker {orders.ranks.rank}"
        self.child = launcher.launch(self.name, orders, on_exit)
        self.bucket = ""
        """The bucket that the worker prepares, while it starts."""
        self.messages: deque[FromWorker] = deque()
        """Received messages that were not taken yet: at most the results of all plans in flight and
        an answer."""
        self.warmed: deque[WarmedBuckets] = deque()
        self.loaded: deque[AdapterLoaded] = deque()
        """Loaded adapters in the order of the calls, which is the same on all workers."""
        self.fetched: deque[BlocksFetched] = deque()
        """Finished reads in the order of the calls, which is the same on all workers."""


class MultiprocExecutor(Executor):
    """Executor with a process for each worker. All methods must be called on the same thread.

    Every worker receives every message; the worker `output_rank` sends the results. The first death
    of a worker is reported at once: to the caller that waits for a message, and by `on_death`,
    which is called on another thread.
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
        """`output_rank`: the first rank of the last pipeline stage. The executor owns and closes
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
        self._output = self._workers[output_rank]
        self._sentinels = [worker.child.sentinel for worker in self._workers]
        self._waiter = Waiter([self._results], self._sentinels)
        self._on_progress: Callable[[WarmupProgress], None] = lambda progress: None
        self._loads: deque[bool] = deque()
        """For each plan in flight, whether it loads blocks: then every worker sends its result."""
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [worker.child.pid for worker in self._workers]

    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        self._on_progress = on_progress
        messages = [self._next_message(worker) for worker in self._workers]
        self._wait_for_connections()
        return self._ready(messages)

    def submit(self, plan: StepPlan) -> None:
        self._send(plan, "plans")
        self._loads.append(bool(plan.loaded_blocks))

    def submit_masks(self, masks: GrammarMasks) -> None:
        self._send(masks, "masks")

    def has_result(self) -> bool:
        while not self._output.messages:
            if not self._receive():
                return False
        return True

    def collect(self) -> StepResult:
        result = self._next_result(self._output)
        if self._loads.popleft() and len(self._workers) > 1:
            others = [
                self._next_result(worker) for worker in self._workers if worker is not self._output
            ]
            parts = [set(output.corrupt_loads) for output in (result, *others)]
            result.corrupt_loads = sorted(set().union(*parts))
        return result

    def call(self, name: str, level: int = 0) -> str:
        # The answer of rank 0, whose files have the names that the user gave.
        answer = self._call(WorkerCall(name, level))[0]
        assert isinstance(answer, WorkerAnswer), f"{answer} in place of an answer to {name}"
        return answer.value

    def wake_up(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        self._on_progress = on_progress
        return self._ready(self._call(WorkerCall(WAKE_UP)))

    def warm_up_next(self) -> bool:
        """Warm up on all workers of a group. False for a single worker, which detects by itself
        that it is idle."""
        if len(self._workers) == 1:
            return False
        known = [len(worker.warmed) for worker in self._workers]
        self._send(WorkerCall(WARM_UP_NEXT), "calls")
        while any(
            len(worker.warmed) == count for worker, count in zip(self._workers, known, strict=True)
        ):
            self._wait()
        return self._output.warmed[-1].num_deferred > 0

    def load_adapter(self, message: LoadAdapter) -> None:
        self._send(message, "calls")

    def drop_adapter(self, message: DropAdapter) -> None:
        self._send(message, "calls")

    def take_loaded(self) -> list[AdapterLoaded]:
        self.has_result()
        loaded = []
        while all(worker.loaded for worker in self._workers):
            answers = [worker.loaded.popleft() for worker in self._workers]
            errors = [answer for answer in answers if answer.error is not None]
            loaded.append((errors or answers)[0])
        return loaded

    def wait_loaded(self, timeout_s: float) -> None:
        if not self._receive():
            self._waiter.wait(timeout_s)
        for worker in self._workers:
            if worker.child.poll() is not None:
                self._wait()

    def fetch_blocks(self, message: FetchBlocks) -> None:
        self._send(message, "reads")

    def drop_files(self, message: DropFiles) -> None:
        self._send(message, "files to delete")

    def take_fetched(self) -> list[BlocksFetched]:
        self.has_result()
        fetched = []
        while all(worker.fetched for worker in self._workers):
            fetched.append(_merged([worker.fetched.popleft() for worker in self._workers]))
        return fetched

    def wait_fetched(self, timeout_s: float) -> None:
        self.wait_loaded(timeout_s)

    def take_warmed(self) -> list[WarmedBuckets]:
        self.has_result()
        # A bucket counts as warmed up once every worker has captured it; all workers use the same
        # order.
        count = min(len(worker.warmed) for worker in self._workers)
        warmed = [[worker.warmed.popleft() for _ in range(count)] for worker in self._workers]
        return warmed[self._workers.index(self._output)]

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

    def _send(self, message: ToWorker, what: str) -> None:
        if not self._plans.send(message):
            raise self._send_error(what)

    def _send_error(self, what: str) -> ConfigError | EngineDied:
        """Why a worker does not read `what`."""
        while (received := self._results.receive()) is not None:
            if isinstance(received[1], WorkerFailed):
                return self._cause(received[1])
        for worker in self._workers:
            if worker.child.poll() is not None:
                return _death(worker.child.end)
        return EngineDied(f"a worker does not read its {what}")

    def _call(self, call: WorkerCall) -> list[FromWorker]:
        """Every worker's answer, by rank. Raises the first error among the answers."""
        self._send(call, "calls")
        answers = [self._next_answer(worker) for worker in self._workers]
        for answer in answers:
            if isinstance(answer, WorkerAnswer) and answer.is_refusal:
                raise UserError(answer.error or call.name, code=answer.code)
            if isinstance(answer, WorkerAnswer) and answer.error is not None:
                raise RequestFailed(answer.error)
        return answers

    def _ready(self, messages: list[FromWorker]) -> WorkerReady:
        """Report of the worker `output_rank`, with the facts of all workers of a group. Raises
        EngineDied if another worker has a different number of blocks."""
        output = messages[self._workers.index(self._output)]
        assert isinstance(output, WorkerReady), f"{output} before {self._output.name} was ready"
        ranks = []
        for rank, (worker, message) in enumerate(zip(self._workers, messages, strict=True)):
            assert isinstance(message, WorkerReady), f"{message} before {worker.name} was ready"
            ranks.append(message.rank_facts(rank))
            if message.num_blocks != output.num_blocks:
                raise EngineDied(
                    f"{worker.name} has {message.num_blocks} KV blocks, "
                    f"{self._output.name} has {output.num_blocks}"
                )
        output.ranks = ranks if len(ranks) > 1 else []
        return output

    def _next_result(self, worker: WorkerProcess) -> StepResult:
        result = self._next_message(worker)
        assert isinstance(result, StepResult), f"{result} in place of a step's result"
        return result

    def _next_answer(self, worker: WorkerProcess) -> FromWorker:
        """The next answer of `worker`, which may arrive before the results of plans in flight."""
        while True:
            for index, message in enumerate(worker.messages):
                if isinstance(message, WorkerAnswer | WorkerReady):
                    del worker.messages[index]
                    return message
            self._wait()

    def _next_message(self, worker: WorkerProcess) -> FromWorker:
        while not worker.messages:
            self._wait()
        return worker.messages.popleft()

    def _wait_for_connections(self) -> None:
        """Wait until every worker is subscribed to the plans. Raises EngineDied when a worker is
        dead."""
        self._results.stop_accepting()
        waiter = Waiter([self._plans], self._sentinels)
        while not self._plans.has_all_peers():
            waiter.wait()
            for worker in self._workers:
                if worker.child.poll() is not None:
                    raise _death(worker.child.end)

    def _wait(self) -> None:
        """Wait for a message of any worker. Raises EngineDied when a worker is dead."""
        if self._receive():
            return
        is_silent = not self._waiter.wait(STALLED_S if self._is_warming_up else None)
        if self._receive():
            return
        if is_silent:
            self._log_stall()
        for worker in self._workers:
            if worker.child.poll() is not None:
                Waiter([self._results]).wait(LAST_MESSAGE_S)
                if not self._receive():
                    raise _death(worker.child.end)
                return

    def _receive(self) -> bool:
        """Take a message if there is any; returns whether there was. Raises ConfigError or
        EngineDied when a worker failed."""
        received = self._results.receive()
        if received is None:
            return False
        rank, message = received
        worker = self._workers[rank]
        if isinstance(message, WorkerFailed):
            raise self._cause(message)
        if isinstance(message, WarmedBuckets):
            worker.warmed.append(message)
        elif isinstance(message, AdapterLoaded):
            worker.loaded.append(message)
        elif isinstance(message, BlocksFetched):
            worker.fetched.append(message)
        elif not isinstance(message, WarmupProgress):
            worker.bucket = ""
            worker.messages.append(message)
        else:
            worker.bucket = message.bucket or worker.bucket
            if worker is self._output:
                self._on_progress(message)
        return True

    @property
    def _is_warming_up(self) -> bool:
        return any(worker.bucket for worker in self._workers)

    def _log_stall(self) -> None:
        """Name the bucket of each worker: a difference shows ranks that wait for each other."""
        places = (f"{each.name}: {each.bucket or 'no bucket'}" for each in self._workers)
        logger.warning("The start has not moved for %.0f s, %s", STALLED_S, "; ".join(places))

    def _cause(self, failure: WorkerFailed) -> ConfigError | EngineDied:
        """The error of the group after `failure` of a worker. The first report may be a
        consequence: a worker killed by a signal is the cause, else the earliest failure that
        arrives within the launcher's `notice_s`."""
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


def _merged(answers: list[BlocksFetched]) -> BlocksFetched:
    """Combined reads of all workers: a block is present if every worker has read its part."""
    corrupt = {index for answer in answers for index in answer.corrupt}
    missing = {index for answer in answers for index in answer.missing} - corrupt
    seconds = max(answer.seconds for answer in answers)
    return BlocksFetched(seconds, sorted(missing), sorted(corrupt))


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

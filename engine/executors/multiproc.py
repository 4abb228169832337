"""Executor: the worker is a process of its own, reached over a PAIR of sockets and watched."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied, RequestFailed, UserError
from engine.executors.worker_main import WorkerOrders
from engine.process.child_process import Child
from engine.transport.channels import PairSocket, Waiter, ZmqContext, endpoint, new_token
from hpu.protocol import (
    WAKE_UP,
    FromWorker,
    GrammarMasks,
    StepPlan,
    StepResult,
    ToWorker,
    Warmed,
    WarmupProgress,
    WorkerAnswer,
    WorkerCall,
    WorkerFailed,
    WorkerReady,
)

LAST_WORDS_S = 0.2
"""How long a dead worker's last message may take to come out of the socket."""

STOP_TIMEOUT_S = 5.0


class MultiprocExecutor:
    """One worker process. `start`, `submit` and `collect` belong to one thread.

    A death is reported at once: to whoever waits in `collect`, and by `on_death`, called on a
    thread of its own, when nobody does.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: str,
        on_death: Callable[[str], None],
        *,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        rank: int = 0,
    ) -> None:
        self._name = f"worker {rank}"
        self._closed = threading.Event()
        token = new_token()
        self._wires = ZmqContext(token)
        address = endpoint(directory, f"w{rank}.sock")
        self._line: PairSocket[ToWorker, FromWorker] = self._wires.bind_pair(address, FromWorker)
        self._child = Child(
            self._name,
            command,
            WorkerOrders(config, address, token, rank, _log_level()),
            environment=environment,
            on_exit=on_death,
        )
        self._waiter = Waiter([self._line], [self._child.sentinel])
        self._early: deque[FromWorker] = deque()
        """Messages that `has_result` or `call` found; at most as many as plans are in flight."""
        self._warmed: list[Warmed] = []
        self._on_progress: Callable[[WarmupProgress], None] = lambda progress: None

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self._child.pid

    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        self._on_progress = on_progress
        self._waiter.wait()
        # The worker has sent something, or is dead: nobody else may connect.
        self._wires.stop_accepting()
        ready = self._receive()
        assert isinstance(ready, WorkerReady), f"{ready} before the worker was ready"
        return ready

    def submit(self, plan: StepPlan) -> None:
        if not self._line.send(plan):
            raise self._unread("plans")

    def submit_masks(self, masks: GrammarMasks) -> None:
        if not self._line.send(masks):
            raise self._unread("masks")

    def has_result(self) -> bool:
        while not self._early:
            message = self._line.receive()
            if message is None:
                return False
            if not self._is_aside(message):
                self._early.append(message)
        return True

    def collect(self) -> StepResult:
        result = self._receive()
        assert isinstance(result, StepResult), f"{result} in place of a step's result"
        return result

    def call(self, name: str, level: int = 0) -> str:
        answer = self._ask(WorkerCall(name, level))
        assert isinstance(answer, WorkerAnswer), f"{answer} in place of an answer to {name}"
        return answer.value

    def wake_up(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        self._on_progress = on_progress
        ready = self._ask(WorkerCall(WAKE_UP))
        assert isinstance(ready, WorkerReady), f"{ready} in place of a worker that is ready"
        return ready

    def _ask(self, call: WorkerCall) -> WorkerAnswer | WorkerReady:
        """What the worker answers, unless that is an error."""
        if not self._line.send(call):
            raise self._unread("calls")
        answer = self._arrived()
        while not isinstance(answer, WorkerAnswer | WorkerReady):
            self._early.append(answer)
            answer = self._arrived()
        if isinstance(answer, WorkerReady):
            return answer
        if answer.is_refusal:
            raise UserError(answer.error or call.name, code=answer.code)
        if answer.error is not None:
            raise RequestFailed(answer.error)
        return answer

    def warm_up_next(self) -> bool:
        """The worker sees by itself that no plan comes."""
        return False

    def take_warmed(self) -> list[Warmed]:
        self.has_result()
        warmed, self._warmed = self._warmed, []
        return warmed

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._child.close(STOP_TIMEOUT_S)
        self._line.close()
        self._wires.close()

    def _unread(self, what: str) -> ConfigError | EngineDied:
        """Why nothing more can be sent. A worker that is gone does not read either: the system
        tells of its end a moment later than the socket does."""
        end = time.monotonic() + LAST_WORDS_S
        while self._child.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        while (message := self._line.receive()) is not None:
            if isinstance(message, WorkerFailed):
                return _failure(message)
        if self._child.poll() is not None:
            return EngineDied(self._child.exit_description)
        return EngineDied(f"{self._name} does not read its {what}")

    def _is_aside(self, message: FromWorker) -> bool:
        """Whether the message answers nobody: of the kind that only `take_warmed` gives, which is
        kept for that, or progress, which is told."""
        if isinstance(message, Warmed):
            self._warmed.append(message)
            return True
        if isinstance(message, WarmupProgress):
            self._on_progress(message)
            return True
        return False

    def _receive(self) -> FromWorker:
        message = self._early.popleft() if self._early else self._arrived()
        if isinstance(message, WorkerFailed):
            raise _failure(message)
        return message

    def _arrived(self) -> FromWorker:
        """The next message from the socket. Raises EngineDied when there will be none."""
        while True:
            message = self._line.receive()
            if message is None:
                self._waiter.wait()
                message = self._line.receive()
            if message is None and self._child.poll() is not None:
                Waiter([self._line]).wait(LAST_WORDS_S)
                message = self._line.receive()
                if message is None:
                    raise EngineDied(self._child.exit_description)
            if isinstance(message, WorkerFailed):
                raise _failure(message)
            if message is not None and not self._is_aside(message):
                return message


def _failure(said: WorkerFailed) -> ConfigError | EngineDied:
    return ConfigError(said.message) if said.is_config else EngineDied(said.message)


def _log_level() -> str:
    return logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()

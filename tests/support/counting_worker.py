"""CountingWorker: a worker that samples 0, 1, 2, ... for each sequence, and the real processes
around it. `EngineConfig.model` configures it: `counting:step_s=0.01,refuse=1`."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_executor import FakeExecutor, worker_ready

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied, RequestFailed, UserError
from config.owned_directory import LOCK
from engine.core.engine_process import run as run_engine
from engine.executors import worker_main as child
from engine.executors.base import Executor
from engine.executors.inproc import InprocExecutor
from engine.executors.multiproc import MultiprocExecutor
from engine.executors.worker_launcher import LocalLauncher
from engine.process.child_process import exit_with_parent, read_orders
from engine.process.engine_orders import EngineOrders
from engine.transport.segments import DIRECTORY
from hpu.protocol import (
    SINGLE_RANK,
    SLEEP,
    WAKE_WEIGHTS,
    FromWorker,
    Ranks,
    RequestSampling,
    StepPlan,
    StepResult,
    ToWorker,
    WarmedBuckets,
    WarmupProgress,
    WorkerReady,
)

NO_MEMORY = "no memory is left"
REFUSAL = "dtype float16 is not among bfloat16, float32"

ROOT = Path(__file__).parents[2]


class CountingWorker:
    """Takes `start_s` to start and `step_s` per step.

    Options: `hangs`: seconds of further start time, in a bucket that depends on the rank; `refuse`:
    raise ConfigError at start; `refuse_if`: the same if that file exists; `crash_at`: fail at that
    step; `poison`: end by `signal` (0: raise) at a request with that token; `several`: a decode
    returns up to that number of tokens; `corrupt`: the worker of that rank finds a wrong checksum
    in the first block of each load; `later`: number of buckets to prepare when idle, each in
    `later_s`; `no_memory`: fail at wake-up."""

    def __init__(self, config: EngineConfig, ranks: Ranks = SINGLE_RANK) -> None:
        words = config.model.partition(":")[2]
        self._manners = dict(word.split("=") for word in words.split(",") if word)
        ready = worker_ready(
            num_blocks=4096, block_size=16, max_model_len=4096, vocab_size=5000, eos_token_ids=()
        )
        self._executor = FakeExecutor(ready, config.scheduler.max_num_seqs, count)
        ready.max_tokens_per_step = int(self._manner("several", 1))
        self._is_corrupt = self._manner("corrupt", -1) == ranks.rank
        self._rank = ranks.rank
        self._executor.host[0] = [0] * ready.block_size
        self._calls: list[str] = []
        self._left = ready.num_deferred = int(self._manner("later"))
        self.on_message: Callable[[], None] = lambda: None

    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        on_progress(WarmupProgress("load", 1, 2))
        if "hangs" in self._manners:
            name = f"prompt bucket ({1 + self._rank}, 16, 0)"
            on_progress(WarmupProgress("warmup", 0, 1, bucket=name))
            time.sleep(self._manner("hangs"))
        time.sleep(self._manner("start_s"))
        if self._manner("refuse") or os.path.exists(self._manners.get("refuse_if", "")):
            raise ConfigError(REFUSAL)
        return self._executor.start(on_progress)

    def submit(self, plan: StepPlan) -> None:
        if plan.step >= self._manner("crash_at", float("inf")):
            raise ValueError(f"step {plan.step} is one too many")
        poison = self._manner("poison", -1)
        if any(poison in request.tokens.cast("B").cast("I") for request in plan.new_requests):
            # A real step takes long enough for the engine's last message to be sent.
            time.sleep(0.02)
            number = int(self._manner("signal", signal.SIGKILL))
            if not number:
                raise MemoryError(NO_MEMORY)
            os.kill(os.getpid(), number)
        self._executor.submit(plan)

    def handle(self, message: ToWorker) -> None:
        self._executor.send(message)

    def take_messages(self) -> list[FromWorker]:
        return []

    @property
    def lacks_masks(self) -> bool:
        return self._executor.lacks_masks

    def has_result(self) -> bool:
        return False

    def collect(self) -> StepResult:
        time.sleep(self._manner("step_s"))
        result = self._executor.collect()
        if self._is_corrupt and self._executor.plans[result.step].loaded_blocks:
            result.corrupt_loads = [0]
        return result

    def idle(self) -> WarmedBuckets | None:
        assert self._executor.num_in_flight == 0, "idle with plans in flight"
        if not self._left:
            return None
        time.sleep(self._manner("later_s"))
        self._left -= 1
        return WarmedBuckets([], self._left)

    def call(self, name: str, level: int = 0) -> str:
        """Returns the number of plans so far; a second call is refused, except for sleep."""
        if name in (SLEEP, WAKE_WEIGHTS):
            return self._executor.call(name, level)
        if name in self._calls:
            raise UserError(f"{name} was called before", code="twice")
        self._calls.append(name)
        return f"{name} after {len(self._executor.plans)} plans"

    def wake_up(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        """Fails with the option `no_memory`."""
        on_progress(WarmupProgress("warmup", 1, 2))
        if self._manner("no_memory"):
            raise RequestFailed(NO_MEMORY)
        self._executor._report = on_progress
        return self._executor.wake_up()

    def close(self) -> None:
        self._executor.close()

    def _manner(self, name: str, default: float = 0.0) -> float:
        return float(self._manners.get(name, default))


def count(history: int, generated: int, sampling: RequestSampling) -> int:
    """Rule of the next token: outputs are 0, 1, 2, ..."""
    return generated


def counting_executor(config: EngineConfig) -> InprocExecutor:
    """An executor with a CountingWorker in this process."""
    worker: Any = CountingWorker(config)
    return InprocExecutor(worker)


def make_counting_executor(
    config: EngineConfig,
    directory: str,
    on_death: Callable[[EngineDied], None],
    ranks: Ranks = SINGLE_RANK,
) -> Executor:
    """The counterpart of engine.executors.select for a CountingWorker."""
    if config.executor == "mp":
        return MultiprocExecutor(
            config, LocalLauncher(directory, counting_command("worker")), on_death
        )
    return counting_executor(config)


def counting_command(process: str) -> list[str]:
    """Command of an `engine` or `worker` process with a CountingWorker."""
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    code = f"import sys; sys.path[:0] = {paths}; import counting_worker as c; c.{process}_main()"
    return [sys.executable, "-c", code]


def engine_main() -> None:
    sys.exit(run_engine(read_orders(EngineOrders), make_counting_executor))


def worker_main() -> None:
    make_worker: Any = CountingWorker
    orders = read_orders(child.WorkerOrders)
    exit_with_parent()
    sys.exit(child.run(orders, make_worker))


def sockets_in(directory: str) -> list[str]:
    """Files in a socket directory, without its lock and the link to the files of large messages;
    empty if the directory is gone."""
    if not os.path.isdir(directory):
        return []
    return sorted({*os.listdir(directory)} - {LOCK, DIRECTORY})

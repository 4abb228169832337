"""A simulated device without a model that returns tokens after a given time, which may be zero: as
an executor, as a worker process, and as an engine with that worker."""

import argparse
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.engine import EngineConfig
from config.errors import EngineDied
from engine.core.engine_process import run as run_engine
from engine.executors import worker_main as child
from engine.executors.base import Executor, Report
from engine.executors.multiproc import MultiprocExecutor
from engine.executors.worker_launcher import LocalLauncher
from engine.process.child_process import read_orders
from engine.process.engine_orders import EngineOrders
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import (
    DECODE,
    BucketLimits,
    FromWorker,
    Ranks,
    StepPlan,
    StepResult,
    ToWorker,
    WarmedBuckets,
    WorkerReady,
)

Bucket = tuple[int, int, int, int]
VOCAB_SIZE, END_TOKEN, TOKEN = 50_000, 2, 7


class NullDevice(Executor):
    """Takes `step_s` per plan, or per decode in it, in sequence, and samples the next of `tokens`
    for every request. `ready` is its WorkerReady; None derives it from `config`.

    A result reports `step_s` plus the idle seconds before its plan.
    """

    lacks_masks = False

    def __init__(
        self,
        config: EngineConfig,
        step_s: float = 0.0,
        *,
        tokens: Sequence[int] = (TOKEN,),
        ready: WorkerReady | None = None,
    ) -> None:
        self._ready = ready or null_ready(config)
        self._tokens = tokens
        self._step_s = step_s
        self._free_at = 0.0
        self._running: deque[tuple[float, StepResult]] = deque()

    def start(self, report: Report) -> WorkerReady:
        return self._ready

    def send(self, message: ToWorker) -> None:
        if type(message) is StepPlan:
            self.submit(message)

    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        return [self.collect()] if self._running and (waits or self.has_result()) else []

    def submit(self, plan: StepPlan) -> None:
        begin = max(self._free_at, time.perf_counter())
        seconds = begin - self._free_at + self._step_s
        self._free_at = begin + self._step_s * plan.decode_steps
        token = self._tokens[plan.step % len(self._tokens)]
        result = StepResult(plan.step, [token] * num_sampling(plan), seconds=[seconds])
        if plan.decode_steps > 1:
            counts = Counter(index for launch in plan.launches for index in launch.req_indices)
            result.token_counts = list(counts.values())
        self._running.append((self._free_at, result))

    def has_result(self) -> bool:
        return bool(self._running) and time.perf_counter() >= self._running[0][0]

    def collect(self) -> StepResult:
        done_at, result = self._running.popleft()
        if (left := done_at - time.perf_counter()) > 0:
            time.sleep(left)
        return result

    handle = send
    """A worker receives all messages in the same way as an executor."""

    def take_messages(self) -> list[FromWorker]:
        return []

    def call(self, name: str, level: int = 0) -> str:
        return name

    def wake_up(self, report: Report = print) -> WorkerReady:
        return self._ready

    def idle(self) -> WarmedBuckets | None:
        return None

    def close(self) -> None:
        self._running.clear()


def num_sampling(plan: StepPlan) -> int:
    """Number of requests that sample in a plan."""
    return sum(
        len(launch.req_indices) if launch.phase == DECODE else sum(launch.samples)
        for launch in plan.launches
    )


def null_ready(config: EngineConfig) -> WorkerReady:
    """WorkerReady with the cache and context of `config`, which must be set, and all buckets of its
    strategy."""
    cache, schedule, longest = config.cache, config.scheduler, config.max_model_len
    assert cache.num_blocks and cache.block_size and longest, "a null device measures nothing"
    limits = BucketLimits(
        block_size=cache.block_size,
        max_model_len=longest,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.token_budget(),
        max_prefill_batch=schedule.prefill_batch(),
        num_blocks=cache.num_blocks,
        prefix_caching=cache.enable_prefix_caching,
    )
    buckets = BucketTable.make(config.buckets, limits).buckets
    return empty_ready(limits, VOCAB_SIZE, (END_TOKEN,), buckets)


def empty_ready(
    limits: BucketLimits, vocab_size: int, eos_token_ids: tuple[int, ...], buckets: list[Bucket]
) -> WorkerReady:
    """WorkerReady of a device without memory, for a cache and context of `limits`."""
    return WorkerReady(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        buckets=buckets,
        device="null",
        dtype="none",
        weight_bytes=0,
        kv_bytes=0,
        graph_bytes=0,
        total_bytes=0,
        load_s=0.0,
        warmup_s=0.0,
        bucket_limits=limits,
    )


def null_engine_command(step_s: float) -> list[str]:
    """Command of an engine process that starts a worker process with a NullDevice."""
    return _command("engine", step_s)


def _command(process: str, step_s: float) -> list[str]:
    return [sys.executable, __file__, process, str(step_s)]


def _make_executor(
    step_s: float,
    config: EngineConfig,
    directory: str,
    on_death: Callable[[EngineDied], None],
    ranks: Ranks,
) -> Executor:
    del ranks
    launcher = LocalLauncher(directory, _command("worker", step_s))
    return MultiprocExecutor(config, launcher, on_death, num_workers=config.parallel.world_size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("process", choices=("engine", "worker"))
    parser.add_argument("step_s", type=float)
    arguments = parser.parse_args()
    step_s: float = arguments.step_s
    if arguments.process == "engine":
        return run_engine(read_orders(EngineOrders), partial(_make_executor, step_s))

    def make_worker(config: EngineConfig, ranks: Ranks) -> Any:
        return NullDevice(config, step_s)

    return child.run(read_orders(child.WorkerOrders), make_worker)


if __name__ == "__main__":
    sys.exit(main())

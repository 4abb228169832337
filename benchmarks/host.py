"""Host time of one engine turn, without any model: microseconds a decode step for several numbers
of rows, with an empty and a long waiting line. Run: python benchmarks/host.py"""

import argparse
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.buckets import BucketConfig
from config.engine import EngineConfig, ScheduleConfig
from config.sampling import SamplingParams
from engine.core import EngineCore
from engine.messages import AddRequest
from engine.prefix import block_hashes
from hpu.buckets import BucketLimits, BucketTable
from hpu.step import DECODE, Masks, StepPlan, StepResult, WarmupProgress, WorkerReady

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
PROMPT_TOKENS = 64


class NullExecutor:
    """Answers every plan at once, with token 7 for each sampling row."""

    def __init__(self, ready: WorkerReady) -> None:
        self.seconds = 0.0
        """Spent in here, which is not the engine's."""
        self._ready = ready
        self._results: deque[StepResult] = deque()

    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        return self._ready

    def submit(self, plan: StepPlan) -> None:
        start = time.perf_counter()
        count = 0
        for launch in plan.launches:
            count += len(launch.rows) if launch.phase == DECODE else sum(launch.samples)
        self._results.append(StepResult(plan.step, [7] * count, seconds=[0.001]))
        self.seconds += time.perf_counter() - start

    def mask(self, masks: Masks) -> None:
        return

    def has_result(self) -> bool:
        return False

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()


def make_core(num_rows: int) -> tuple[EngineCore, NullExecutor]:
    num_blocks = 2 * num_rows * MAX_MODEL_LEN // BLOCK_SIZE // 8
    schedule = ScheduleConfig(
        max_num_seqs=num_rows, max_num_batched_tokens=2048, max_waiting=200_000
    )
    limits = BucketLimits(
        BLOCK_SIZE, MAX_MODEL_LEN, num_rows, 2048, schedule.prompts_a_launch(), num_blocks, True
    )
    ready = WorkerReady(
        num_blocks, BLOCK_SIZE, MAX_MODEL_LEN, 1000, (2,), [], "null", "none", 0, 0, 0, 0, 0.0, 0.0
    )
    table = BucketTable.make(BucketConfig(strategy="exact"), limits)
    config = EngineConfig(model="none", schedule=schedule)
    executor = NullExecutor(ready)
    return EngineCore(config, executor, ready, table, time.perf_counter), executor


def measure(num_rows: int, num_waiting: int, num_steps: int) -> tuple[float, float]:
    """Median and 99th percentile of a turn, in microseconds, with all rows decoding."""
    core, executor = make_core(num_rows)
    for key in range(num_rows + num_waiting):
        prompt = memoryview(array("I", [key % 997] * PROMPT_TOKENS).tobytes())
        core.add(
            AddRequest(key, prompt, SamplingParams(max_tokens=num_steps + 1000, ignore_eos=True)),
            block_hashes(prompt, BLOCK_SIZE),
        )
    while core.stats().running < num_rows:
        core.turn()
    for _ in range(50):
        core.turn()
    times = []
    for _ in range(num_steps):
        executor.seconds = 0.0
        start = time.perf_counter()
        core.turn()
        times.append(time.perf_counter() - start - executor.seconds)
    times.sort()
    return statistics.median(times) * 1e6, times[int(len(times) * 0.99)] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 100_000])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print("| rows | waiting | median us a turn | 99th percentile us |")
    print("| ---: | ---: | ---: | ---: |")
    for num_waiting in arguments.waiting:
        for num_rows in arguments.rows:
            median, high = measure(num_rows, num_waiting, arguments.steps)
            print(f"| {num_rows} | {num_waiting} | {median:.0f} | {high:.0f} |", flush=True)


if __name__ == "__main__":
    main()

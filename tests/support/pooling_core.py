"""A real EngineCore with workers in plain Python that read texts, and fail on a text that is
truncated, read twice or too long for its bucket."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from fake_executor import worker_ready
from slow_model import raw

from config.buckets import BucketConfig
from config.engine import EngineConfig, SchedulerConfig
from config.execution import WarmupConfig
from config.params.pooling import PoolingFacts, PoolingParams
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.core.loop import make_table
from engine.executors.base import Executor, Report
from engine.transport.messages import AddRequest, Finish
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import (
    PREFILL,
    BucketLimits,
    FromWorker,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerReady,
)

FACTS = PoolingFacts(
    tasks=("embed", "token_embed"), width=3, token_width=3, normalizes=True, dimensions=(2,)
)


def vector(tokens: Sequence[int], cut: int = 0) -> bytes:
    """A vector that identifies the tokens and the requested dimensions."""
    return array("f", [sum(tokens), len(tokens), cut]).tobytes()


class PoolingExecutor(Executor):
    """An Executor that computes texts when its results are collected."""

    def __init__(self, ready: WorkerReady) -> None:
        self.ready = ready
        self.plans: list[StepPlan] = []
        self.max_in_flight = 0
        self._in_flight: deque[bytes] = deque()

    def start(self, report: Report) -> WorkerReady:
        return self.ready

    def send(self, message: ToWorker) -> None:
        assert isinstance(message, StepPlan), f"a pooling model gets {message}"
        plan = message
        self.plans.append(plan)
        self._in_flight.append(msgspec.msgpack.encode(plan))
        self.max_in_flight = max(self.max_in_flight, len(self._in_flight))

    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        """Results only when awaited, so that plans are made one step ahead."""
        return [self._collect()] if waits else []

    def _collect(self) -> StepResult:
        plan = msgspec.msgpack.decode(self._in_flight.popleft(), type=StepPlan)
        result = StepResult(plan.step, [], seconds=[0.001] * len(plan.launches))
        read = [place for launch in plan.launches for place in launch.req_indices]
        assert sorted(read) == list(range(len(plan.texts))), f"{read} of {len(plan.texts)} texts"
        for launch in plan.launches:
            batch, query, blocks = launch.bucket
            assert (launch.phase, blocks) == (PREFILL, 0) and len(launch.req_indices) <= batch
            assert not any(launch.samples)
            for place, count in zip(launch.req_indices, launch.query_lens, strict=True):
                text = plan.texts[place]
                tokens = array("I", bytes(text.tokens))
                assert len(tokens) == count <= query
                rows = [[token] for token in tokens] if text.by_token else [list(tokens)]
                data = b"".join(vector(row, text.dimensions) for row in rows)
                # A text that ends with 13 has no result.
                found = (-1, b"") if tokens[-1] == 13 else (len(rows), data)
                result.vectors.append((found[0], memoryview(found[1])))
        return result

    def call(self, name: str, level: int = 0) -> str:
        raise AssertionError(f"{name} was called")

    def wake_up(self) -> WorkerReady:
        raise AssertionError("it never slept")

    def close(self) -> None:
        self._in_flight.clear()


class PoolingRig:
    """An engine of a pooling model without processes, which checks the invariants after every
    step."""

    def __init__(
        self, facts: PoolingFacts | None = FACTS, *, unwarmed: str = "run", **schedule: Any
    ) -> None:
        self.ready = worker_ready(num_blocks=0 if facts else 64, block_size=4, max_model_len=32)
        self.ready.pooling = facts
        config = EngineConfig(
            model="none",
            scheduler=SchedulerConfig(
                **{"max_num_seqs": 4, "max_num_batched_tokens": 32, **schedule}
            ),
            buckets=BucketConfig(strategy="exponential"),
            warmup=WarmupConfig(on_unwarmed_shape=unwarmed),
        )
        limits = BucketLimits.for_pooling(config.scheduler, block_size=4, max_model_len=32)
        if facts:
            self.ready.bucket_limits = limits
            self.ready.buckets = BucketTable.make(config.buckets, limits).buckets
        self.table = make_table(config, self.ready)
        self.executor = PoolingExecutor(self.ready)
        self.core = build_core(config, self.executor, self.ready, self.table, lambda: 1.0)
        self.vectors: dict[int, tuple[int, bytes]] = {}
        self.finished: dict[int, Finish] = {}

    def add(self, key: int, tokens: Sequence[int], **asked: Any) -> None:
        params = PoolingParams(**{"task": "embed", **asked})
        self.send(AddRequest(key, raw(list(tokens)), SamplingParams(), pooling=params))

    def send(self, message: AddRequest) -> None:
        self.core.add_request(message, [])

    def step(self) -> None:
        for _, message in self.core.step():
            for key, rows, data in message.vectors:
                assert key not in self.vectors, f"the vectors of {key} came twice"
                self.vectors[key] = (rows, bytes(data))
            self.finished.update((finish.key, finish) for finish in message.finished)
        self.core.check()

    def run(self) -> None:
        for _ in range(200):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("200 steps were not enough")

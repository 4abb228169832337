"""Adapters that workers read, combined with a sleep of the engine."""

from collections import deque
from collections.abc import Iterator

import pytest
from fake_executor import FakeExecutor, worker_ready
from slow_model import hashed_token, raw

from config.buckets import BucketConfig
from config.engine import EngineConfig
from config.lora.info import LoRAInfo
from config.params.lora import LoRAConfig
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.core.engine_core import EngineCore
from engine.transport.messages import UNLOAD_ADAPTER, AddRequest
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import (
    SLEEP,
    WAKE_UP,
    AdapterLoaded,
    DropAdapter,
    FromWorker,
    LoadAdapter,
    WorkerReady,
)


class AdapterExecutor(FakeExecutor):
    """Fake workers that have read an adapter when the engine waits for them."""

    def __init__(self, ready: WorkerReady) -> None:
        super().__init__(ready, 32, hashed_token(50))
        self.loads: deque[LoadAdapter] = deque()
        self.error: str | None = None
        self.is_idle = False
        self.handlers[LoadAdapter] = self.loads.append
        self.handlers[DropAdapter] = lambda message: None

    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        if self.loads and (waits or self.is_idle):
            return [AdapterLoaded(self.loads.popleft().content, self.error)]
        return super().receive(waits=waits)

    def call(self, name: str, level: int = 0) -> str:
        assert not self.loads, "a call while adapters are read"
        return super().call(name, level)


@pytest.fixture
def executor() -> Iterator[AdapterExecutor]:
    made = AdapterExecutor(worker_ready())
    yield made
    assert not made.loads


def core_of(executor: AdapterExecutor) -> EngineCore:
    ready = executor.ready
    config = EngineConfig("none", lora=LoRAConfig(enable_lora=True, max_loras=1))
    table = BucketTable.make(BucketConfig(strategy="exact"), ready.bucket_limits)
    adapters = [LoRAInfo("a", "/a", "hash-a", 4, 100), LoRAInfo("b", "/b", "hash-b", 4, 100)]
    return build_core(config, executor, ready, table, lambda: 0.0, adapters=adapters)


def ask(core: EngineCore, key: int, name: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    core.add_request(AddRequest(key, raw([5, 6]), sampling, adapter=f"hash-{name}"), [])


def finished(core: EngineCore, executor: AdapterExecutor) -> list[tuple[int, str]]:
    ends = []
    executor.is_idle = True
    while core.has_work:
        for _, message in core.step():
            ends += [(finish.key, finish.reason) for finish in message.finished]
        core.check()
    return ends


@pytest.mark.parametrize("error", [None, "no such file"])
def test_a_sleep_waits_until_adapters_are_read(
    executor: AdapterExecutor, error: str | None
) -> None:
    core = core_of(executor)
    ask(core, 1, "a")
    ask(core, 2, "b")
    executor.error = error

    core.control(SLEEP, {})
    core.control(UNLOAD_ADAPTER, {"lora_name": "a"})
    core.control(WAKE_UP, {})
    executor.error = None
    ask(core, 3, "b")
    ends = finished(core, executor)

    assert ends == [(1, "error"), (2, "error"), (3, "length")]
    assert executor.calls[0][0] == SLEEP

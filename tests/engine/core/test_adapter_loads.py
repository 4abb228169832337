"""Adapters that workers read, and a sleep of the engine."""

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
from hpu.protocol import SLEEP, WAKE_UP, AdapterLoaded, DropAdapter, LoadAdapter


class AdapterExecutor(FakeExecutor):
    """Workers that have read an adapter once `wait_loaded` is called."""

    loads: deque[LoadAdapter]
    loaded: list[AdapterLoaded]
    dropped: list[DropAdapter]
    error: str | None

    def load_adapter(self, message: LoadAdapter) -> None:
        self.loads.append(message)

    def drop_adapter(self, message: DropAdapter) -> None:
        self.dropped.append(message)

    def take_loaded(self) -> list[AdapterLoaded]:
        loaded, self.loaded = self.loaded, []
        return loaded

    def wait_loaded(self, timeout_s: float) -> None:
        self.loaded.append(AdapterLoaded(self.loads.popleft().content, self.error))

    def call(self, name: str, level: int = 0) -> str:
        assert not self.loads and not self.loaded, "a call while adapters are read"
        return super().call(name, level)


@pytest.fixture
def executor() -> Iterator[AdapterExecutor]:
    made = AdapterExecutor(worker_ready(), 32, hashed_token(50))
    made.loads, made.loaded, made.dropped, made.error = deque(), [], [], None
    yield made
    assert not made.loads and not made.loaded


def core_of(executor: AdapterExecutor) -> EngineCore:
    ready = executor.ready
    config = EngineConfig("none", lora=LoRAConfig(enable_lora=True, max_loras=1))
    table = BucketTable.make(BucketConfig(strategy="exact"), ready.bucket_limits)
    adapters = [LoRAInfo("a", "/a", "hash-a", 4, 100), LoRAInfo("b", "/b", "hash-b", 4, 100)]
    return build_core(config, executor, ready, table, lambda: 0.0, adapters=adapters)


def ask(core: EngineCore, key: int, name: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    core.add_request(AddRequest(key, raw([5, 6]), sampling, adapter=f"hash-{name}"), [])


def finished(core: EngineCore) -> list[tuple[int, str]]:
    ends = []
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
    ends = finished(core)

    assert ends == [(1, "error"), (2, "error"), (3, "length")]
    assert executor.calls[0][0] == SLEEP

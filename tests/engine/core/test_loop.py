"""engine/core/loop.py: an engine without work, and an engine whose requests wait for an adapter."""

import dataclasses
import threading
import time
from typing import Any, cast

import pytest
from core_rig import CoreRig
from counting_worker import counting_executor
from delays import least
from engine_rig import asking, counting_config, prompt_of
from waits import WAIT_S, wait_for

from config.engine import EngineConfig
from config.errors import EngineDied
from config.lora.info import LoRAInfo
from config.params.lora import LoRAConfig
from engine.core import loop
from engine.core.loop import EngineLoop
from engine.transport.messages import Abort, AddRequest, FromEngine, StepOutput
from hpu.protocol import AdapterLoaded, LoadAdapter


def test_an_idle_engine_returns_freed_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineLoop(EngineConfig(model="m"), lambda *_: None, num_front_ends=1)
    trims: list[str] = []

    def trim() -> None:
        trims.append("trim")
        engine.receive(0, Abort([2]))

    monkeypatch.setattr(loop, "TRIM_AFTER_S", 0.01)
    monkeypatch.setattr(loop, "trim_memory", trim)
    core = CoreRig().core
    engine.receive(0, Abort([1]))

    found = []
    for _ in range(2):
        engine._wait(core)
        found += [cast(Any, engine._inbox.get())[1] for _ in range(engine._inbox.qsize())]

    assert found == [Abort([1]), Abort([2])]
    assert trims == ["trim"]


def test_requests_that_wait_for_an_adapter_wake_the_engine_only_by_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a read adapter, a new request and a deadline wake the engine."""
    config = dataclasses.replace(counting_config(), lora=LoRAConfig(enable_lora=True, max_loras=1))
    ends: dict[int, str] = {}

    def emit(front_end: int | None, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            ends.update((finish.key, finish.reason) for finish in message.finished)

    engine = EngineLoop(config, emit, num_front_ends=1)
    info = LoRAInfo("a", "/a", "hash-a", 4, 100)
    monkeypatch.setattr(engine._adapters, "read_configured", lambda: [info])
    executor: Any = counting_executor(config)
    worker, receive = executor._worker, executor.receive
    handle, num_receives, loads = worker.handle, 0, []

    def count_receive(**options: Any) -> Any:
        nonlocal num_receives
        num_receives += 1
        return receive(**options)

    executor.receive = count_receive
    worker.handle = lambda message: (
        loads.append(message) if isinstance(message, LoadAdapter) else handle(message)
    )
    thread = threading.Thread(target=run_until_stopped, args=(engine, executor))
    thread.start()

    def ask(key: int, adapter: str = "", timeout_s: float = 0.0) -> None:
        message = AddRequest(key, memoryview(prompt_of(1, 2)), asking(3), adapter=adapter)
        message.timeout_s = timeout_s
        engine.receive(0, message)

    ask(1, "hash-a")
    wait_for(lambda: bool(loads))

    def wake_ups() -> int:
        before = num_receives
        time.sleep(0.3)
        return num_receives - before

    # The engine may have work left in the first interval.
    num_idle = least(wake_ups, 1)
    ask(2)
    wait_for(lambda: 2 in ends)
    ask(3, "hash-a", timeout_s=0.05)
    wait_for(lambda: 3 in ends)
    waiting = 1 not in ends
    answers = [AdapterLoaded("hash-a")]
    worker.take_messages = lambda: [answers.pop()] if answers else []
    worker.on_message()
    wait_for(lambda: 1 in ends)
    engine.stop(EngineDied("the test is over"))
    thread.join(WAIT_S)

    assert not thread.is_alive() and waiting
    assert num_idle == 0
    assert ends == {1: "length", 2: "length", 3: "error"}


def run_until_stopped(engine: EngineLoop, executor: Any) -> None:
    with pytest.raises(EngineDied):
        engine.run(executor)

"""engine/core/loop.py: an engine without work."""

from typing import Any, cast

import pytest
from core_rig import CoreRig

from config.engine import EngineConfig
from engine.core import loop
from engine.core.loop import EngineLoop
from engine.transport.messages import Abort


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

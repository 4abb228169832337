"""Steps of a back end's start are reported as progress of the worker's start."""

import pytest

from config.engine import EngineConfig
from config.progress import OnStep
from hpu.backends.base import Backend
from hpu.distributed.process_groups import Ranks
from hpu.protocol import WarmupProgress
from hpu.worker import worker as worker_module
from hpu.worker.worker import Worker


class Selected(Exception):
    """Raised to end the start early."""


def test_steps_of_the_back_end_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[WarmupProgress] = []

    def select(_: EngineConfig, __: Ranks, on_step: OnStep) -> Backend:
        on_step("compiling kernels, 3 s")
        raise Selected

    monkeypatch.setattr(worker_module, "select_backend", select)

    with pytest.raises(Selected):
        Worker(EngineConfig("m")).start(seen.append)

    assert seen == [WarmupProgress("compiling kernels, 3 s", 0, 0)]

"""A worker's main loop, in a thread, before a device that finishes a step when it is told to."""

import contextlib
import threading
import time
from collections import deque
from typing import Any

import pytest

from engine.executors import worker_main as child
from engine.transport.channels import Waiter, ZmqContext, endpoint
from hpu.protocol import FromWorker, StepPlan, StepResult, ToWorker, WarmupProgress

LAST = 99


class Ended(Exception):
    """The loop was told to stop."""


class HeldDevice:
    """As much of a worker as plans need. A step is done when `finish` says so."""

    lacks_masks = False

    def __init__(self) -> None:
        self.launched: list[int] = []
        self._running: deque[int] = deque()
        self._done = threading.Semaphore(0)

    def finish(self) -> None:
        self._done.release()

    def submit(self, plan: StepPlan) -> None:
        if plan.step == LAST:
            raise Ended
        self.launched.append(plan.step)
        self._running.append(plan.step)

    def has_result(self) -> bool:
        is_done = self._done.acquire(blocking=False)
        if is_done:
            self._done.release()
        return is_done

    def collect(self) -> StepResult:
        assert self._done.acquire(timeout=20), "a step that nobody finished was waited for"
        return StepResult(self._running.popleft(), [])


def test_a_plan_that_comes_while_another_runs_is_launched_before_that_one_is_done(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "PLAN_DUE_S", 60.0)
    address = endpoint(str(tmp_path_factory.mktemp("s")), "w")
    zmq_context, device = ZmqContext("token"), HeldDevice()
    engine = zmq_context.bind_pair(address, FromWorker)
    thread = threading.Thread(target=_work, args=(zmq_context, address, device))
    thread.start()
    assert isinstance(_next(engine), WarmupProgress)
    engine.send(StepPlan(0, []))
    engine.send(StepPlan(1, []))
    device.finish()
    assert _next(engine).step == 0

    time.sleep(0.05)  # as an engine needs for its next plan; the worker has nothing to do but wait
    engine.send(StepPlan(2, []))
    deadline = time.monotonic() + 10
    while len(device.launched) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    launched = device.launched.copy()
    device.finish()
    device.finish()
    steps = [_next(engine).step, _next(engine).step]
    engine.send(StepPlan(LAST, []))
    thread.join(10)
    engine.close()
    zmq_context.close()

    assert launched == [0, 1, 2]
    assert steps == [1, 2]
    assert not thread.is_alive()


def _work(zmq_context: ZmqContext, address: str, device: HeldDevice) -> None:
    line = zmq_context.connect_pair(address, ToWorker)
    line.send(WarmupProgress("warmup", 1, 1))
    worker: Any = device
    with contextlib.suppress(Ended):
        child._serve(worker, line, 2)
    line.close()


def _next(line: Any) -> Any:
    Waiter([line]).wait(10)
    return line.receive()

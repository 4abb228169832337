"""A worker's main loop, in a thread, with a device that finishes a step on command."""

import contextlib
import os
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from engine_rig import counting_config
from waits import WAIT_S

from engine.executors import worker_main as child
from engine.process.child_process import PARENT_DIED, python_command, write_orders
from engine.transport.channels import Waiter, ZmqContext, endpoint
from hpu.protocol import (
    SINGLE_RANK,
    WARM_UP_NEXT,
    FromWorker,
    StepPlan,
    StepResult,
    ToWorker,
    WarmedBuckets,
    WarmupProgress,
    WorkerCall,
)

LAST = 99


class Ended(Exception):
    """The loop received the message to stop."""


class HeldDevice:
    """The parts of a worker that plans need; `finish` ends a step."""

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

    def take_messages(self) -> list[FromWorker]:
        return []

    def has_result(self) -> bool:
        is_done = self._done.acquire(blocking=False)
        if is_done:
            self._done.release()
        return is_done

    def collect(self) -> StepResult:
        assert self._done.acquire(timeout=WAIT_S), "a step that nobody finished was waited for"
        return StepResult(self._running.popleft(), [])


def test_a_plan_is_launched_while_the_previous_plan_runs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "PLAN_DUE_S", 60.0)
    folder = str(tmp_path_factory.mktemp("s"))
    plans, results = endpoint(folder, "plans"), endpoint(folder, "results")
    zmq_context, device = ZmqContext("token"), HeldDevice()
    orders = child.WorkerOrders(counting_config(), plans, results, "token", SINGLE_RANK)
    engine = zmq_context.bind_publisher(plans, 1)
    line = zmq_context.bind_collector(results, tuple[int, FromWorker])
    thread = threading.Thread(target=_work, args=(zmq_context, orders, device))
    thread.start()
    assert isinstance(_next(line), WarmupProgress)
    Waiter([engine]).wait(WAIT_S)
    assert engine.has_all_peers()
    engine.send(StepPlan(0, []))
    engine.send(StepPlan(1, []))
    device.finish()
    assert _next(line).step == 0

    time.sleep(0.05)  # Time between two plans of an engine; the worker only waits.
    engine.send(StepPlan(2, []))
    deadline = time.monotonic() + WAIT_S
    while len(device.launched) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    launched = device.launched.copy()
    device.finish()
    device.finish()
    steps = [_next(line).step, _next(line).step]
    engine.send(StepPlan(LAST, []))
    thread.join(WAIT_S)
    engine.close()
    line.close()
    zmq_context.close()

    assert launched == [0, 1, 2]
    assert steps == [1, 2]
    assert not thread.is_alive()


class SilentDevice(HeldDevice):
    """A device that reports no finished step before `collect`."""

    def __init__(self) -> None:
        super().__init__()
        self.finish()
        self.num_running_at_warmup: list[int] = []

    def has_result(self) -> bool:
        return False

    def idle(self) -> WarmedBuckets | None:
        self.num_running_at_warmup.append(len(self._running))
        return None


class ListedMessages:
    """A channel that delivers the messages of a list in order."""

    def __init__(self, *messages: ToWorker) -> None:
        self._messages = deque(messages)
        self.sent: list[FromWorker] = []

    def clear_wake(self) -> None:
        pass

    def receive(self) -> ToWorker:
        return self._messages.popleft()

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("sends_results", [True, False])
def test_a_plan_in_flight_is_finished_before_a_bucket_is_warmed_up(sends_results: bool) -> None:
    # Without `sends_results`, the engine already has the result from another rank.
    warm_up = WorkerCall(WARM_UP_NEXT)
    channel: Any = ListedMessages(StepPlan(0, []), warm_up, StepPlan(LAST, []))
    device: Any = SilentDevice()
    with pytest.raises(Ended):
        child._serve(device, channel, 2, sends_results=sends_results)
    assert device.num_running_at_warmup == [0]
    kinds = [type(message) for message in channel.sent]
    assert kinds == ([StepResult] if sends_results else []) + [WarmedBuckets]


def _work(zmq_context: ZmqContext, orders: child.WorkerOrders, device: HeldDevice) -> None:
    channel = child.StepChannel(zmq_context, orders)
    channel.send(WarmupProgress("warmup", 1, 1))
    worker: Any = device
    with contextlib.suppress(Ended):
        child._serve(worker, channel, 2)
    channel.close()


def _next(line: Any) -> Any:
    Waiter([line]).wait(WAIT_S)
    rank, message = line.receive()
    assert rank == 0
    return message


def test_a_worker_whose_parent_dies_while_it_imports_torch_ends(tmp_path: Path) -> None:
    slow = "import time; print('importing', flush=True); time.sleep(600)"
    (tmp_path / "torch.py").write_text(slow)
    with subprocess.Popen(
        python_command("engine.executors.worker_main", "worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        write_orders(worker.stdin.fileno(), child.WorkerOrders(counting_config(), "", "", "token"))
        assert worker.stdout.readline() == b"importing\n"

        worker.stdin.close()

        assert worker.wait(WAIT_S) == PARENT_DIED

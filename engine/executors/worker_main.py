"""Entry point of a worker process: receives plans over the step channel and sends results.

The parent process sets the worker's environment, before torch or a vendor runtime reads it.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from config.engine import EngineConfig
from config.errors import CheckpointError, ConfigError, ProfileWritten, RequestFailed, UserError
from config.log import DEFAULT, LogConfig
from config.log import setup as setup_log
from config.native import panics_as_errors
from engine.process.child_process import (
    Terminated,
    exit_with_parent,
    ignore_stop_signal,
    read_orders,
    run_child,
    set_title,
)
from engine.transport.channels import PairSocket, Waiter, WakeUp, ZmqContext
from hpu.numa import bind_worker
from hpu.protocol import (
    SINGLE_RANK,
    WAKE_UP,
    WARM_UP_NEXT,
    FromWorker,
    Ranks,
    StepPlan,
    ToWorker,
    WarmedBuckets,
    WarmupProgress,
    WorkerAnswer,
    WorkerCall,
    WorkerFailed,
)

if TYPE_CHECKING:
    from hpu.worker.worker import Worker

logger = logging.getLogger(__name__)

LINGER_S = 2.0

PLAN_DUE_S = 0.02
"""How long the worker polls for the next plan after a plan or a result while it has fewer plans in
flight than the maximum; many times longer than an engine needs to schedule a plan. Seconds."""

POLL_S = 50e-6
"""Interval at which the worker polls for a plan and for a result during PLAN_DUE_S; seconds."""


class WorkerOrders(msgspec.Struct, frozen=True):
    """The arguments of a worker process."""

    config: EngineConfig
    plans: str
    """Address on which the engine publishes its messages."""
    results: str
    """Address on which the engine receives the workers' messages."""
    token: str
    """Token that the worker presents to the engine."""
    ranks: Ranks = SINGLE_RANK
    log: LogConfig = DEFAULT
    sends_results: bool = True
    """Whether this worker sends all results: one worker of a group does. The other workers send
    only the results of plans that load blocks."""


class StepChannel:
    """A worker's end of the channel to the engine. All workers of a group share the engine's
    sockets."""

    def __init__(self, context: ZmqContext, orders: WorkerOrders) -> None:
        self._rank = orders.ranks.rank
        self._plans: PairSocket[None, ToWorker] = context.connect_subscriber(orders.plans, ToWorker)
        self._results: PairSocket[tuple[int, FromWorker], None] = context.connect_collector(
            orders.results
        )
        self._arrival = WakeUp()
        self.wake = self._arrival.set
        """Interrupts `wait`. Thread-safe."""
        self._waiter = Waiter([self._plans], [self._arrival.fd])

    def receive(self) -> ToWorker | None:
        """The next message, or None if no message has arrived."""
        return self._plans.receive()

    def wait(self) -> None:
        """Wait for a message, or until `wake` is called."""
        self._waiter.wait()

    def clear_wake(self) -> None:
        """Reset `wake`. Call it before checking for the messages that `wake` announces, so that no
        wake-up is lost."""
        self._arrival.clear()

    def send(self, message: FromWorker) -> None:
        self._results.send((self._rank, message))

    def close(self) -> None:
        """Disconnect after at most LINGER_S to flush unsent messages."""
        self._plans.close()
        self._results.close(LINGER_S)


def main() -> None:
    """Entry point of a worker process."""
    orders = read_orders(WorkerOrders)
    # Before the import below, which takes seconds.
    exit_with_parent()
    set_title(f"worker {orders.ranks.rank}")
    setup_log("worker", rank=orders.ranks.rank, config=orders.log)
    # Must run before torch counts the cores and before the worker allocates memory.
    config = bind_worker(orders.config, orders.ranks)
    from hpu.worker.worker import Worker

    sys.exit(run(msgspec.structs.replace(orders, config=config), Worker))


def run(orders: WorkerOrders, make_worker: "Callable[[EngineConfig, Ranks], Worker]") -> int:
    """Serve until stopped; returns the exit code. After a failure, WorkerFailed is the last
    message."""
    return run_child(lambda: _work(orders, make_worker))


def _work(orders: WorkerOrders, make_worker: "Callable[[EngineConfig, Ranks], Worker]") -> int:
    rank = orders.ranks.rank
    setup_log("worker", rank=rank, config=orders.log)
    context = ZmqContext(orders.token)
    channel = StepChannel(context, orders)
    worker = make_worker(orders.config, orders.ranks)
    worker.on_message = channel.wake
    code = 0
    try:
        try:
            with panics_as_errors():
                ready = worker.start(lambda progress: _send_progress(channel, progress))
            channel.send(ready)
            depth = orders.config.max_inflight_steps
            _serve(worker, channel, depth, sends_results=orders.sends_results)
        except CheckpointError as error:
            code = 1
            logger.error("%s", error)
            channel.send(WorkerFailed(str(error), time=time.time()))
        except ConfigError as error:
            code = 2
            is_profile = isinstance(error, ProfileWritten)
            channel.send(WorkerFailed(str(error), True, time.time(), is_profile))
        except Exception as error:
            code = 1
            failed_at = time.time()
            logger.exception("Worker %d has failed", rank)
            message = f"worker {rank}: {type(error).__name__}: {error}"
            channel.send(WorkerFailed(message, time=failed_at))
        finally:
            ignore_stop_signal()
    except Terminated:
        # STOP: the exit code is 0, or the code of the failure that was being handled.
        pass
    worker.close()
    channel.close()
    context.close()
    return code


def _serve(
    worker: "Worker", channel: StepChannel, depth: int, *, sends_results: bool = True
) -> None:
    """Main loop of a worker. `depth`: maximum number of plans in flight."""
    in_flight: deque[bool] = deque()
    """For each plan in flight, whether this worker sends its result."""
    plan_is_due = 0.0
    while True:
        if in_flight and worker.has_result():
            _finish_step(worker, channel, sends=in_flight.popleft())
            plan_is_due = time.monotonic() + PLAN_DUE_S
        channel.clear_wake()
        for answer in worker.take_messages():
            channel.send(answer)
        # Launch the next plan, if it has arrived, before waiting for the result of the running
        # plan.
        message = channel.receive()
        if isinstance(message, StepPlan):
            if len(in_flight) == depth:
                # The engine already has this result, from another rank. Collect it here first: with
                # speculation, the runner sizes a plan for at most `depth` launches in flight.
                _finish_step(worker, channel, sends=in_flight.popleft())
            worker.submit(message)
            # Each rank copies its part of the blocks, and reports corrupt parts with its result.
            in_flight.append(sends_results or bool(message.loaded_blocks))
            plan_is_due = time.monotonic() + PLAN_DUE_S
        elif isinstance(message, WorkerCall):
            if message.name == WARM_UP_NEXT:
                # The engine has all results, but this rank may be behind the rank that sent them.
                while in_flight:
                    _finish_step(worker, channel, sends=in_flight.popleft())
            _answer(worker, message, channel)
        elif message is not None:
            worker.handle(message)
        elif in_flight and not worker.lacks_masks:
            if len(in_flight) < depth and time.monotonic() < plan_is_due:
                # Blocking on the device now would delay the launch of the next plan until the
                # device is idle.
                time.sleep(POLL_S)
                continue
            _finish_step(worker, channel, sends=in_flight.popleft())
            plan_is_due = time.monotonic() + PLAN_DUE_S
        else:
            channel.wait()


def _finish_step(worker: "Worker", channel: StepChannel, *, sends: bool) -> None:
    result = worker.collect()
    if sends:
        channel.send(result)


def _answer(worker: "Worker", call: WorkerCall, channel: StepChannel) -> None:
    if call.name == WARM_UP_NEXT:
        channel.send(worker.idle() or WarmedBuckets([], 0))
        return
    answer = WorkerAnswer()
    try:
        if call.name == WAKE_UP:
            channel.send(worker.wake_up(lambda progress: _send_progress(channel, progress)))
        else:
            answer.value = worker.call(call.name, call.level)
    except UserError as error:
        answer = WorkerAnswer(error=error.message, is_refusal=True, code=error.code)
    except RequestFailed as error:
        answer = WorkerAnswer(error=str(error))
    channel.send(answer)


def _send_progress(channel: StepChannel, progress: WarmupProgress) -> None:
    channel.send(progress)

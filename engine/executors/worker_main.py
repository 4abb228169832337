"""Main of a worker process: receives plans over the step channel and sends results.

The parent sets its environment, before torch or a vendor's runtime reads it.
"""

import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from config.engine import EngineConfig
from config.errors import CheckpointError, ConfigError, RequestFailed, UserError
from config.log import DEFAULT, LogConfig
from config.log import setup as setup_log
from config.native import panics_as_errors
from engine.executors.base import IDLE_S
from engine.process.child_process import (
    Terminated,
    ignore_stop_signal,
    read_orders,
    run_child,
    set_title,
)
from engine.transport.channels import PairSocket, Waiter, ZmqContext
from hpu.numa import bind_worker
from hpu.protocol import (
    SINGLE_RANK,
    WAKE_UP,
    WARM_UP_NEXT,
    DropAdapter,
    DropFiles,
    FetchBlocks,
    FromWorker,
    GrammarMasks,
    LoadAdapter,
    Ranks,
    ToWorker,
    Warmed,
    WarmupProgress,
    WorkerAnswer,
    WorkerCall,
    WorkerFailed,
    WorkerReady,
)

if TYPE_CHECKING:
    from hpu.worker.worker import Worker

logger = logging.getLogger(__name__)

LINGER_S = 2.0

PLAN_DUE_S = 0.02
"""How long after a plan or a result the next plan may arrive, if another fits in flight: many times
what an engine needs."""

POLL_S = 50e-6
"""How often the worker polls for a plan and for a result meanwhile."""


class WorkerOrders(msgspec.Struct, frozen=True):
    """The arguments of a worker process."""

    config: EngineConfig
    plans: str
    """Where the engine sends plans, masks and calls."""
    results: str
    """Where it receives results, answers and failures."""
    token: str
    """What it requires of a peer that connects."""
    ranks: Ranks = SINGLE_RANK
    log: LogConfig = DEFAULT
    sends_results: bool = True
    """Of a group of workers, one sends the results of all."""


class StepChannel:
    """A worker's end of the channel to the engine, which all workers of a group share."""

    def __init__(self, context: ZmqContext, orders: WorkerOrders) -> None:
        self._rank = orders.ranks.rank
        self._plans: PairSocket[None, ToWorker] = context.connect_subscriber(orders.plans, ToWorker)
        self._results: PairSocket[tuple[int, FromWorker], None] = context.connect_collector(
            orders.results
        )
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiter = Waiter([self._plans], [self._wake_fd])

    def receive(self) -> ToWorker | None:
        """The next message, or None if there is none."""
        return self._plans.receive()

    def wait(self, timeout_s: float | None) -> None:
        """Wait for a message, or for `wake`, at most `timeout_s`."""
        if self._wake_fd in self._waiter.wait(timeout_s):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """End `wait`, from another thread."""
        os.eventfd_write(self._wake_fd, 1)

    def send(self, message: FromWorker) -> None:
        self._results.send((self._rank, message))

    def close(self) -> None:
        """Disconnect; the last messages have LINGER_S to leave."""
        self._plans.close()
        self._results.close(LINGER_S)
        os.close(self._wake_fd)


def main() -> None:
    """The entry of a worker's process."""
    orders = read_orders(WorkerOrders)
    set_title(f"worker {orders.ranks.rank}")
    setup_log("worker", rank=orders.ranks.rank, config=orders.log)
    # Before torch counts the cores, and before anything allocates memory.
    config = bind_worker(orders.config, orders.ranks)
    from hpu.worker.worker import Worker

    sys.exit(run(msgspec.structs.replace(orders, config=config), Worker))


def run(orders: WorkerOrders, make_worker: "Callable[[EngineConfig, Ranks], Worker]") -> int:
    """Work until stopped; the exit code. A failure sends WorkerFailed last."""
    return run_child(lambda: _work(orders, make_worker))


def _work(orders: WorkerOrders, make_worker: "Callable[[EngineConfig, Ranks], Worker]") -> int:
    rank = orders.ranks.rank
    setup_log("worker", rank=rank, config=orders.log)
    context = ZmqContext(orders.token)
    channel = StepChannel(context, orders)
    worker = make_worker(orders.config, orders.ranks)
    worker.on_loaded = channel.wake
    code = 0
    try:
        try:
            with panics_as_errors():
                ready = worker.start(lambda progress: _send_progress(channel, progress))
            channel.send(ready)
            depth = orders.config.max_inflight_steps
            _serve(
                worker,
                channel,
                depth,
                sends_results=orders.sends_results,
                is_alone=orders.ranks.global_size == 1,
                serves_adapters=orders.config.lora.enable_lora,
                has_files=orders.config.offload.kv_offloading_dir is not None,
            )
        except CheckpointError as error:
            code = 1
            logger.error("%s", error)
            channel.send(WorkerFailed(str(error), time=time.time()))
        except ConfigError as error:
            code = 2
            channel.send(WorkerFailed(str(error), is_config=True, time=time.time()))
        except Exception as error:
            code = 1
            failed_at = time.time()
            logger.exception("worker %d cannot go on", rank)
            message = f"worker {rank}: {type(error).__name__}: {error}"
            channel.send(WorkerFailed(message, time=failed_at))
        finally:
            ignore_stop_signal()
    except Terminated:
        # If it came while a failure was handled, the failure's exit code stands.
        pass
    worker.close()
    channel.close()
    context.close()
    return code


def _serve(
    worker: "Worker",
    channel: StepChannel,
    depth: int,
    *,
    sends_results: bool = True,
    is_alone: bool = True,
    serves_adapters: bool = False,
    has_files: bool = False,
) -> None:
    """`depth`: plans that the engine keeps in flight. `is_alone`: whether the worker may warm up
    when it is idle, because no other one must do the same."""
    in_flight: deque[bool] = deque()
    """Of each plan whether its result is sent."""
    may_idle, is_quiet = is_alone, False
    plan_is_due = 0.0
    while True:
        if in_flight and worker.has_result():
            _finish_step(worker, channel, sends=in_flight.popleft())
            plan_is_due = time.monotonic() + PLAN_DUE_S
        if serves_adapters:
            for loaded in worker.take_loaded():
                channel.send(loaded)
        if has_files:
            for fetched in worker.take_fetched():
                channel.send(fetched)
        # Launch a plan that has arrived before waiting for the running one's result.
        message = channel.receive()
        if isinstance(message, WorkerCall) and message.name == WARM_UP_NEXT:
            channel.send(worker.idle() or Warmed([], 0))
        elif isinstance(message, WorkerCall):
            channel.send(
                _answer(worker, message, lambda progress: _send_progress(channel, progress))
            )
            may_idle = is_alone and (may_idle or message.name == WAKE_UP)
        elif isinstance(message, GrammarMasks):
            worker.mask(message)
        elif isinstance(message, LoadAdapter):
            worker.load_adapter(message)
        elif isinstance(message, DropAdapter):
            worker.drop_adapter(message)
        elif isinstance(message, FetchBlocks):
            worker.fetch_blocks(message)
        elif isinstance(message, DropFiles):
            worker.drop_files(message)
        elif message is not None:
            if len(in_flight) == depth:
                # Another rank has sent the result. The runner counts on it: with speculation a plan
                # fits what at most `depth` launches in flight may have accepted.
                _finish_step(worker, channel, sends=in_flight.popleft())
            worker.submit(message)
            # Each rank has copied its part of blocks, and tells whether that was whole.
            in_flight.append(sends_results or bool(message.loaded_blocks))
            is_quiet = False
            plan_is_due = time.monotonic() + PLAN_DUE_S
        elif in_flight and not worker.lacks_masks:
            if len(in_flight) < depth and time.monotonic() < plan_is_due:
                # Waiting for the device now would delay the next launch until the device is idle.
                time.sleep(POLL_S)
                continue
            _finish_step(worker, channel, sends=in_flight.popleft())
            plan_is_due = time.monotonic() + PLAN_DUE_S
        elif may_idle and is_quiet:
            warmed = worker.idle()
            if warmed is not None:
                channel.send(warmed)
            may_idle = warmed is not None
        else:
            # No warm-up between two steps of a request, or before its masks.
            channel.wait(IDLE_S if may_idle else None)
            is_quiet = not in_flight


def _finish_step(worker: "Worker", channel: StepChannel, *, sends: bool) -> None:
    result = worker.collect()
    if sends:
        channel.send(result)


def _answer(
    worker: "Worker", call: WorkerCall, on_progress: Callable[[WarmupProgress], None]
) -> WorkerAnswer | WorkerReady:
    try:
        if call.name == WAKE_UP:
            return worker.wake_up(on_progress)
        return WorkerAnswer(worker.call(call.name, call.level))
    except UserError as error:
        return WorkerAnswer(error=error.message, is_refusal=True, code=error.code)
    except RequestFailed as error:
        return WorkerAnswer(error=str(error))


def _send_progress(channel: StepChannel, progress: WarmupProgress) -> None:
    channel.send(progress)

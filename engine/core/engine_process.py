"""The engine process: an input thread receives messages, the main thread runs the engine loop."""

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable

from config.errors import ConfigError, EngineDied
from config.log import setup as setup_log
from config.native import panics_as_errors
from engine.core.coupled_steps import DPCoordinator, HubClient
from engine.core.loop import EngineLoop, describe_failure
from engine.executors.base import Executor
from engine.executors.select import make_executor
from engine.process.child_process import (
    Terminated,
    exit_with_parent,
    ignore_stop_signal,
    read_orders,
    run_child,
)
from engine.process.engine_orders import (
    CONFIG_ERROR_EXIT,
    PROFILE_EXIT,
    EngineOrders,
)
from engine.process.restarts import mark_ready
from engine.transport.channels import (
    HIGH_WATER,
    TCP,
    ConnectionWatch,
    PairSocket,
    Waiter,
    ZmqContext,
    process_name,
)
from engine.transport.messages import Failed, FromEngine, Hello, Ready, ToEngine

logger = logging.getLogger(__name__)

LINGER_S, STOP_LINGER_S = 1.0, 0.1
"""Time to flush the last messages at exit; STOP_LINGER_S after a regular stop."""

MakeExecutor = Callable[..., Executor]
"""Signature of engine.executors.select.make_executor."""


def main() -> None:
    """Entry point of an engine process."""
    sys.exit(run(read_orders(EngineOrders), make_executor))


def run(orders: EngineOrders, make_executor: MakeExecutor) -> int:
    """Serve until stopped; returns the exit code. At the end, sends Failed to every front end."""
    # A dead parent cannot remove the directory.
    exit_with_parent(lambda: shutil.rmtree(orders.directory, ignore_errors=True))
    return run_child(lambda: _serve(orders, make_executor))


def _serve(orders: EngineOrders, make_executor: MakeExecutor) -> int:
    setup_log("engine", rank=orders.engine, config=orders.log)
    context = ZmqContext(orders.token)
    output = MessageSender(orders, context)
    loop = EngineLoop(
        orders.config, output.put, num_front_ends=orders.num_front_ends, engine=orders.engine
    )
    os.makedirs(orders.own_directory, mode=0o700, exist_ok=True)
    receiver = MessageReceiver(orders, context, loop, output)
    output.on_error = loop.stop
    receiver.start()
    executor: Executor | None = None
    hub: DPCoordinator | None = None
    group: HubClient | None = None
    code, failed = 0, Failed(orders.engine, "the engine was told to stop", is_stopped=True)
    try:
        try:
            if orders.config.num_coupled_engines > 1:
                hub = _start_hub(orders)
                group = HubClient(orders.hub_endpoint(orders.engine), orders.token, loop.stopped)
                group.join(orders.engine, orders.config)
            executor = make_executor(
                orders.own_config,
                orders.own_directory,
                loop.stop,
                orders.ranks,
            )
            with panics_as_errors():
                loop.run(executor, freeze_garbage=True, group=group)
        except Exception as error:
            failed = describe_failure(error, orders.engine)
            # The settings were valid at the first start. The cause, such as a disk that is full or
            # cannot be written, may pass.
            failed.is_config &= not orders.is_restart
            code = CONFIG_ERROR_EXIT if failed.is_config else 1
            if failed.is_profile:
                code = PROFILE_EXIT
            is_reported = isinstance(error, EngineDied) and error.is_logged
            if isinstance(error, ConfigError):
                # With a single front end and engine, the server prints the reason last: do not log
                # it twice.
                parallel = orders.config.data_parallel
                is_alone = orders.num_front_ends == parallel.data_parallel_size == 1
                is_reported = is_alone and not orders.is_restart
            if isinstance(error, (ConfigError, EngineDied)) and not is_reported:
                level = logging.INFO if failed.is_profile else logging.ERROR
                logger.log(level, "%s", failed.message)
        finally:
            ignore_stop_signal()
    except Terminated:
        # STOP: the exit code is 0, or the code of the failure that was being handled.
        pass
    output.put(None, failed)
    # After a regular stop, the front ends have exited and read no more messages.
    output.close(LINGER_S if code else STOP_LINGER_S)
    receiver.close()
    if executor is not None:
        executor.close()
    if group is not None:
        group.close()
    if hub is not None:
        hub.close()
    context.close()
    return code


def _start_hub(orders: EngineOrders) -> DPCoordinator | None:
    """Start the DPCoordinator in the process of engine 0; None in other engines."""
    if orders.engine:
        return None
    endpoints = [orders.hub_endpoint(index) for index in range(orders.config.num_coupled_engines)]
    return DPCoordinator(endpoints, orders.token, orders.remote_token)


class MessageSender:
    """Encodes and sends messages on the calling thread, under a lock. A sender thread would be
    delayed by the next step and would compete with it for a core. A send never blocks; a front end
    that leaves too many messages unread ends the engine. Messages to a disconnected front end are
    dropped."""

    def __init__(self, orders: EngineOrders, context: ZmqContext) -> None:
        self._orders, self._context = orders, context
        self.process_name = process_name(orders.engine)
        """Name of the engine's process for front ends."""
        self._sockets: list[PairSocket[FromEngine, ToEngine] | None] = [
            self._connected(index) for index in range(orders.num_front_ends)
        ]
        # Reentrant: STOP can interrupt the main thread while it holds the lock, and then sends
        # Failed.
        self._lock = threading.RLock()
        self._is_closed = False
        self.on_error: Callable[[BaseException], None] = lambda error: None
        """Called on the sending thread if a message could not be sent."""

    def put(self, front_end: int | None, message: FromEngine) -> None:
        """Send to `front_end`, or to all front ends if None. Passes an error to `on_error`.
        Thread-safe."""
        try:
            if isinstance(message, Ready) and self._orders.ready_fd >= 0:
                mark_ready(self._orders.ready_fd)
            with self._lock:
                to = range(len(self._sockets)) if front_end is None else (front_end,)
                for index in to:
                    socket = self._sockets[index]
                    if socket is not None and not socket.send(message):
                        raise EngineDied(
                            f"front end {index} left {HIGH_WATER} messages unread",
                            is_external=True,
                        )
        except Exception as error:
            self.on_error(error)

    def disconnect(self, front_end: int) -> None:
        """Close the socket of a disconnected front end, so that its unread messages never reach its
        successor."""
        with self._lock:
            socket, self._sockets[front_end] = self._sockets[front_end], None
            if socket is not None:
                socket.close()

    def connect(self, front_end: int) -> None:
        """Connect to the successor of a disconnected front end."""
        with self._lock:
            if not self._is_closed and self._sockets[front_end] is None:
                self._sockets[front_end] = self._connected(front_end)

    def close(self, linger_s: float) -> None:
        """Disconnect after at most `linger_s` seconds to flush unsent messages."""
        with self._lock:
            self._is_closed = True
            for socket in self._sockets:
                if socket is not None:
                    socket.close(linger_s)

    def _connected(self, front_end: int) -> PairSocket[FromEngine, ToEngine]:
        name = f"{self.process_name}.out"
        return self._context.connect_dealer(self._orders.endpoint(front_end), name, ToEngine)


class MessageReceiver:
    """Input thread: receives and decodes messages, and hashes prompts. Sends Hello on its sockets
    and detects disconnects: a front end on this host is replaced by a successor; the disconnect of
    a front end on another host ends the engine."""

    def __init__(
        self, orders: EngineOrders, context: ZmqContext, loop: EngineLoop, sender: MessageSender
    ) -> None:
        self._orders = orders
        self._sender = sender
        self._gone: set[int] = set()
        """Front ends that have disconnected and have no successor yet."""
        self._context = context
        self._loop = loop
        self._end_read, self._end_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="input", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        os.close(self._end_write)
        self._thread.join(LINGER_S)

    def _run(self) -> None:
        watches: list[ConnectionWatch] = []
        sockets: list[PairSocket[FromEngine, ToEngine]] = [
            self._context.connect_dealer(
                self._orders.endpoint(index), f"{self._sender.process_name}.in", ToEngine, watches
            )
            for index in range(self._orders.num_front_ends)
        ]
        for socket in sockets:
            self._greet(socket)
        try:
            self._listen(sockets, watches)
        except Exception as error:
            self._loop.stop(error)
        finally:
            for watch in watches:
                watch.close()
            for socket in sockets:
                socket.close()

    def _listen(
        self, sockets: list[PairSocket[FromEngine, ToEngine]], watches: list[ConnectionWatch]
    ) -> None:
        waiter = Waiter([*sockets, *watches], [self._end_read])
        while self._end_read not in waiter.wait():
            for index, (socket, watch) in enumerate(zip(sockets, watches, strict=True)):
                self._receive(index, socket)
                if self._orders.endpoint(index).startswith(TCP):
                    watch.check()
                    continue
                for is_connected in watch.changes():
                    if is_connected and index in self._gone:
                        self._join(index, socket)
                    elif not is_connected:
                        # Receive the last messages of the front end first.
                        self._receive(index, socket)
                        self._leave(index)

    def _receive(self, index: int, socket: PairSocket[FromEngine, ToEngine]) -> None:
        while (message := socket.receive()) is not None:
            self._loop.receive(index, message)

    def _leave(self, index: int) -> None:
        self._gone.add(index)
        self._sender.disconnect(index)
        self._loop.front_end_changed(index, is_connected=False)

    def _join(self, index: int, socket: PairSocket[FromEngine, ToEngine]) -> None:
        """Greet the successor of a front end. A front end sends nothing before it receives Hello,
        so that messages of the successor are never attributed to its predecessor."""
        self._gone.discard(index)
        self._sender.connect(index)
        self._greet(socket)
        self._loop.front_end_changed(index, is_connected=True)

    def _greet(self, socket: PairSocket[FromEngine, ToEngine]) -> None:
        socket.send(Hello(self._orders.engine, os.getpid()))

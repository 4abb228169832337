"""The engine process: one thread reads sockets, the main one runs the loop."""

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable

import msgspec

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied
from config.log import setup as setup_log
from engine.core.loop import EngineLoop
from engine.executors.base import Executor
from engine.executors.select import make_executor
from engine.process.child_process import (
    Terminated,
    exit_with_parent,
    ignore_stop_signal,
    install_stop_handler,
    python_command,
    read_orders,
)
from engine.transport.channels import HIGH_WATER, PairSocket, Waiter, ZmqContext, endpoint
from engine.transport.messages import Failed, FromEngine, Hello, ToEngine

logger = logging.getLogger(__name__)

CONFIG_ERROR_EXIT = 2
"""The exit code for a ConfigError."""

LINGER_S = 1.0
"""How long last words may take to leave."""

MakeExecutor = Callable[[EngineConfig, str, Callable[[str], None]], Executor]


class EngineOrders(msgspec.Struct, frozen=True):
    """What an engine process is told at start."""

    config: EngineConfig
    directory: str
    num_front_ends: int
    token: str
    """What front-ends ask of whoever connects to them."""
    engine: int = 0
    log_level: str = "info"


def front_end_endpoint(directory: str, index: int) -> str:
    """Where front-end `index` waits for its engines."""
    return endpoint(directory, f"fe{index}.sock")


def engine_command() -> list[str]:
    """How to start this file as a process."""
    return python_command("engine.process.engine_process")


def main() -> None:
    """The entry of an engine's process."""
    sys.exit(run(read_orders(EngineOrders), make_executor))


def run(orders: EngineOrders, make_executor: MakeExecutor) -> int:
    """Serve until told to stop; the exit code. Every front-end hears Failed before the end."""
    # If the parent cannot clean up any more, nobody else will.
    exit_with_parent(lambda: shutil.rmtree(orders.directory, ignore_errors=True))
    try:
        install_stop_handler()
        return _serve(orders, make_executor)
    except Terminated:
        # Before there was anything to end.
        return 0


def _serve(orders: EngineOrders, make_executor: MakeExecutor) -> int:
    setup_log("engine", rank=orders.engine, level=orders.log_level)
    wires = ZmqContext(orders.token)
    output = MessageSender(orders, wires)
    loop = EngineLoop(
        orders.config, output.put, num_front_ends=orders.num_front_ends, engine=orders.engine
    )
    source = MessageReceiver(orders, wires, loop)
    output.on_error = loop.stop
    source.start()
    executor: Executor | None = None
    code, message = 0, "the engine was told to stop"
    try:
        try:
            executor = make_executor(
                orders.config, orders.directory, lambda message: loop.stop(EngineDied(message))
            )
            loop.run(executor, freeze_garbage=True)
        except ConfigError as error:
            code, message = CONFIG_ERROR_EXIT, str(error)
        except EngineDied as error:
            code, message = 1, str(error)
        except Exception as error:
            code, message = 1, f"{type(error).__name__}: {error}"
            logger.exception("the engine cannot go on")
        finally:
            ignore_stop_signal()
    except Terminated:
        # Also when it came while a failure was being told: that failure's code stands.
        pass
    if code:
        logger.error("%s", message)
    output.put(None, Failed(orders.engine, message, is_config=code == CONFIG_ERROR_EXIT))
    output.close()
    source.close()
    if executor is not None:
        executor.close()
    wires.close()
    return code


class MessageSender:
    """Encodes and sends at once, on whichever thread has something to say, one at a time: a thread
    of its own would wait until the next step computes, and take that one's core. A send never
    waits; a front-end that does not read ends the engine."""

    def __init__(self, orders: EngineOrders, wires: ZmqContext) -> None:
        self._lines: list[PairSocket[FromEngine, ToEngine]] = [
            wires.connect_dealer(
                front_end_endpoint(orders.directory, index), f"{orders.engine}.out", ToEngine
            )
            for index in range(orders.num_front_ends)
        ]
        # Whom a signal interrupts with the lock in hand has a last word to say.
        self._lock = threading.RLock()
        self.on_error: Callable[[BaseException], None] = lambda error: None
        """Told why a message could not be sent, on the thread that had it."""

    def put(self, front_end: int | None, message: FromEngine) -> None:
        """Send to one front-end, or to all (None). Any thread."""
        try:
            with self._lock:
                to = range(len(self._lines)) if front_end is None else (front_end,)
                for index in to:
                    if not self._lines[index].send(message):
                        raise EngineDied(f"front-end {index} left {HIGH_WATER} messages unread")
        except Exception as error:
            self.on_error(error)

    def close(self) -> None:
        """Hang up; what was put has LINGER_S to leave."""
        with self._lock:
            for line in self._lines:
                line.close(LINGER_S)


class MessageReceiver:
    """The thread that receives, decodes and hashes. It says Hello on the lines it listens on."""

    def __init__(self, orders: EngineOrders, wires: ZmqContext, loop: EngineLoop) -> None:
        self._orders = orders
        self._wires = wires
        self._loop = loop
        self._end, self._end_signal = os.pipe()
        self._thread = threading.Thread(target=self._run, name="input", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        os.close(self._end_signal)
        self._thread.join(LINGER_S)

    def _run(self) -> None:
        lines: list[PairSocket[FromEngine, ToEngine]] = [
            self._wires.connect_dealer(
                front_end_endpoint(self._orders.directory, index),
                f"{self._orders.engine}.in",
                ToEngine,
            )
            for index in range(self._orders.num_front_ends)
        ]
        for line in lines:
            line.send(Hello(self._orders.engine, os.getpid()))
        try:
            self._listen(lines)
        except Exception as error:
            self._loop.stop(error)
        finally:
            for line in lines:
                line.close()

    def _listen(self, lines: list[PairSocket[FromEngine, ToEngine]]) -> None:
        waiter = Waiter(lines, [self._end])
        while self._end not in waiter.wait():
            for index, line in enumerate(lines):
                while (message := line.receive()) is not None:
                    self._loop.receive(index, message)

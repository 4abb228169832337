"""Launcher: starts, watches and stops engine processes."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from config.data_parallel import DataParallelConfig
from config.devices.base import DEVICES
from config.engine import EngineConfig
from config.errors import capitalized
from config.loading.env import (
    chosen_device,
    device_environment,
    environment,
    hpu_environment,
    runtime_environment,
)
from engine.process.child_process import (
    ChildProcess,
    ProcessEnd,
    bound_exit,
    exit_with_parent,
    python_command,
    read_orders,
)
from engine.process.engine_orders import PROFILE_EXIT, EngineOrders, front_end_endpoint
from engine.process.restarts import MAX_WAIT_S, RestartLimit, mark_ready
from engine.transport.channels import SocketDirectory, new_token
from hpu.host import usable_cores

__all__ = [
    "PROFILE_EXIT",
    "ChildProcess",
    "EngineOrders",
    "EngineProcesses",
    "ProcessEnd",
    "RestartLimit",
    "SocketDirectory",
    "bound_exit",
    "exit_with_parent",
    "front_end_endpoints",
    "launch",
    "mark_ready",
    "new_token",
    "python_command",
    "read_orders",
]

logger = logging.getLogger(__name__)

COUPLED_STOP_S = 2.0
"""Time for an engine to stop after another engine of its coupled group has ended."""


def launch(
    orders: EngineOrders,
    *,
    on_exit: Callable[[ProcessEnd], None] | None = None,
    command: Sequence[str] | None = None,
) -> ChildProcess:
    """Start the process of an engine, which ends when this process ends. The engine connects to
    `front_end_endpoint` of each front end and presents its token there.

    `on_exit` is called on another thread when the process ends without `close`. `command` replaces
    the engine's command line. Raises ConfigError.
    """
    config, engine = orders.config, orders.engine
    # Checked here so that the caller gets the ConfigError; the engine process checks the settings
    # again.
    hpu_environment(config)
    parallel = config.data_parallel
    cards = device_environment(
        config,
        engine - parallel.first_engine,
        parallel.num_local,
        num_cards=config.parallel.world_size,
    )
    return ChildProcess(
        "the engine" if parallel.data_parallel_size == 1 else f"engine {engine}",
        command or python_command("engine.core.engine_process", f"engine {engine}"),
        orders,
        environment={**environment(), **runtime_environment(config), **cards},
        on_exit=on_exit,
        pass_fds=[] if orders.ready_fd < 0 else [orders.ready_fd],
    )


def front_end_endpoints(
    parallel: DataParallelConfig, directory: str, index: int
) -> tuple[str, ...]:
    """Addresses on which front end `index` listens, by engine."""
    return tuple(
        front_end_endpoint(directory, index, engine, parallel)
        for engine in range(parallel.data_parallel_size)
    )


class EngineProcesses:
    """Starts, watches and stops the engine processes of this host."""

    def __init__(
        self,
        orders: EngineOrders,
        *,
        on_exit: Callable[[int, str], None],
        command: Sequence[str] | None = None,
        max_restarts: int = 0,
        max_wait_s: float = MAX_WAIT_S,
        on_restart: Callable[[int, ProcessEnd], None] = lambda engine, end: None,
    ) -> None:
        """Start the engines with `launch`; each engine gets `orders` with its own number. `on_exit`
        is called with the number of an engine that has ended and a description of the end. An
        engine that has been ready is restarted instead, at most `max_restarts` times in a row and
        at most `max_wait_s` after each end, and `on_restart` is called. Coupled engines are not
        restarted."""
        config = share_cores(orders.config)
        self._orders = replace(orders, config=config)
        self._command = command
        self._on_restart = on_restart
        max_restarts = 0 if config.num_coupled_engines > 1 else max_restarts
        parallel = config.data_parallel
        engines = range(parallel.first_engine, parallel.first_engine + parallel.num_local)
        self._limits = {engine: RestartLimit(max_restarts, max_wait_s) for engine in engines}
        self._has_closed = threading.Event()
        self.are_coupled = config.num_coupled_engines > 1
        """Whether all engines stop when any of them ends."""
        self._on_exit = on_exit
        self._closing = threading.Lock()
        self.processes: dict[int, ChildProcess] = {}
        """Processes by engine number."""
        try:
            for engine in engines:
                self._launch(engine)
        except BaseException:
            self.close(0)
            raise

    @property
    def num_running(self) -> int:
        return sum(process.poll() is None for process in self.processes.values())

    def close(self, timeout_s: float) -> None:
        """Stop all engines in parallel and wait until they have ended; safe to call twice."""
        self._has_closed.set()
        with self._closing:
            for process in self.processes.values():
                process.stop()
            for process in self.processes.values():
                process.close(timeout_s)

    def _launch(self, engine: int) -> None:
        self.processes[engine] = launch(
            replace(
                self._orders,
                engine=engine,
                ready_fd=self._limits[engine].ready_fd,
                is_restart=engine in self.processes,
            ),
            on_exit=partial(self._ended, engine),
            command=self._command,
        )

    def _ended(self, engine: int, end: ProcessEnd) -> None:
        wait_s = self._limits[engine].wait_s()
        if wait_s is not None:
            self._on_restart(engine, end)
            # Restart on another thread: `_restart` joins the watcher of this process, which is this
            # thread.
            restart = partial(self._restart, engine, end.description, wait_s)
            threading.Thread(target=restart, daemon=True).start()
            return
        self._on_exit(engine, end.description)
        if self.are_coupled:
            # The other engines may block forever in collectives with the ended engine. Closed on
            # another thread: `close` joins the watcher of this process, which is this thread.
            threading.Thread(target=self.close, args=(COUPLED_STOP_S,), daemon=True).start()

    def _restart(self, engine: int, reason: str, wait_s: float | None) -> None:
        limit, text = self._limits[engine], reason
        while wait_s is not None:
            logger.error("%s: %s", capitalized(text), limit.describe(wait_s))
            self._has_closed.wait(wait_s)
            with self._closing:
                if self._has_closed.is_set():
                    return
                self.processes[engine].close(0)
                try:
                    self._launch(engine)
                    return
                except Exception as error:
                    text = f"{reason}, and cannot be started again: {error}"
            wait_s = limit.wait_s()
        self._on_exit(engine, text)


def share_cores(config: EngineConfig, num_cores: int | None = None) -> EngineConfig:
    """`config` with this host's cores divided among its engines: on a CPU or the emulator, each
    worker of several engines gets an equal part of `num_cores` (None: the cores of this process) as
    compute threads, unless the user set the number."""
    count = config.data_parallel.num_local
    if count == 1 or config.num_threads or not DEVICES[chosen_device(config.device)].uses_cores:
        return config
    num_cores = num_cores or usable_cores()
    num_threads = max(1, num_cores // (count * config.parallel.world_size))
    logger.info(
        "%d workers share %d cores: each has %d compute threads (--num-threads)",
        count * config.parallel.world_size,
        num_cores,
        num_threads,
    )
    return dataclasses.replace(config, num_threads=num_threads)

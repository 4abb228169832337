"""Launcher: starts engine processes, watches them, stops them."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from config.data_parallel import DataParallelConfig
from config.engine import EngineConfig
from config.loading.env import (
    chosen_device,
    device_environment,
    environment,
    hpu_environment,
    runtime_environment,
)
from config.log import DEFAULT, LogConfig
from engine.core.engine_process import EngineOrders, front_end_endpoint
from engine.process.child_process import ChildProcess, exit_with_parent, python_command, read_orders
from engine.transport.channels import SocketDirectory, new_token
from hpu.host import usable_cores

__all__ = [
    "ChildProcess",
    "EngineProcesses",
    "SocketDirectory",
    "exit_with_parent",
    "front_end_endpoints",
    "launch",
    "new_token",
    "python_command",
    "read_orders",
]

logger = logging.getLogger(__name__)

CPU_DEVICES = ("cpu", "hpu-emulator")

COUPLED_STOP_S = 2.0
"""How long an engine may take to stop after another one that it steps together with has ended."""


def launch(
    config: EngineConfig,
    directory: str,
    num_front_ends: int,
    *,
    token: str,
    on_exit: Callable[[str], None] | None = None,
    log: LogConfig = DEFAULT,
    command: Sequence[str] | None = None,
    engine: int = 0,
    remote_token: str = "",
) -> ChildProcess:
    """Start the process of engine `engine`, which ends with this one. It connects to
    `front_end_endpoint` of each front end and presents `token` there. `remote_token`: what engines
    of other hosts present to it.

    `on_exit(description)` is called on another thread when it ends without `close`. `command`
    replaces the engine's entry. Raises ConfigError for an execution mode that is not possible, and
    when there are too few cards.
    """
    # Checked here so that the caller gets the error; the engine decides again, and logs why.
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
        command or python_command("engine.core.engine_process"),
        EngineOrders(config, directory, num_front_ends, token, engine, log, remote_token),
        environment={**environment(), **runtime_environment(config), **cards},
        on_exit=on_exit,
    )


def front_end_endpoints(
    parallel: DataParallelConfig, directory: str, index: int
) -> tuple[str, ...]:
    """Where front end `index` listens, for each engine."""
    return tuple(
        front_end_endpoint(directory, index, engine, parallel)
        for engine in range(parallel.data_parallel_size)
    )


class EngineProcesses:
    """The engines of this host: started together, each one watched, stopped together."""

    def __init__(
        self,
        config: EngineConfig,
        directory: str,
        num_front_ends: int,
        *,
        token: str,
        on_exit: Callable[[int, str], None],
        log: LogConfig = DEFAULT,
        command: Sequence[str] | None = None,
        remote_token: str = "",
    ) -> None:
        """Start them as `launch` does; `on_exit` gets the engine's number too."""
        config = share_cores(config)
        self.are_coupled = config.num_coupled_engines > 1
        """Whether all end when one does."""
        self._on_exit = on_exit
        self._closing = threading.Lock()
        first = config.data_parallel.first_engine
        self.processes: dict[int, ChildProcess] = {}
        """By the engine's number."""
        try:
            for engine in range(first, first + config.data_parallel.num_local):
                self.processes[engine] = launch(
                    config,
                    directory,
                    num_front_ends,
                    token=token,
                    on_exit=partial(self._ended, engine),
                    log=log,
                    command=command,
                    engine=engine,
                    remote_token=remote_token,
                )
        except BaseException:
            self.close(0)
            raise

    @property
    def num_running(self) -> int:
        return sum(process.poll() is None for process in self.processes.values())

    def close(self, timeout_s: float) -> None:
        """Stop all at once and wait until they are gone; safe to call twice."""
        with self._closing:
            for process in self.processes.values():
                process.stop()
            for process in self.processes.values():
                process.close(timeout_s)

    def _ended(self, engine: int, reason: str) -> None:
        self._on_exit(engine, reason)
        if self.are_coupled:
            # The others wait for its devices, some of them for ever. Not on this thread, which is
            # the watcher of the one that has ended.
            threading.Thread(target=self.close, args=(COUPLED_STOP_S,), daemon=True).start()


def share_cores(config: EngineConfig, num_cores: int | None = None) -> EngineConfig:
    """`config` for one of several engines that compute on this host's CPU: each gets its part of
    `num_cores` (None: the cores of this process) as compute threads, unless the user set the
    number."""
    count = config.data_parallel.num_local
    if count == 1 or config.num_threads or chosen_device(config.device) not in CPU_DEVICES:
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

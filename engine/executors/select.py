"""Selection of the executor class by its name."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from config.engine import EXTERNAL_LAUNCHER, RAY, EngineConfig
from config.errors import ConfigError, EngineDied
from config.loading.env import (
    chosen_device,
    hpu_environment,
    hpu_mode,
    is_installed,
    launched_rank,
    module_id,
    openmp_environment,
    set_missing,
    worker_environment,
)
from config.version import install_command
from engine.executors.base import Executor
from engine.process.child_process import python_command
from hpu.protocol import SINGLE_RANK, Ranks

if TYPE_CHECKING:
    from engine.executors.worker_launcher import WorkerLauncher

logger = logging.getLogger(__name__)


def make_executor(
    config: EngineConfig,
    directory: str,
    on_death: Callable[[EngineDied], None],
    ranks: Ranks = SINGLE_RANK,
) -> Executor:
    """Executor named by `config.executor`; `auto` runs a single CPU worker in the engine's process.

    Unix sockets are created in `directory`. `on_death` is called, on any thread, when a worker
    process ends unexpectedly. `ranks`: first rank of this engine, where several engines share
    experts. Raises ConfigError.
    """
    device = chosen_device(config.device)
    if device.startswith("hpu"):
        choice = hpu_mode(config)
        # Logged here: the worker's environment contains the choice without the reason.
        logger.info("Execution on HPU: %s, since %s", choice.mode, choice.reason)
    world_size = config.parallel.world_size
    if config.executor == EXTERNAL_LAUNCHER:
        launched = launched_rank()
        if device == "hpu":
            set_missing(hpu_environment(config))
        set_missing(openmp_environment())
        from engine.executors.external_launcher import ExternalLauncherExecutor

        return ExternalLauncherExecutor(config, launched)
    is_small = device == "cpu" and world_size == 1
    if config.executor == "uni" or (config.executor == "auto" and is_small):
        if device == "hpu":
            set_missing(hpu_environment(config))
        set_missing(openmp_environment())
        from engine.executors.inproc import InprocExecutor
        from hpu.worker.worker import Worker

        return InprocExecutor(Worker(config, ranks))

    from engine.executors.multiproc import MultiprocExecutor

    launcher: WorkerLauncher
    if config.executor == RAY:
        if not is_installed("ray"):
            raise ConfigError(
                "--distributed-executor-backend is ray, which is not installed here: "
                f"{install_command('ray')}"
            )
        from engine.executors.ray import RayLauncher

        launcher = RayLauncher(config)
    else:
        from engine.executors.worker_launcher import LocalLauncher

        if device == "hpu":
            # Check the card of the last worker, so that a list with too few cards is rejected here.
            module_id(world_size - 1, world_size)
        command = python_command("engine.executors.worker_main", "worker")
        launcher = LocalLauncher(directory, command, worker_environment(config), ranks)
    return MultiprocExecutor(
        config,
        launcher,
        on_death,
        num_workers=world_size,
        output_rank=config.parallel.output_rank,
    )

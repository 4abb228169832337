"""Selects the executor class by its name."""

import logging
from collections.abc import Callable

from config.engine import EngineConfig
from config.loading.env import (
    chosen_device,
    hpu_environment,
    hpu_mode,
    openmp_environment,
    set_missing,
    worker_environment,
)
from engine.executors.base import Executor
from engine.process.child_process import python_command

logger = logging.getLogger(__name__)


def make_executor(
    config: EngineConfig, directory: str, on_death: Callable[[str], None]
) -> Executor:
    """The executor that `config.executor` names; `auto` runs the worker inline on CPU.

    Sockets are created in `directory`. `on_death(message)` is called, on any thread, when a worker
    process ends by itself. Raises ConfigError for an execution mode that is not possible.
    """
    device = chosen_device(config.device)
    if device.startswith("hpu"):
        choice = hpu_mode(config)
        # Logged here: the worker gets the choice in its environment, without the reason.
        logger.info("Execution on HPU: %s, since %s", choice.mode, choice.reason)
    world_size = config.parallel.world_size
    is_small = device == "cpu" and world_size == 1
    if config.executor == "uni" or (config.executor == "auto" and is_small):
        if device == "hpu":
            set_missing(hpu_environment(config))
        set_missing(openmp_environment())
        from engine.executors.inproc import InprocExecutor

        return InprocExecutor(config)

    from engine.executors.multiproc import MultiprocExecutor

    return MultiprocExecutor(
        config,
        directory,
        on_death,
        command=python_command("engine.executors.worker_main"),
        environment=worker_environment(config),
        num_workers=world_size,
    )

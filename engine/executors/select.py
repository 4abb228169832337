"""Which executor: the only place where its name becomes a class."""

from collections.abc import Callable

from config.engine import EngineConfig
from config.env import environment, runtime_environment
from engine.executors.base import Executor


def make_executor(
    config: EngineConfig, directory: str, on_death: Callable[[str], None]
) -> Executor:
    """The executor that `config.executor` names; `auto` runs the worker inline on CPU.

    `directory` is where sockets may be made. `on_death(message)` is called, on any thread, when a
    worker process ends by itself.
    """
    if _is_inline(config):
        from engine.executors.inline import InlineExecutor

        return InlineExecutor(config)

    from engine.executors.child import worker_command
    from engine.executors.multiproc import MultiprocExecutor

    return MultiprocExecutor(
        config,
        directory,
        on_death,
        command=worker_command(),
        environment={**environment(), **runtime_environment(config)},
    )


def _is_inline(config: EngineConfig) -> bool:
    if config.executor == "auto":
        return config.device in ("auto", "cpu")
    return config.executor == "inline"

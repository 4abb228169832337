"""Launcher: starts engine processes, watches them, stops them."""

from collections.abc import Callable, Sequence

from config.engine import EngineConfig
from config.loading.env import environment, hpu_environment, runtime_environment
from engine.core.engine_process import EngineOrders, front_end_endpoint
from engine.process.child_process import ChildProcess, exit_with_parent, python_command, read_orders
from engine.transport.channels import SocketDirectory, new_token

__all__ = [
    "ChildProcess",
    "SocketDirectory",
    "exit_with_parent",
    "front_end_endpoint",
    "launch",
    "new_token",
    "python_command",
    "read_orders",
]


def launch(
    config: EngineConfig,
    directory: str,
    num_front_ends: int,
    *,
    token: str,
    on_exit: Callable[[str], None] | None = None,
    log_level: str = "info",
    command: Sequence[str] | None = None,
) -> ChildProcess:
    """Start an engine process, which ends with this one. It connects to
    `front_end_endpoint(directory, i)` of each front end and presents `token` there.

    `on_exit(description)` is called on another thread when it ends without `close`. `command`
    replaces the engine's entry. Raises ConfigError for an execution mode that is not possible.
    """
    # Checked here so that the caller gets the error; the engine decides again, and logs why.
    hpu_environment(config)
    return ChildProcess(
        "the engine",
        command or python_command("engine.core.engine_process"),
        EngineOrders(config, directory, num_front_ends, token, log_level=log_level),
        environment={**environment(), **runtime_environment(config)},
        on_exit=on_exit,
    )

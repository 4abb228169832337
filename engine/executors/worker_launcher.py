"""WorkerLauncher: where the workers of a group run, how they are started and how their end is
noticed. LocalLauncher: as child processes on this host."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.executors.worker_main import WorkerOrders
from engine.process.child_process import ChildProcess, ProcessEnd
from engine.transport.channels import endpoint
from hpu.protocol import SINGLE_RANK, Ranks


class LaunchedWorker(Protocol):
    """A worker that was started, as ChildProcess is."""

    @property
    def pid(self) -> int:
        """On its host."""
        ...

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the worker has ended; -1 after `close`."""
        ...

    @property
    def end(self) -> ProcessEnd:
        """How it ended; to be called once it has."""
        ...

    def poll(self) -> int | None:
        """The exit code (negative: it was ended by a signal, or is lost), or None while it runs."""
        ...

    def stop(self) -> None:
        """Ask it to stop, once; does not wait."""
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop it, and kill it if it has not ended in time. Safe to call twice."""
        ...


class WorkerLauncher(Protocol):
    """Starts the workers of one group."""

    notice_s: float
    """How long after a worker's end `poll` may still say that it runs."""

    def place(self, num_workers: int) -> list[Ranks]:
        """Where each worker will run, by rank; called once, before `launch`. Raises ConfigError
        when there is no place for so many."""
        ...

    def endpoint(self, name: str) -> str:
        """The address on which the engine listens for the workers, at the socket `name`; a port of
        * is any free one."""
        ...

    def launch(
        self, name: str, orders: WorkerOrders, on_exit: Callable[[ProcessEnd], None]
    ) -> LaunchedWorker:
        """Start a worker. `on_exit` is called on another thread when it ends by itself."""
        ...

    def close(self) -> None:
        """Free the places; every worker is closed before. Safe to call twice."""
        ...


class LocalLauncher:
    """Child processes, reached over Unix sockets."""

    notice_s = 0.2

    def __init__(
        self,
        directory: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        first: Ranks = SINGLE_RANK,
    ) -> None:
        """Sockets are created in `directory`; `command` runs worker_main in `environment` (None: a
        copy of ours). `first`: the first rank of this engine, where several share experts."""
        self._first = first
        self._directory = directory
        self._command = command
        self._environment = environment

    def place(self, num_workers: int) -> list[Ranks]:
        # Ranks of an engine that died have met there.
        Path(self._directory, "ranks").unlink(missing_ok=True)
        return [
            self._first._replace(
                world_size=num_workers,
                rank=rank,
                init_method=self._first.init_method or f"file://{self._directory}/ranks",
            )
            for rank in range(num_workers)
        ]

    def endpoint(self, name: str) -> str:
        return endpoint(self._directory, f"{name}.sock")

    def launch(
        self, name: str, orders: WorkerOrders, on_exit: Callable[[ProcessEnd], None]
    ) -> LaunchedWorker:
        return ChildProcess(
            name, self._command, orders, environment=self._environment, on_exit=on_exit
        )

    def close(self) -> None:
        """Nothing is held."""

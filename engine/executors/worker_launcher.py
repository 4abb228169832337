"""WorkerLauncher: places and starts the workers of a group, and detects their end. LocalLauncher:
runs workers as child processes on this host."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from config.errors import ConfigError
from engine.executors.worker_main import WorkerOrders
from engine.process.child_process import ChildProcess, ProcessEnd
from engine.transport.channels import endpoint
from hpu.protocol import SINGLE_RANK, Ranks


class LaunchedWorker(Protocol):
    """A started worker; a subset of ChildProcess's interface."""

    @property
    def pid(self) -> int:
        """Process id on the worker's host."""
        ...

    @property
    def sentinel(self) -> int:
        """File descriptor that becomes readable when the worker has ended; -1 after `close`."""
        ...

    @property
    def end(self) -> ProcessEnd:
        """How the worker ended. Only valid after its end."""
        ...

    def poll(self) -> int | None:
        """Exit code, or None while the worker runs; negative if the worker was killed by a signal
        or was lost."""
        ...

    def stop(self) -> None:
        """Ask the worker to stop; idempotent, does not wait."""
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the worker; kill it if it has not ended after `timeout_s`. Safe to call twice."""
        ...


class WorkerLauncher(Protocol):
    """Starts the workers of a group."""

    notice_s: float
    """Seconds after a worker's end during which `poll` may still return None."""

    def place(self, num_workers: int) -> list[Ranks]:
        """Ranks and rendezvous of `num_workers` workers. Called once, before `launch`. Raises
        ConfigError when there are too few cards."""
        ...

    def endpoint(self, name: str) -> str:
        """Address of the socket `name`, on which the engine listens for the workers; port * selects
        any free port."""
        ...

    def launch(
        self, name: str, orders: WorkerOrders, on_exit: Callable[[ProcessEnd], None]
    ) -> LaunchedWorker:
        """Start a worker. `on_exit` is called on another thread when the worker ends
        unexpectedly."""
        ...

    def close(self) -> None:
        """Release the reserved cards. Call it after every worker is closed; safe to call twice."""
        ...


def check_cards_per_host(hosts: Sequence[str]) -> None:
    """Raise ConfigError unless each host has equally many ranks, which Gaudi's communicators need
    (setCommScaleupGroupSize in HCL's hcl_dynamic_communicator.cpp). `hosts`: each rank's host."""
    counts = Counter(hosts)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{host}: {count}" for host, count in counts.items())
        raise ConfigError(
            f"Gaudi cards communicate only if each host gives equally many, and the free cards of "
            f"the hosts are ({found}): free some, or choose other parallel sizes"
        )


class LocalLauncher:
    """Runs workers as child processes, reached over Unix sockets."""

    notice_s = 0.2

    def __init__(
        self,
        directory: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        first: Ranks = SINGLE_RANK,
    ) -> None:
        """Sockets are created in `directory`. `command` runs worker_main with the variables
        `environment` (None: a copy of this process's variables). `first`: first rank of this
        engine, where several engines share experts."""
        self._first = first
        self._directory = directory
        self._command = command
        self._environment = environment

    def place(self, num_workers: int) -> list[Ranks]:
        # The workers of a crashed engine leave their rendezvous file behind.
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
        """Nothing to free."""

"""RayLauncher: runs workers on the hosts of a Ray cluster.

Ray chooses the hosts and cards. An actor for each worker, on the worker's host, starts it as its
child process; steps are sent over the executor's own TCP channel.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from config.devices.base import DEVICES
from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.env import card_environment, chosen_device, worker_environment
from engine.executors.worker_launcher import LaunchedWorker, check_cards_per_host
from engine.executors.worker_main import WorkerOrders
from engine.process.child_process import (
    ChildProcess,
    ProcessEnd,
    describe_exit,
    is_external_end,
    python_command,
)
from hpu.protocol import Ranks

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 60.0
"""Maximum wait for the cluster to reserve the cards; another engine may still be freeing them.
Seconds."""

START_TIMEOUT_S = 120.0
"""Maximum wait for an actor to start and to answer; seconds."""

LOST = -signal.SIGKILL
"""Exit code reported for a worker whose actor or node was lost."""

MAX_LOSS_CHARACTERS = 400
"""Maximum length of Ray's reason for a loss in an error."""


class ActorLocation(NamedTuple):
    """Location of a worker's actor."""

    node: str
    address: str
    card: str | None
    """Id of the actor's card; None on a CPU."""


class WorkerActor:
    """Actor on the worker's host: starts the worker and waits for it to end. Calls run on several
    threads; arguments and results are plain values."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None

    def place(self, resource: str | None) -> tuple[str, str, str | None]:
        """Fields of this actor's ActorLocation. `resource`: Ray's resource name of the card; None
        on a CPU."""
        context = ray.get_runtime_context()
        card = None
        if resource is not None:
            card = str(context.get_accelerator_ids()[resource][0])
        return context.get_node_id(), ray.util.get_node_ip_address(), card

    def free_port(self) -> int:
        """A free TCP port of this host."""
        with socket.socket() as probe:
            probe.bind((ray.util.get_node_ip_address(), 0))
            return int(probe.getsockname()[1])

    def start(self, name: str, orders: bytes, card: str | None) -> int:
        """Start the worker with `orders` (WorkerOrders in msgpack). Returns its process id."""
        decoded = msgspec.msgpack.decode(orders, type=WorkerOrders)
        device = chosen_device(decoded.config.device)
        environment = worker_environment(decoded.config)
        if card is not None:
            environment.update(card_environment(device, card))
        self._child = ChildProcess(
            name,
            python_command("engine.executors.worker_main", name),
            decoded,
            environment=environment,
        )
        return self._child.pid

    def wait(self) -> int:
        """Wait until the worker has ended; returns its exit code."""
        assert self._child is not None, "wait before start"
        while (code := self._child.poll()) is None:
            select.select([self._child.sentinel], [], [])
        return code

    def stop(self) -> None:
        """Ask the worker to stop; does not wait."""
        if self._child is not None:
            self._child.stop()


class RayWorker:
    """A LaunchedWorker on a host of the Ray cluster."""

    def __init__(
        self,
        name: str,
        actor: Any,
        place: ActorLocation,
        orders: WorkerOrders,
        on_exit: Callable[[ProcessEnd], None],
    ) -> None:
        self._name = name
        self._actor = actor
        self._place = place
        self._on_exit = on_exit
        self._is_closing = False
        self._code: int | None = None
        self._loss = ""
        """Ray's reason for the loss of the actor; empty: the actor reported the exit code."""
        self.sentinel, self._alive = os.pipe()
        self.pid = _answer(actor.start.remote(name, msgspec.msgpack.encode(orders), place.card))
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{name}", daemon=True)
        self._watcher.start()

    def poll(self) -> int | None:
        return self._code

    @property
    def end(self) -> ProcessEnd:
        ending = "has not ended" if self._code is None else describe_exit(self._code)
        if self._loss:
            ending = f"is lost: its Ray node or the actor that started it has ended ({self._loss})"
        process = f"{self._name} (process {self.pid} on {self._place.address})"
        return ProcessEnd(f"{process} {ending}", is_external_end(self._code or 0), self.pid)

    def stop(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._actor.stop.remote()

    def close(self, timeout_s: float = 10.0) -> None:
        self.stop()
        self._watcher.join(timeout_s)
        # Killing the actor also ends its child process.
        ray.kill(self._actor)
        self._watcher.join()
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def _watch(self) -> None:
        try:
            self._code = ray.get(self._actor.wait.remote())
        except RayError as error:
            self._loss = " ".join(str(error).split())[:MAX_LOSS_CHARACTERS]
            self._code = LOST
        os.close(self._alive)
        if not self._is_closing:
            self._on_exit(self.end)


class RayLauncher:
    """WorkerLauncher for the Ray cluster that this host belongs to.

    Reserves a card, or a CPU, for each worker in a placement group, on as few hosts as possible.
    Ranks on this host come first. Messages to Ray's actors are not encrypted; Ray itself must run
    in a private network.
    """

    notice_s = 4.0

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError when no cluster can be reached from this host."""
        self._resource = DEVICES[chosen_device(config.device)].ray_resource or None
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._places: list[ActorLocation] = []
        self._is_closed = False
        with _kept_signals():
            try:
                ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
            except (ConnectionError, RayError) as error:
                raise ConfigError(
                    f"--distributed-executor-backend is ray, and no Ray cluster can be reached "
                    f"from here ({error}): run `ray start` on each host first"
                ) from error
        self._address = ray.util.get_node_ip_address()

    def place(self, num_workers: int) -> list[Ranks]:
        try:
            return self._place(num_workers)
        except BaseException:
            self.close()
            raise

    def _place(self, num_workers: int) -> list[Ranks]:
        resource = self._resource or "CPU"
        total = int(ray.cluster_resources().get(resource, 0))
        if total < num_workers:
            raise ConfigError(
                f"{num_workers} workers need {num_workers} {resource}, the Ray cluster has {total}"
            )
        self._group = placement_group([{resource: 1}] * num_workers, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=PLACE_TIMEOUT_S)
        except GetTimeoutError:
            free = int(ray.available_resources().get(resource, 0))
            raise ConfigError(
                f"{num_workers} workers need {num_workers} {resource}, {free} of the {total} in "
                "the Ray cluster are free"
            ) from None
        cards = {"resources": {"HPU": 1}} if resource == "HPU" else {"num_gpus": 1}
        actor_class = ray.remote(
            # `stop` needs a thread while `wait` blocks another thread.
            max_concurrency=4,
            num_cpus=0 if self._resource else 1,
            **(cards if self._resource else {}),
        )(WorkerActor)
        actors = [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                )
            ).remote()
            for index in range(num_workers)
        ]
        self._actors = actors
        places = [ActorLocation(*_answer(actor.place.remote(self._resource))) for actor in actors]
        own = ray.get_runtime_context().get_node_id()
        # Ranks of a host are adjacent; the engine's host comes first.
        order = sorted(
            range(num_workers),
            key=lambda index: (places[index].node != own, places[index].node, index),
        )
        self._actors = [actors[index] for index in order]
        self._places = [places[index] for index in order]
        for rank, place in enumerate(self._places):
            logger.info("Rank %d: host %s, card %s", rank, place.address, place.card or "none")
        if resource == "HPU":
            check_cards_per_host([place.address for place in self._places])
        rendezvous = ""
        if num_workers > 1:
            port = _answer(self._actors[0].free_port.remote())
            rendezvous = f"tcp://{self._places[0].address}:{port}"
        nodes = [place.node for place in self._places]
        return [
            Ranks(
                num_workers,
                rank,
                rendezvous,
                # Ray shows each actor only its own card.
                local_rank=0 if self._resource else nodes[:rank].count(nodes[rank]),
            )
            for rank in range(num_workers)
        ]

    def endpoint(self, name: str) -> str:
        return f"tcp://{self._address}:*"

    def launch(
        self, name: str, orders: WorkerOrders, on_exit: Callable[[ProcessEnd], None]
    ) -> LaunchedWorker:
        rank = orders.ranks.rank
        return RayWorker(name, self._actors[rank], self._places[rank], orders, on_exit)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._group is not None:
            # This ends the actors of the group, too.
            remove_placement_group(self._group)
        with _kept_signals():
            ray.shutdown()


def _answer(reference: Any) -> Any:
    """Wait for an actor's answer. Raises ConfigError when the actor fails or does not answer in
    time."""
    try:
        return ray.get(reference, timeout=START_TIMEOUT_S)
    except RayError as error:
        raise ConfigError(f"Ray cannot start a worker: {error}") from error


@contextlib.contextmanager
def _kept_signals() -> Any:
    """Restore this process's SIGTERM handler, which Ray replaces, at the end of the block. No-op on
    a thread other than the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

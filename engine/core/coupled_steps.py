"""StepSync, DPSync and DPCoordinator: synchronize the steps of engines that share experts.

The devices of all engines must run the same launches in the same order, since each launch exchanges
tokens with the other engines. All engines therefore agree on a step before they submit it. When no
engine has work, no engine proposes a step and all engines block.
"""

import os
import threading
import zlib
from collections.abc import Sequence

import msgspec

from config.engine import EngineConfig
from config.errors import ConfigError
from engine.scheduling.shared_launches import share_launches
from engine.transport.channels import (
    TCP,
    ConnectionWatch,
    PairSocket,
    Pollables,
    Waiter,
    WakeUp,
    ZmqContext,
)
from engine.transport.step_messages import (
    AgreedStep,
    FromHub,
    JoinSteps,
    StepCall,
    StepProposal,
    StepsRefused,
    ToHub,
)
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import Bucket, Launch, StepPlan

JOINED = -1
"""Step number in the answer to JoinSteps; real steps start at 0."""

_OWN_SETTINGS = ("model", "cache_dir", "download_dir", "num_threads", "data_parallel")
"""Settings that may differ between engines, except the data-parallel size."""


class StopSignal(WakeUp):
    """Stop flag of an engine; any thread may set it."""

    def __init__(self) -> None:
        super().__init__()
        self._reason: BaseException | None = None

    def stop(self, reason: BaseException) -> None:
        """Make `check` raise `reason` from now on."""
        self._reason = reason
        self.set()

    def check(self) -> None:
        if self._reason is not None:
            raise self._reason


class StepSync:
    """Synchronizes an engine's steps with other engines. The base class is a no-op for a single
    engine."""

    is_coupled = False
    """Whether other engines take part in each step."""
    pollables = Pollables()
    """Readable when another engine may have proposed a step."""

    def __init__(self, engine: int = 0) -> None:
        """`engine`: data-parallel index of this engine."""
        self.engine = engine

    def is_called(self, step: int) -> bool:
        """Whether this engine must take part in `step`, even without work."""
        return False

    def share(self, step: int, plan: StepPlan) -> StepPlan:
        """Return `plan` with the buckets that all engines agree on. Blocks until all engines have
        proposed."""
        return plan


SINGLE_ENGINE = StepSync()


class HubClient:
    """Connection of an engine to the DPCoordinator (hub) of the engines that step together. Call
    all methods on the thread of the engine loop. All methods except `close` raise EngineDied if a
    hub on another host has disconnected, and ConfigError if it refused the token."""

    def __init__(self, endpoint: str, token: str, stop: StopSignal) -> None:
        """`stop` interrupts every wait for other engines."""
        self._context = ZmqContext(token)
        self._watches: list[ConnectionWatch] = []
        """Monitors of the connection to a hub on another host."""
        self._socket: PairSocket[ToHub, FromHub] = self._context.connect_pair(
            endpoint, FromHub, self._watches
        )
        self.pollables = Pollables([self._socket, *self._watches])
        """Readable when another engine may have proposed a step."""
        self._waiter = Waiter(*(self.pollables | Pollables(fds=[stop.fd])))
        self._stop = stop
        self._called = JOINED
        """Last step that another engine has proposed."""
        self._agreed: AgreedStep | None = None

    def join(self, engine: int, config: EngineConfig) -> None:
        """Wait until all engines have joined. Raises ConfigError if their settings differ."""
        self._socket.send(JoinSteps(engine, settings_checksum(config)))
        self._wait_for(JOINED)

    def is_called(self, step: int) -> bool:
        """Whether another engine has proposed `step`. Does not block."""
        self._receive()
        return self._called >= step

    def agree(self, step: int, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
        """Propose `buckets` for `step`. Blocks until all engines have proposed; returns the
        proposals by engine."""
        self._socket.send(StepProposal(step, list(buckets)))
        return self._wait_for(step).planned

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        self._socket.close()
        self._context.close()

    def _wait_for(self, step: int) -> AgreedStep:
        self._receive()
        while self._agreed is None:
            self._waiter.wait()
            self._stop.check()
            self._receive()
        agreed, self._agreed = self._agreed, None
        assert agreed.step == step, f"step {agreed.step} was agreed on, not {step}"
        return agreed

    def _receive(self) -> None:
        for watch in self._watches:
            watch.check()
        while (message := self._socket.receive()) is not None:
            if isinstance(message, StepCall):
                self._called = message.step
            elif isinstance(message, AgreedStep):
                self._agreed = message
            else:
                raise ConfigError(message.message)


class DPSync(StepSync):
    """Synchronizes the steps of this engine with the steps of its group."""

    is_coupled = True

    def __init__(
        self, group: HubClient, engine: int, table: BucketTable, *, max_tokens: int
    ) -> None:
        """`table`: prepared buckets. The table must not be shared with other objects, so that it
        stays equal on all engines. `max_tokens`: token limit of a launch."""
        self._group = group
        self.pollables = group.pollables
        super().__init__(engine)
        self._table = table
        self._max_tokens = max_tokens

    def is_called(self, step: int) -> bool:
        return self._group.is_called(step)

    def share(self, step: int, plan: StepPlan) -> StepPlan:
        """Return `plan` with the shared launches of all engines: this engine's launches in the
        agreed buckets, and padding launches where this engine has none."""
        own = plan.launches
        planned = self._group.agree(step, [(launch.phase, *launch.bucket) for launch in own])
        plan.launches = []
        for (phase, *shape), indices in share_launches(planned, self._table, self._max_tokens):
            index = indices[self.engine]
            launch = Launch(phase, (0, 0, 0), []) if index is None else own[index]
            launch.bucket = (shape[0], shape[1], shape[2])
            plan.launches.append(launch)
        return plan


class DPCoordinator:
    """Collects the proposals of all engines for a step, on a thread of engine 0's process. The
    first proposal for a step notifies the other engines; after the last proposal, all engines
    receive all proposals."""

    def __init__(self, endpoints: Sequence[str], token: str, remote_token: str = "") -> None:
        """Listen at an endpoint per engine. An engine on this host presents `token`, an engine on
        another host `remote_token`. Raises ConfigError if an address cannot be bound."""
        self._contexts = [ZmqContext(token)]
        if remote_token:
            self._contexts.append(ZmqContext(remote_token))
        self._sockets: list[PairSocket[FromHub, ToHub]] = [
            self._contexts[endpoint.startswith(TCP)].bind_pair(endpoint, ToHub)
            for endpoint in endpoints
        ]
        self._steps = StepCollector(len(endpoints))
        self._end_read, self._end_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="step hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and disconnect."""
        os.close(self._end_write)
        self._thread.join()
        os.close(self._end_read)

    def _run(self) -> None:
        waiter = Waiter(self._sockets, [self._end_read])
        while self._end_read not in waiter.wait():
            for engine, socket in enumerate(self._sockets):
                while (message := socket.receive()) is not None:
                    if isinstance(message, JoinSteps):
                        socket.stop_accepting()
                    for to, answer in self._steps.take(engine, message):
                        # Answers to a dead engine are lost; the process that watches it ends the
                        # other engines.
                        self._sockets[to].send(answer)
        for socket in self._sockets:
            socket.close()
        for context in self._contexts:
            context.close()


class StepCollector:
    """State of a DPCoordinator, without sockets."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._settings: dict[int, int] = {}
        """Settings checksums of the engines that have joined."""
        self._step = 0
        self._proposals: dict[int, list[Bucket]] = {}
        """Proposals for `_step`, by engine."""

    def take(self, engine: int, message: ToHub) -> list[tuple[int, FromHub]]:
        """Handle a message of `engine`; returns (receiving engine, answer) pairs."""
        members = range(self._num_engines)
        if isinstance(message, JoinSteps):
            self._settings[engine] = message.settings
            if len(self._settings) < self._num_engines:
                return []
            refusal = self._refusal()
            return [(member, refusal or AgreedStep(JOINED, [])) for member in members]
        assert message.step == self._step and engine not in self._proposals, (
            f"engine {engine} proposes step {message.step}, the next one is {self._step}"
        )
        self._proposals[engine] = message.buckets
        if len(self._proposals) == self._num_engines:
            agreed = AgreedStep(self._step, [self._proposals[member] for member in members])
            self._proposals = {}
            self._step += 1
            return [(member, agreed) for member in members]
        if len(self._proposals) > 1:
            return []
        return [(member, StepCall(self._step)) for member in members if member != engine]

    def _refusal(self) -> StepsRefused | None:
        for engine, settings in sorted(self._settings.items()):
            if settings != self._settings[0]:
                return StepsRefused(
                    f"engine {engine} has other settings than engine 0: engines that share "
                    "experts (--enable-expert-parallel) need the same settings"
                )
        return None


def settings_checksum(config: EngineConfig) -> int:
    """Checksum of the settings that must be equal on all engines that step together."""
    settings = msgspec.to_builtins(config)
    for name in _OWN_SETTINGS:
        del settings[name]
    size = config.data_parallel.data_parallel_size
    return zlib.crc32(msgspec.json.encode([size, settings], order="deterministic"))

"""ExternalLauncherExecutor: this rank's worker, in a process that torchrun or a similar launcher
started.

Each rank has its own engine, and all engines decide the same steps (engine/core/lockstep.py).
"""

import zlib

import msgspec

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied
from config.loading.env import LaunchedRank
from engine.executors.base import Report
from engine.executors.inproc import InprocExecutor
from hpu.protocol import GrammarMasks, Ranks, StepPlan, ToWorker, WorkerReady
from hpu.worker.worker import Worker

_DIGEST_BYTES = 4
_DECISIONS = (StepPlan, GrammarMasks)
"""Messages whose equality on all ranks is checked."""


class ExternalLauncherExecutor(InprocExecutor):
    """Executor of a single rank. Its behavior must not depend on timing, which differs between
    ranks: buckets are not warmed up when the engine is idle, and results are not collected
    early."""

    def __init__(self, config: EngineConfig, launched: LaunchedRank) -> None:
        """Raises ConfigError."""
        parallel = config.parallel
        if launched.world_size != parallel.world_size:
            raise ConfigError(
                f"the launcher started {launched.world_size} processes, and the model is divided "
                f"among {parallel.world_size} devices: the numbers must be the same"
            )
        if parallel.world_size != parallel.tensor_parallel_size:
            raise ConfigError(
                "--distributed-executor-backend is external_launcher and --tensor-parallel-size "
                f"is {parallel.tensor_parallel_size}, it must be {parallel.world_size}, the "
                "number of ranks"
            )
        # env://: the launcher may already have bound the rendezvous port.
        ranks = Ranks(launched.world_size, launched.rank, "env://", local_rank=launched.local_rank)
        super().__init__(Worker(config, ranks))
        self.rank = launched.rank
        self._encode = msgspec.msgpack.Encoder().encode
        self._digest = 0
        """CRC-32 of all plans and masks so far."""

    def start(self, report: Report) -> WorkerReady:
        return self._warm_up_all(super().start(report))

    def wake_up(self) -> WorkerReady:
        return self._warm_up_all(super().wake_up())

    def send(self, message: ToWorker) -> None:
        if type(message) in _DECISIONS:
            self._digest = zlib.crc32(self._encode(message), self._digest)
        super().send(message)

    def has_result(self) -> bool:
        """Always False: a result may be ready at different times on different ranks."""
        return False

    def share(self, data: bytes) -> bytes:
        own = self._digest.to_bytes(_DIGEST_BYTES, "little")
        shared = self._worker.share(own + data)
        if shared[:_DIGEST_BYTES] != own:
            raise EngineDied(
                f"rank {self.rank} has scheduled other steps than rank 0: all ranks must make the "
                "same calls with the same arguments"
            )
        return shared[_DIGEST_BYTES:]

    def _warm_up_all(self, ready: WorkerReady) -> WorkerReady:
        """Warm up the buckets that other executors leave for idle time."""
        buckets, counters = list(ready.buckets), dict(ready.counters)
        while (warmed := self._worker.idle()) is not None:
            buckets += warmed.buckets
            counters.update(warmed.counters)
        return msgspec.structs.replace(ready, buckets=buckets, counters=counters, num_deferred=0)

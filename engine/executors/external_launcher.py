"""ExternalLauncherExecutor: this rank's worker, in a process that torchrun or a similar launcher
started.

Each rank has its own engine, and all engines decide the same steps (engine/core/lockstep.py).
"""

import zlib
from collections.abc import Callable

import msgspec

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied
from config.loading.env import LaunchedRank
from engine.executors.inproc import InprocExecutor
from hpu.protocol import GrammarMasks, Ranks, StepPlan, WarmupProgress, WorkerReady

_DIGEST_BYTES = 4


class ExternalLauncherExecutor(InprocExecutor):
    """Executor of a single rank. Its behavior must not depend on timing, which differs between
    ranks: buckets are not warmed up when the engine is idle, and results are not collected early.
    """

    def __init__(self, config: EngineConfig, launched: LaunchedRank) -> None:
        """Raises ConfigError when the number of launched processes differs from the model's number
        of ranks, or when the ranks are not all tensor-parallel."""
        parallel = config.parallel
        if launched.world_size != parallel.world_size:
            raise ConfigError(
                f"the launcher started {launched.world_size} processes, and the model is divided "
                f"among {parallel.world_size} devices: the numbers must be the same"
            )
        if parallel.world_size != parallel.tensor_parallel_size:
            raise ConfigError(
                f"--distributed-executor-backend is external_launcher, where each rank needs the "
                f"results: all {parallel.world_size} ranks must be tensor-parallel, "
                f"{parallel.tensor_parallel_size} are"
            )
        # env://: the launcher may already hold the rendezvous port.
        super().__init__(
            config,
            Ranks(launched.world_size, launched.rank, "env://", local_rank=launched.local_rank),
        )
        self.rank = launched.rank
        self._encode = msgspec.msgpack.Encoder().encode
        self._digest = 0
        """CRC-32 of all plans and masks so far."""

    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        ready = super().start(on_progress)
        return self._warm_up_all(ready)

    def wake_up(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        return self._warm_up_all(super().wake_up(on_progress))

    def submit(self, plan: StepPlan) -> None:
        self._count(plan)
        super().submit(plan)

    def submit_masks(self, masks: GrammarMasks) -> None:
        self._count(masks)
        super().submit_masks(masks)

    def has_result(self) -> bool:
        """Always False: the devices of other ranks may be faster or slower."""
        return False

    def share(self, data: bytes) -> bytes:
        own = self._digest.to_bytes(_DIGEST_BYTES, "little")
        shared = self._worker.share(own + data)
        if shared[:_DIGEST_BYTES] != own:
            raise EngineDied(
                f"rank {self.rank} has decided other steps than rank 0: all ranks must make the "
                "same calls with the same arguments"
            )
        return shared[_DIGEST_BYTES:]

    def _count(self, message: StepPlan | GrammarMasks) -> None:
        self._digest = zlib.crc32(self._encode(message), self._digest)

    def _warm_up_all(self, ready: WorkerReady) -> WorkerReady:
        """Warm up the buckets that other executors leave for idle time."""
        buckets, counters = list(ready.buckets), dict(ready.counters)
        while (warmed := self._worker.idle()) is not None:
            buckets += warmed.buckets
            counters.update(warmed.counters)
        return msgspec.structs.replace(ready, buckets=buckets, counters=counters, num_deferred=0)

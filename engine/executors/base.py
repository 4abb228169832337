"""Executor: the protocol by which an engine reaches its workers."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from hpu.protocol import (
    AdapterLoaded,
    BlocksFetched,
    DropAdapter,
    DropFiles,
    FetchBlocks,
    GrammarMasks,
    LoadAdapter,
    StepPlan,
    StepResult,
    Warmed,
    WarmupProgress,
    WorkerReady,
)

IDLE_S = 0.25
"""Without a plan for so long, a worker continues its warm-up."""


class Executor(Protocol):
    """A group of workers that run every plan together. Results come in the order of the plans."""

    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        """Load, measure, warm up. Raises ConfigError or EngineDied with the worker's message."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Send a plan; does not wait for it."""
        ...

    def submit_masks(self, masks: GrammarMasks) -> None:
        """Send the deferred masks of the oldest plan: once its result is the next to come, and
        before another plan. Does not wait."""
        ...

    def has_result(self) -> bool:
        """Whether `collect` would not wait. A device that computes in `submit` has its result at
        once, so that the result need not wait for the next plan."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest plan's result. Raises EngineDied when a worker is gone."""
        ...

    def call(self, name: str, level: int = 0) -> str:
        """Send a WorkerCall, any but WAKE_UP, to every worker, and wait for the answer. Raises
        UserError or RequestFailed with a worker's message, or EngineDied."""
        ...

    def wake_up(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        """End the sleep that a call of SLEEP began. Raises RequestFailed with a worker's message,
        which then continues to sleep, or EngineDied."""
        ...

    def warm_up_next(self) -> bool:
        """Warm up one more of the remaining buckets. Only with no plan in flight, and when none has
        come for a while. False when nothing is left, or when the workers notice themselves that
        they are idle."""
        ...

    def take_warmed(self) -> list[Warmed]:
        """What was warmed up since the last call; does not wait."""
        ...

    def close(self) -> None:
        """Stop the workers and wait for them; safe to call twice."""
        ...


@runtime_checkable
class AdapterExecutor(Protocol):
    """An executor whose workers serve LoRA adapters."""

    def load_adapter(self, message: LoadAdapter) -> None:
        """Let every worker read an adapter to host memory; does not wait."""
        ...

    def drop_adapter(self, message: DropAdapter) -> None:
        """Let every worker forget an adapter in host memory."""
        ...

    def take_loaded(self) -> list[AdapterLoaded]:
        """The adapters that all workers have read since the last call, or that one could not; does
        not wait."""
        ...

    def wait_loaded(self, timeout_s: float) -> None:
        """Wait until `take_loaded` may have something, at most so long. Raises EngineDied."""
        ...


@runtime_checkable
class OffloadExecutor(Protocol):
    """An executor whose workers keep KV blocks in files."""

    def fetch_blocks(self, message: FetchBlocks) -> None:
        """Let every worker read blocks to host memory; does not wait."""
        ...

    def drop_files(self, message: DropFiles) -> None:
        """Let every worker delete files; does not wait."""
        ...

    def take_fetched(self) -> list[BlocksFetched]:
        """What all workers have read since the last call, in the order of `fetch_blocks`; does not
        wait."""
        ...

    def wait_fetched(self, timeout_s: float) -> None:
        """Wait until `take_fetched` may have something, at most so long. Raises EngineDied."""
        ...


@runtime_checkable
class Lockstep(Protocol):
    """An executor whose engine is one of several, a rank each, that must decide the same steps."""

    @property
    def rank(self) -> int:
        """Of this engine; what rank 0 decides counts."""
        ...

    def share(self, data: bytes) -> bytes:
        """The `data` of rank 0, on all ranks; waits for it. Raises EngineDied when this rank has
        submitted other plans than rank 0."""
        ...

"""Executor: how an engine reaches its workers."""

from abc import ABC, abstractmethod
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
    WarmedBuckets,
    WarmupProgress,
    WorkerReady,
)

IDLE_S = 0.25
"""Time without a plan after which a worker continues its warm-up; seconds."""


class Executor(ABC):
    """A group of workers that all run every plan. Results arrive in the order of the plans.

    An executor without adapters and files need not define the methods for them.
    """

    @abstractmethod
    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        """Load the model, measure memory, warm up. Raises ConfigError or EngineDied with the
        worker's message."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Send a plan; does not wait for its result."""

    @abstractmethod
    def submit_masks(self, masks: GrammarMasks) -> None:
        """Send the deferred masks of the oldest plan. Call it when the result of that plan is the
        next to arrive, and before another plan is submitted. Does not wait."""

    @abstractmethod
    def has_result(self) -> bool:
        """Whether `collect` would return at once. A device that computes in `submit` has its result
        immediately; the result need not wait for the next plan."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Wait for the oldest plan's result. Raises EngineDied when a worker has died."""

    @abstractmethod
    def call(self, name: str, level: int = 0) -> str:
        """Send a WorkerCall (except WAKE_UP) to every worker and wait for the answer. Raises
        UserError or RequestFailed with a worker's message, or EngineDied."""

    @abstractmethod
    def wake_up(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        """End the sleep that a SLEEP call started. Raises RequestFailed with the message of a
        worker, which then stays asleep, or EngineDied."""

    @abstractmethod
    def warm_up_next(self) -> bool:
        """Warm up the next remaining bucket. Call it only with no plan in flight, after some time
        without plans. False if no bucket is left, or if the workers detect by themselves that they
        are idle."""

    @abstractmethod
    def take_warmed(self) -> list[WarmedBuckets]:
        """Buckets that were warmed up since the last call; does not wait."""

    def load_adapter(self, message: LoadAdapter) -> None:
        """Make every worker read an adapter into host memory; does not wait."""
        raise NotImplementedError

    def drop_adapter(self, message: DropAdapter) -> None:
        """Make every worker drop an adapter from host memory."""
        raise NotImplementedError

    def take_loaded(self) -> list[AdapterLoaded]:
        """Adapters that all workers have read since the last call, or that a worker could not read;
        does not wait."""
        raise NotImplementedError

    def wait_loaded(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until `take_loaded` may return an adapter. Raises EngineDied."""
        raise NotImplementedError

    def fetch_blocks(self, message: FetchBlocks) -> None:
        """Make every worker read KV blocks from files into host memory; does not wait."""
        raise NotImplementedError

    def drop_files(self, message: DropFiles) -> None:
        """Make every worker delete files of KV blocks; does not wait."""
        raise NotImplementedError

    def take_fetched(self) -> list[BlocksFetched]:
        """Reads that all workers have finished since the last call, in the order of `fetch_blocks`;
        does not wait."""
        raise NotImplementedError

    def wait_fetched(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until `take_fetched` may return a read. Raises EngineDied."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and wait for them; safe to call twice."""


@runtime_checkable
class Lockstep(Protocol):
    """An executor in a group of engines, a rank each, that must decide the same steps."""

    @property
    def rank(self) -> int:
        """Rank of this engine; the decisions of rank 0 hold for all ranks."""
        ...

    def share(self, data: bytes) -> bytes:
        """The `data` of rank 0, on all ranks; waits for rank 0. Raises EngineDied when this rank
        has submitted other plans than rank 0."""
        ...

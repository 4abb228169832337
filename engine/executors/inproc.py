"""InprocExecutor: a worker in the engine's process, called by the engine's thread."""

from collections.abc import Callable

from config.engine import EngineConfig
from engine.executors.base import Executor
from hpu.protocol import (
    SINGLE_RANK,
    AdapterLoaded,
    BlocksFetched,
    DropAdapter,
    DropFiles,
    FetchBlocks,
    GrammarMasks,
    LoadAdapter,
    Ranks,
    StepPlan,
    StepResult,
    WarmedBuckets,
    WarmupProgress,
    WorkerReady,
)
from hpu.worker.worker import Worker


class InprocExecutor(Executor):
    """Executor without a worker process and without copies; the worker's Python runs on the
    scheduler's thread.

    On a CPU, `submit` computes the plan, so its result exists before the next plan is scheduled,
    and no mask is deferred. On a card, masks are deferred like in other executors.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks = SINGLE_RANK) -> None:
        self._worker = Worker(config, ranks)
        self._warmed: list[WarmedBuckets] = []

    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        return self._worker.start(on_progress)

    def submit(self, plan: StepPlan) -> None:
        self._worker.submit(plan)

    def submit_masks(self, masks: GrammarMasks) -> None:
        self._worker.mask(masks)

    def has_result(self) -> bool:
        return self._worker.has_result()

    def collect(self) -> StepResult:
        return self._worker.collect()

    def call(self, name: str, level: int = 0) -> str:
        return self._worker.call(name, level)

    def wake_up(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        return self._worker.wake_up(on_progress)

    def warm_up_next(self) -> bool:
        warmed = self._worker.idle()
        if warmed is None:
            return False
        self._warmed.append(warmed)
        return warmed.num_deferred > 0

    def load_adapter(self, message: LoadAdapter) -> None:
        self._worker.load_adapter(message)

    def drop_adapter(self, message: DropAdapter) -> None:
        self._worker.drop_adapter(message)

    def take_loaded(self) -> list[AdapterLoaded]:
        return self._worker.take_loaded()

    def wait_loaded(self, timeout_s: float) -> None:
        self._worker.wait_loaded(timeout_s)

    def fetch_blocks(self, message: FetchBlocks) -> None:
        self._worker.fetch_blocks(message)

    def drop_files(self, message: DropFiles) -> None:
        self._worker.drop_files(message)

    def take_fetched(self) -> list[BlocksFetched]:
        return self._worker.take_fetched()

    def wait_fetched(self, timeout_s: float) -> None:
        self._worker.wait_fetched(timeout_s)

    def take_warmed(self) -> list[WarmedBuckets]:
        warmed, self._warmed = self._warmed, []
        return warmed

    def close(self) -> None:
        self._worker.close()

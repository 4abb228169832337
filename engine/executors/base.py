"""Executor: how an engine reaches its workers. Plans go in, results come out, in order."""

from collections.abc import Callable
from typing import Protocol

from hpu.protocol import GrammarMasks, StepPlan, StepResult, Warmed, WarmupProgress, WorkerReady

IDLE_S = 0.25
"""Without a plan for so long, a worker prepares what is left of its warm-up."""


class Executor(Protocol):
    """One group of workers that run every plan together."""

    def start(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        """Load, measure, warm up. Raises ConfigError or EngineDied with the worker's words."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Send a plan; does not wait for it."""
        ...

    def submit_masks(self, masks: GrammarMasks) -> None:
        """Send what the late rows of the oldest plan wait for: once its result is the next to come,
        and before another plan. Does not wait."""
        ...

    def has_result(self) -> bool:
        """Whether `collect` would not wait. A device that computes while it is given its plan is
        ready at once: its results need not wait for the next plan."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest plan's result. Raises EngineDied when a worker is gone."""
        ...

    def call(self, name: str, level: int = 0) -> str:
        """Ask every worker something beside the plans, a call of hpu.step.WorkerCall but WAKE_UP,
        and wait for the answer. Raises UserError or RequestFailed in the worker's words, or
        EngineDied."""
        ...

    def wake_up(self, on_progress: Callable[[WarmupProgress], None]) -> WorkerReady:
        """End the sleep that a call of SLEEP began. Raises RequestFailed in the worker's words,
        which sleeps on then, or EngineDied."""
        ...

    def warm_up_next(self) -> bool:
        """Prepare one more of the buckets that were left for later. Only with no plan in flight,
        and when none has come for a while. False when nothing is left to be done here: also where
        workers see for themselves that they are idle."""
        ...

    def take_warmed(self) -> list[Warmed]:
        """What was prepared since the last call; does not wait."""
        ...

    def close(self) -> None:
        """Stop the workers and wait for them; safe to call twice."""
        ...

"""StepRunner: plans in, results out, whatever a launch is made of. Knows no rows and no models."""

import time

from hpu.backends.base import Backend
from hpu.profiling.counters import Counters
from hpu.profiling.diagnostics import Diagnostics
from hpu.profiling.profiler import Trace
from hpu.protocol import RequestSampling, StepPlan, StepResult
from hpu.runner.async_output import AsyncStepOutput
from hpu.runner.input_buffers import Bucket


class StepRunner:
    """Runs plans on one device. Plans are collected in the order of their submission; one may be
    submitted while those before it are not collected yet."""

    def __init__(self, backend: Backend, counters: Counters) -> None:
        self._backend = backend
        self._counters = counters
        self.trace: Trace | None = None
        """Where steps are noted; set and taken away between steps."""
        self.diagnostics: Diagnostics | None = None
        """Set where the device's runtime counts."""

    def submit(self, plan: StepPlan) -> AsyncStepOutput:
        """Apply a plan's changes and launch it, without waiting for the device."""
        start = time.perf_counter()
        self._apply(plan)
        pending = AsyncStepOutput(plan.step, host_s=time.perf_counter() - start)
        self._launch_all(plan, pending)
        if self.trace is not None:
            self.trace.submitted(pending, start)
        return pending

    def collect(self, pending: AsyncStepOutput) -> StepResult:
        """Wait for a submitted plan's results."""
        pending.wait()
        start = time.perf_counter()
        result = pending.result()
        self._take_in(pending, result)
        if self.diagnostics is not None:
            self.diagnostics.collected(pending)
        result.counters = self._counters.take_changed()
        result.host_s = pending.host_s + time.perf_counter() - start
        if self.trace is not None:
            self.trace.collected(pending, result.seconds, start)
        return result

    @property
    def kinds(self) -> tuple[RequestSampling, ...]:
        """All that a launch may be asked for beside its shape, for a warm-up; the plain one is
        hpu.sampler.GREEDY."""
        raise NotImplementedError

    def warm(self, bucket: Bucket, kind: RequestSampling, *, prompts: bool = False) -> None:
        """Run a bucket once on nothing, with one of `kinds`; with `prompts`, a prefill's prompt
        log-probabilities too. Waits for the device."""
        raise NotImplementedError

    def _apply(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def _launch_all(self, plan: StepPlan, pending: AsyncStepOutput) -> None:
        """Fill in `pending`, its end included."""
        raise NotImplementedError

    def _take_in(self, pending: AsyncStepOutput, result: StepResult) -> None:
        """Learn from a result that is complete."""

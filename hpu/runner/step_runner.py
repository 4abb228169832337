"""StepRunner: base of the runners. Plans in, results out."""

import time

from hpu.backends.base import Backend
from hpu.profiling.counters import Counters
from hpu.profiling.diagnostics import Diagnostics
from hpu.profiling.profiler import Trace
from hpu.protocol import Bucket, RequestSampling, StepPlan, StepResult
from hpu.runner.async_output import AsyncStepOutput


class StepRunner:
    """Runs plans on one device. Results are collected in the order of submission; the next plan may
    be submitted before."""

    def __init__(self, backend: Backend, counters: Counters) -> None:
        self._backend = backend
        self._counters = counters
        self.trace: Trace | None = None
        """Records steps while it is set; changed between steps."""
        self.diagnostics: Diagnostics | None = None
        """Set where the device's runtime has counters."""

    def submit(self, plan: StepPlan) -> AsyncStepOutput:
        """Apply a plan's changes and launch it; does not wait for the device."""
        start = time.perf_counter()
        self._apply(plan)
        output = AsyncStepOutput(plan.step, host_s=time.perf_counter() - start)
        self._launch_all(plan, output)
        if self.trace is not None:
            self.trace.submitted(output, start)
        return output

    def collect(self, output: AsyncStepOutput) -> StepResult:
        """Wait for a submitted plan's result."""
        output.wait()
        start = time.perf_counter()
        result = output.to_result()
        self._on_result(output, result)
        if self.diagnostics is not None:
            self.diagnostics.collected(output)
        result.counters = self._counters.take_changed()
        result.host_s = output.host_s + time.perf_counter() - start
        if self.trace is not None:
            self.trace.collected(output, result.seconds, start)
        return result

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Sampling settings that a warm-up runs in each batch width, GREEDY among them."""
        raise NotImplementedError

    def warm_up(self, bucket: Bucket, sampling: RequestSampling, *, prompts: bool = False) -> None:
        """Run a bucket once on dummy inputs with one of `warmup_settings`, and with `prompts` the
        prompt log-probabilities of a prefill. Waits for the device."""
        raise NotImplementedError

    def _apply(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def _launch_all(self, plan: StepPlan, output: AsyncStepOutput) -> None:
        """Launch a plan; sets `output.launches` and `output.end`."""
        raise NotImplementedError

    def _on_result(self, output: AsyncStepOutput, result: StepResult) -> None:
        """Hook for a complete result."""

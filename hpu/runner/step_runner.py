"""StepRunner: base of the runners. Plans in, results out."""

import time
from typing import Protocol

from hpu.backends.base import Backend
from hpu.lora.manager import LoRAManager
from hpu.protocol import Bucket, RequestSampling, StepPlan, StepResult
from hpu.runner.async_output import AsyncStepOutput


class Offload(Protocol):
    """Copies KV blocks to the host and back."""

    def apply(self, plan: StepPlan) -> None:
        """Launch the copies of a plan, before its launches."""
        ...

    def land(self, step: int) -> list[int]:
        """The device is done with all steps up to this one; its StepResult.corrupt_loads."""
        ...


class StepRunner:
    """Runs plans on one device. Results are collected in the order of submission; the next plan may
    be submitted before."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.lora: LoRAManager | None = None
        """Set where adapters are served."""
        self.offload: Offload | None = None
        """Set where KV blocks are kept outside the device."""
        self.decode_width = 1
        """Rows that a decode samples for each request."""

    def submit(self, plan: StepPlan) -> AsyncStepOutput:
        """Apply a plan's changes and launch it; does not wait for the device."""
        start = time.perf_counter()
        if plan.lora_slots:
            assert self.lora is not None, "a plan with adapters for a worker without any"
            self.lora.activate(plan.lora_slots, plan.lora_adapters)
        self._apply(plan)
        output = AsyncStepOutput(plan.step, host_s=time.perf_counter() - start)
        self._launch_all(plan, output)
        return output

    def collect(self, output: AsyncStepOutput) -> StepResult:
        """The result of a submitted plan that the device is done with."""
        start = time.perf_counter()
        result = output.to_result()
        self._on_result(output, result)
        if self.offload is not None:
            result.corrupt_loads = self.offload.land(output.step)
        result.host_s = output.host_s + time.perf_counter() - start
        return result

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Sampling settings that a warm-up runs in each batch width, GREEDY among them."""
        raise NotImplementedError

    @property
    def captured_settings(self) -> tuple[RequestSampling, ...]:
        """Those of `warmup_settings` that a warm-up repeats once in each batch width of captured
        decodes: those that a graph may sample, and one that none does, if there is one."""
        return self.warmup_settings[:1]

    def warm_up(self, bucket: Bucket, *samplings: RequestSampling, prompts: bool = False) -> None:
        """Run a bucket once on dummy inputs and sample with each of `samplings` in turn, some of
        `warmup_settings`; with `prompts` the prompt log-probabilities of a prefill follow the
        first. Waits for the device."""
        raise NotImplementedError

    def _apply(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def _launch_all(self, plan: StepPlan, output: AsyncStepOutput) -> None:
        """Launch a plan; sets `output.launches` and `output.end`."""
        raise NotImplementedError

    def _on_result(self, output: AsyncStepOutput, result: StepResult) -> None:
        """Hook for a complete result."""

"""StepRunner: base class of the runners, from step plans to step results."""

import time
from typing import Protocol

from hpu.backends.base import Backend
from hpu.lora.manager import LoRAManager
from hpu.protocol import Bucket, RequestSampling, StepPlan, StepResult
from hpu.runner.async_output import AsyncStepOutput


class Offload(Protocol):
    """KV block offloading: copies blocks to the host and back."""

    def apply(self, plan: StepPlan) -> None:
        """Launch the copies of a plan, before its launches."""
        ...

    def land(self, step: int) -> list[int]:
        """Complete the copies of all steps up to `step`, which the device has finished. Returns
        StepResult.corrupt_loads."""
        ...


class StepRunner:
    """Runs plans on one device. Results are collected in submission order; the next plan may be
    submitted before the previous result is collected."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.lora: LoRAManager | None = None
        """Set if adapters are served."""
        self.offload: Offload | None = None
        """Set if KV blocks are offloaded."""
        self.decode_width = 1
        """Tokens that a decode samples per request."""

    def submit(self, plan: StepPlan) -> AsyncStepOutput:
        """Apply a plan's changes and launch it; does not wait for the device."""
        start = time.perf_counter()
        if plan.lora_slots:
            assert self.lora is not None, "a plan with adapters for a worker without any"
            self.lora.activate(plan.lora_slots, plan.lora_adapters)
        self._apply(plan)
        output = AsyncStepOutput(plan.step, host_s=time.perf_counter() - start)
        output.decode_steps = plan.decode_steps
        self._launch_all(plan, output)
        return output

    def collect(self, output: AsyncStepOutput) -> StepResult:
        """Result of a submitted plan that the device has finished."""
        start = time.perf_counter()
        result = output.to_result()
        self._on_result(output, result)
        if self.offload is not None:
            result.corrupt_loads = self.offload.land(output.step)
        result.host_s = output.host_s + time.perf_counter() - start
        return result

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Sampling settings that a warm-up runs in each batch width, including GREEDY."""
        raise NotImplementedError

    @property
    def is_compilable(self) -> bool:
        """Whether `warm_up` may run where launches are compiled and not executed: whether the host
        needs no result of a launch for the next one."""
        return True

    @property
    def captured_settings(self) -> tuple[RequestSampling, ...]:
        """Subset of `warmup_settings` that a warm-up repeats once in each batch width of captured
        decodes: the settings that a graph may sample, and a setting that no graph samples, if any.
        """
        return self.warmup_settings[:1]

    def warm_up(self, bucket: Bucket, *samplings: RequestSampling, prompts: bool = False) -> None:
        """Run a bucket once on dummy inputs and sample with each of `samplings` (a subset of
        `warmup_settings`) in turn. If `prompts`, a prefill also computes prompt
        log-probabilities after the first sampling. Waits for the device."""
        raise NotImplementedError

    def _apply(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def _launch_all(self, plan: StepPlan, output: AsyncStepOutput) -> None:
        """Launch a plan; sets `output.launches` and `output.end`."""
        raise NotImplementedError

    def _on_result(self, output: AsyncStepOutput, result: StepResult) -> None:
        """Hook for a complete result."""

"""StepRunner: base class of the runners, which turn step plans into step results."""

import time
from collections.abc import Callable

from hpu.backends.base import Backend
from hpu.lora.manager import Adapters
from hpu.protocol import (
    BlocksFetched,
    Bucket,
    FetchBlocks,
    OffloadFacts,
    RequestSampling,
    StepPlan,
    StepResult,
)
from hpu.runner.async_output import AsyncStepOutput


class Offload:
    """KV block offloading: copies blocks to the host and back. This base class offloads no
    blocks."""

    def __init__(self) -> None:
        self.on_fetched: Callable[[], None] = lambda: None
        """Called on another thread when `take_fetched` has a new result."""

    def start(self, pad_block: int) -> OffloadFacts | None:
        """Prepare the copies; returns the capacities, or None without offloading."""
        return None

    def apply(self, plan: StepPlan) -> None:
        """Launch the copies of a plan, before its launches."""

    def land(self, step: int) -> list[int]:
        """Finish the copies of all steps up to `step`, which the device has completed. Returns
        StepResult.corrupt_loads."""
        return []

    def fetch(self, message: FetchBlocks) -> None:
        """Start to read blocks from files to host memory; `take_fetched` returns the result."""
        raise AssertionError("no KV blocks are kept outside the device")

    def take_fetched(self) -> list[BlocksFetched]:
        """Results of `fetch` since the last call; does not wait."""
        return []

    def drop_files(self, hashes: list[bytes]) -> None:
        """Delete the files of blocks."""
        raise AssertionError("no KV blocks are kept outside the device")

    def close(self) -> None:
        """Stop the copies and clear their memory."""


class StepRunner:
    """Runs plans on one device. Results are collected in submission order; the next plan may be
    submitted before the previous result is collected."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.lora = Adapters()
        self.offload = Offload()
        self.decode_width = 1
        """Rows per request that the sampler gets in a decode of a warm-up."""

    def submit(self, plan: StepPlan) -> AsyncStepOutput:
        """Apply a plan's changes and launch it. Does not wait for the results."""
        start = time.perf_counter()
        self.lora.activate(plan.lora_slots, plan.lora_adapters)
        self._apply(plan)
        output = AsyncStepOutput(plan.step, host_s=time.perf_counter() - start)
        output.decode_steps = plan.decode_steps
        self._launch_all(plan, output)
        return output

    def collect(self, output: AsyncStepOutput) -> StepResult:
        """Build the result of a submitted plan that the device has finished."""
        start = time.perf_counter()
        result = output.to_result()
        self._on_result(output, result)
        result.corrupt_loads = self.offload.land(output.step)
        result.host_s = output.host_s + time.perf_counter() - start
        return result

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Sampling settings that a warm-up runs in each batch width, including GREEDY."""
        raise NotImplementedError

    @property
    def is_compilable(self) -> bool:
        """Whether `warm_up` may run in a mode that compiles launches without executing them."""
        return True

    @property
    def captured_settings(self) -> tuple[RequestSampling, ...]:
        """Subset of `warmup_settings` that a warm-up repeats once in each batch width of captured
        decodes: the settings that a graph may sample, and one setting that no graph samples, if
        any."""
        return self.warmup_settings[:1]

    def warm_up(self, bucket: Bucket, *samplings: RequestSampling, prompts: bool = False) -> None:
        """Run a bucket on dummy inputs and sample with each of `samplings` (a subset of
        `warmup_settings`) in turn. If `prompts`, a prefill also computes prompt log-probabilities
        after the first sampling. Waits for the device."""
        raise NotImplementedError

    def _apply(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def _launch_all(self, plan: StepPlan, output: AsyncStepOutput) -> None:
        """Launch a plan; sets `output.launches` and `output.end`."""
        raise NotImplementedError

    def _on_result(self, output: AsyncStepOutput, result: StepResult) -> None:
        """Hook that is called with each collected result."""

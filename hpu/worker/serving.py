"""Serving: a model that is built and warmed up, and runs step plans. Asleep: in its place while a
worker sleeps."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from config.errors import ProfileWritten, UserError
from hpu.backends.base import Backend
from hpu.profiling.core_wait import CoreWait
from hpu.profiling.diagnostics import Diagnostics
from hpu.profiling.profiler import Profiler
from hpu.protocol import (
    BlocksFetched,
    GrammarMasks,
    Ranks,
    StepPlan,
    StepResult,
    WarmedBuckets,
    WarmupProgress,
    WorkerReady,
)
from hpu.runner.async_output import AsyncStepOutput
from hpu.runner.counters import Counters
from hpu.runner.model_runner import ModelRunner
from hpu.spec_decode.host_runner import PlannedDraftRunner
from hpu.warmup import report
from hpu.warmup.warmup import Warmup
from hpu.worker.build import (
    Components,
    build,
    make_diagnostics,
    num_cache_rows,
    num_request_tiles,
)
from hpu.worker.load import LoadedModel, dtype_name
from hpu.worker.memory_log import log_taken, memory_use
from hpu.worker.profile_run import profile_launches, profiled_buckets

Progress = Callable[[WarmupProgress], None]


@dataclass(frozen=True, slots=True)
class Serving:
    """A model that is built and warmed up. Call `submit` and `collect` (at most once per submitted
    plan), with a `mask` after each plan that defers sampling; then `close`."""

    backend: Backend
    components: Components
    warmup: Warmup
    diagnostics: Diagnostics
    profiler: Profiler
    counters: Counters
    in_flight: deque[AsyncStepOutput] = field(default_factory=deque)
    core_wait: CoreWait = field(default_factory=CoreWait)

    def submit(self, plan: StepPlan) -> None:
        """Apply and launch a plan; does not wait for its results (a CPU runs the plan
        synchronously)."""
        assert not (self.in_flight and self.in_flight[-1].deferred), "submit before mask"
        start = time.perf_counter()
        self.core_wait.begin()
        try:
            with torch.inference_mode():
                output = self.components.runner.submit(plan)
        except RuntimeError as error:
            raise_advised(self.backend, error)
        self.core_wait.end()
        self.in_flight.append(output)
        self.profiler.trace.submitted(output, start)

    def mask(self, masks: GrammarMasks) -> None:
        """Set the bitmasks of the newest plan's deferred requests and finish their launches; does
        not wait for the results."""
        runner = self.components.runner
        assert isinstance(runner, ModelRunner) and self.in_flight, "mask without a plan"
        start, output = time.perf_counter(), self.in_flight[-1]
        with torch.inference_mode():
            runner.sample_deferred(output, masks)
        self.profiler.trace.sampled_deferred(output, start)

    @property
    def lacks_masks(self) -> bool:
        """Whether the oldest plan in flight waits for `mask`."""
        return bool(self.in_flight and self.in_flight[0].deferred)

    def has_result(self) -> bool:
        """Whether `collect` would return without waiting."""
        return bool(self.in_flight) and self.in_flight[0].is_done()

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight and return its result."""
        assert self.in_flight, "collect without a plan"
        assert not self.lacks_masks, "collect before mask"
        output = self.in_flight.popleft()
        try:
            with torch.inference_mode():
                output.wait()
                start = time.perf_counter()
                result = self.components.runner.collect(output)
        except RuntimeError as error:
            raise_advised(self.backend, error)
        self.diagnostics.collected(output)
        result.counters = self.counters.take_changed()
        self.profiler.trace.collected(output, result.seconds, start)
        return result

    def idle(self) -> WarmedBuckets | None:
        """Prepare the next background bucket; None if all are prepared. Only with no plan in
        flight."""
        assert not self.in_flight, "idle with a plan"
        if not self.warmup.num_deferred:
            return None
        with torch.inference_mode():
            buckets = self.warmup.prepare_next()
        return WarmedBuckets(buckets, self.warmup.num_deferred, self.counters.take_changed())

    def take_fetched(self) -> list[BlocksFetched]:
        """Take the results of block reads since the last call."""
        return self.components.offload.take_fetched()

    def call(self, name: str) -> str:
        """See Profiler.call."""
        return self.profiler.call(name)

    def close(self, *, frees: bool) -> None:
        """End the trace and the threads; with `frees` also free caches, states and images."""
        self.in_flight.clear()
        self.profiler.close()
        if frees:
            self.components.close()
        else:
            self.components.end_threads()


class Asleep:
    """A worker that sleeps, or is not started: no plans are in flight."""

    in_flight = ()
    lacks_masks = False

    def has_result(self) -> bool:
        return False

    def idle(self) -> WarmedBuckets | None:
        return None

    def take_fetched(self) -> list[BlocksFetched]:
        return []

    def call(self, name: str) -> str:
        raise UserError(f"{name} was called while the worker sleeps")

    def close(self, *, frees: bool) -> None:
        """There is nothing to close."""


ASLEEP = Asleep()


def raise_advised(backend: Backend, error: Exception) -> NoReturn:
    """Raise an error of the device with the back end's advice; without advice the error itself."""
    advice = backend.advice(error)
    if not advice:
        raise error
    raise RuntimeError(f"{error}; {advice}") from error


def start_serving(
    loaded: LoadedModel,
    ranks: Ranks,
    counters: Counters,
    capacity: tuple[int | None, int | None],
    on_message: Callable[[], None],
    on_progress: Progress,
) -> tuple[Serving, WorkerReady]:
    """Build all components except the weights, and warm them up. Frees them if the warm-up fails.

    Args:
        capacity: numbers of KV blocks and rings, as Components.capacity; None: choose them.
        on_message: called on another thread when Components.offload has a new result.
    """
    before = memory_use(loaded.backend)
    num_blocks, num_rings = capacity
    components = build(loaded, counters, num_blocks=num_blocks, num_rings=num_rings, ranks=ranks)
    components.offload.on_fetched = on_message
    try:
        serving, ready = _warm_up(loaded, ranks, counters, components, on_progress)
    except BaseException:
        components.close()
        raise
    if not loaded.backend.shares_host_memory:
        log_taken("init_cache_engine", before, loaded.backend)
    serving.diagnostics.reset()
    components.start_prefaulting()
    return serving, ready


def _warm_up(
    loaded: LoadedModel,
    ranks: Ranks,
    counters: Counters,
    components: Components,
    on_progress: Progress,
) -> tuple[Serving, WorkerReady]:
    config, backend, runner = loaded.config, loaded.backend, components.runner
    table = loaded.bucket_table(components.num_blocks)
    report.log_buckets(table, loaded.bucket_config, config.buckets)
    diagnostics = make_diagnostics(loaded, counters)
    components.compile_copies(backend, contiguous=loaded.contiguous)
    offload = components.offload.start(pad_block=components.num_blocks)
    profiler = Profiler(backend, config.execution, config.cache_dir, rank=ranks.rank)
    if profiled := profiled_buckets(config.execution, table.limits):
        graphs, buffers = components.graphs, components.input_buffers
        path = profile_launches(profiled, runner, graphs, buffers, profiler)
        raise ProfileWritten(
            f"the profile is in {path}: to serve, start without --profile-prompt and "
            "--profile-decode"
        )
    warmup = Warmup(
        runner,
        components.graphs,
        components.input_buffers,
        backend,
        replace(config.warmup, traffic=config.warmup.traffic or config.buckets.traffic),
        diagnostics,
        loaded.agreement,
    )
    start = time.perf_counter()
    prepared = warmup.start(table, on_progress)
    if ranks.num_engines > 1:
        # Data-parallel engines that step together are idle at different times: prepare all now.
        while warmup.num_deferred:
            prepared += warmup.prepare_next()
    method = config.speculation.choose()
    if method is not None and method.adaptive and isinstance(runner, PlannedDraftRunner):
        runner.measure(config.scheduler.max_num_seqs, method.max_drafts, loaded.agreement)
    warmup_s = time.perf_counter() - start
    serving = Serving(backend, components, warmup, diagnostics, profiler, counters)
    vision = loaded.model_config.vision
    return serving, WorkerReady(
        num_blocks=components.num_blocks,
        block_size=loaded.block_size,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.model_config.vocab_size,
        eos_token_ids=loaded.model_config.eos_token_ids,
        buckets=prepared,
        # The back end is named after the real card, and does not distinguish an emulated card.
        device=config.device if config.device == "hpu-emulator" else backend.name,
        dtype=dtype_name(loaded.dtype),
        weight_bytes=sum(model.weight_bytes for model in loaded.all_models),
        kv_bytes=components.cache_bytes,
        graph_bytes=components.graphs.bytes,
        total_bytes=backend.memory()[1],
        load_s=loaded.load_s,
        warmup_s=warmup_s,
        bucket_limits=table.limits,
        num_deferred=warmup.num_deferred,
        counters=counters.take_changed(),
        driver=backend.driver,
        software=backend.software,
        contiguous=loaded.contiguous,
        max_tokens_per_step=1 if method is None else 1 + method.max_drafts,
        pooling=None if loaded.pooler is None else loaded.pooler.facts,
        encoder_cache_tokens=num_cache_rows(loaded),
        prompt_vocab_size=loaded.prompt_vocab_size,
        request_tiles=num_request_tiles(loaded),
        whole_images=vision is not None and vision.whole_images,
        prefill_launch_tokens=0 if loaded.pads else backend.prefill_launch_tokens,
        offload=offload,
    )

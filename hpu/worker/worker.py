"""Worker: lifecycle of a device. Loads, builds and warms up; then takes plans and returns results;
sleep frees the device's memory, and wake-up rebuilds the components."""

import gc
import logging
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, TypeVar

import torch

from config.engine import EngineConfig
from config.errors import ConfigError, ProfileWritten, RequestFailed, UserError, bytes_text
from config.model.model_config import ModelConfig
from config.model.pooler import choose_pooler
from config.model.read_config import read_model_config
from config.version import VERSION
from hpu.backends.base import Backend
from hpu.backends.select import select_backend
from hpu.distributed.agreement import Agreement
from hpu.distributed.pipeline import SINGLE_STAGE, PipelineLink
from hpu.distributed.process_groups import SINGLE_RANK, ProcessGroups, Ranks, make_groups
from hpu.doctor.machine import distribution_version
from hpu.lora.manager import LoRAManager
from hpu.model_loader.offloaded_weights import OffloadedWeights, offload_weights
from hpu.profiling.core_wait import CoreWait
from hpu.profiling.diagnostics import CountsWork, Diagnostics
from hpu.profiling.profiler import Profiler, Trace
from hpu.protocol import (
    SLEEP,
    WAKE_WEIGHTS,
    AdapterLoaded,
    BlocksFetched,
    DropAdapter,
    DropFiles,
    FetchBlocks,
    GrammarMasks,
    Handlers,
    LoadAdapter,
    StepPlan,
    StepResult,
    ToWorker,
    WarmedBuckets,
    WarmupProgress,
    WorkerReady,
)
from hpu.runner.async_output import AsyncStepOutput
from hpu.runner.counters import Counters
from hpu.runner.model_runner import ModelRunner
from hpu.runner.step_runner import StepRunner
from hpu.warmup import report
from hpu.warmup.warmup import Warmup
from hpu.worker.block_offload import BlockOffload
from hpu.worker.build import Components, build, num_cache_rows, num_request_tiles
from hpu.worker.drafter import keep_for_last_stage, load_drafter, with_drafter
from hpu.worker.kv_scales import calculate_kv_scales
from hpu.worker.load import LoadedModel, dtype_name, load
from hpu.worker.memory_log import log_taken, memory_use
from hpu.worker.profile_run import profile_launches, profiled_buckets

logger = logging.getLogger(__name__)

Progress = Callable[[WarmupProgress], None]
T = TypeVar("T")


class Worker:
    """A device that runs step plans. Call `start` once; then `submit` and `collect` (at most once
    per submitted plan), with a `mask` after each plan that defers sampling; then `close`. Call
    `sleep` only with no plan in flight; then only `call` until `wake_up`. Not thread-safe."""

    def __init__(self, config: EngineConfig, ranks: Ranks = SINGLE_RANK) -> None:
        """`ranks`: rank of this worker among the workers that run the model. All workers get the
        same calls in the same order."""
        self._config = config
        self._ranks = ranks
        self._groups = ProcessGroups()
        self._link = SINGLE_STAGE
        self._backend: Backend | None = None
        self._facts: ModelConfig | None = None
        self._loaded: LoadedModel | None = None
        """None while the weights are not on the device."""
        self._offloaded: OffloadedWeights | None = None
        """Weights in host memory while the device sleeps."""
        self._components: Components | None = None
        """None while asleep."""
        self._num_blocks: int | None = None
        """Number of KV blocks; unchanged after each wake-up."""
        self._num_rings: int | None = None
        """Number of rings (LoadedModel.num_rings); unchanged after each wake-up."""
        self._runner: StepRunner | None = None
        self._profiler: Profiler | None = None
        self._diagnostics: Diagnostics | None = None
        """Set if the device's runtime counts its work."""
        self._warmup: Warmup | None = None
        self._counters = Counters()
        self._core_wait = CoreWait()
        self._in_flight: deque[AsyncStepOutput] = deque()
        self._handlers: Handlers = {
            GrammarMasks: self.mask,
            LoadAdapter: lambda message: self._lora.load(message),
            DropAdapter: lambda message: self._lora.drop(message.content),
            FetchBlocks: lambda message: self._offload.fetch(message),
            DropFiles: lambda message: self._offload.drop_files(message.hashes),
        }
        self.on_message: Callable[[], None] = lambda: None
        """Called on another thread when `take_messages` has a new message."""

    def start(self, on_progress: Progress) -> WorkerReady:
        """Load, build and warm up. Raises ConfigError if the checkpoint, the device and the
        settings do not fit each other."""
        try:
            with torch.inference_mode():
                return self._start(on_progress)
        except (RuntimeError, MemoryError) as error:
            if self._backend is None or not self._backend.is_out_of_memory(error):
                self._raise(error)
            raise ConfigError(
                f"the device's memory is full before the model is ready ({error}): it takes a "
                "smaller model, a larger device, or smaller --max-num-seqs"
            ) from error

    def submit(self, plan: StepPlan) -> None:
        """Apply and launch a plan; does not wait for the device (a CPU runs the plan
        synchronously)."""
        assert self._runner is not None, "submit before start"
        assert not (self._in_flight and self._in_flight[-1].deferred), "submit before mask"
        start = time.perf_counter()
        self._core_wait.begin()
        try:
            with torch.inference_mode():
                output = self._runner.submit(plan)
        except RuntimeError as error:
            self._raise(error)
        self._core_wait.end()
        self._in_flight.append(output)
        if (trace := self._trace) is not None:
            trace.submitted(output, start)

    def mask(self, masks: GrammarMasks) -> None:
        """Set the bitmasks of the newest plan's deferred requests and launch their sampling; does
        not wait for the device."""
        assert isinstance(self._runner, ModelRunner) and self._in_flight, "mask without a plan"
        start, output = time.perf_counter(), self._in_flight[-1]
        with torch.inference_mode():
            self._runner.sample_deferred(output, masks)
        if (trace := self._trace) is not None:
            trace.sampled_deferred(output, start)

    @property
    def _trace(self) -> Trace | None:
        return None if self._profiler is None else self._profiler.trace

    @property
    def lacks_masks(self) -> bool:
        """Whether the oldest plan in flight waits for `mask`."""
        return bool(self._in_flight and self._in_flight[0].deferred)

    def has_result(self) -> bool:
        """Whether `collect` would return without waiting."""
        return bool(self._in_flight) and self._in_flight[0].is_done()

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight and return its result."""
        assert self._runner is not None and self._in_flight, "collect without a plan"
        assert not self.lacks_masks, "collect before mask"
        output = self._in_flight.popleft()
        try:
            with torch.inference_mode():
                output.wait()
                start = time.perf_counter()
                result = self._runner.collect(output)
        except RuntimeError as error:
            self._raise(error)
        if self._diagnostics is not None:
            self._diagnostics.collected(output)
        result.counters = self._counters.take_changed()
        if (trace := self._trace) is not None:
            trace.collected(output, result.seconds, start)
        return result

    def _raise(self, error: Exception) -> NoReturn:
        """Raise an error of the device with the back end's advice; without advice the error
        itself."""
        advice = self._backend.advice(error) if self._backend else ""
        if not advice:
            raise error
        raise RuntimeError(f"{error}; {advice}") from error

    def handle(self, message: ToWorker) -> None:
        """Carry out a message other than a plan and a call."""
        self._handlers[type(message)](message)

    def take_messages(self) -> list[AdapterLoaded | BlocksFetched]:
        """Adapters and blocks that were read since the last call, or could not be read; does not
        wait."""
        messages: list[AdapterLoaded | BlocksFetched] = []
        if self._loaded is not None and self._loaded.lora is not None:
            messages += self._loaded.lora.take_loaded()
        if self._components is not None and self._components.offload is not None:
            messages += self._components.offload.take_fetched()
        return messages

    @property
    def _offload(self) -> BlockOffload:
        assert self._components is not None and self._components.offload is not None, (
            "no KV blocks are kept outside the device"
        )
        return self._components.offload

    @property
    def _lora(self) -> LoRAManager:
        assert self._loaded is not None and self._loaded.lora is not None, "adapters are not served"
        return self._loaded.lora

    def call(self, name: str, level: int = 0) -> str:
        """Answer a WorkerCall other than WAKE_UP. Raises UserError or RequestFailed."""
        if name == SLEEP:
            self.sleep(level)
            return ""
        if name == WAKE_WEIGHTS:
            self.wake_weights()
            return ""
        if self._profiler is None:
            raise UserError(f"{name} was called while the worker sleeps")
        return self._profiler.call(name)

    def sleep(self, level: int) -> None:
        """Free the KV cache, the graphs and everything but the weights. A second call may raise the
        level; a lower level has no effect.

        Level 1 copies the weights to the host. It keeps them in place if the device shares the
        host's memory; otherwise it drops them (wake-up reads them again) if they are quantized,
        patched or partly in host memory. Level 2 drops the weights.
        """
        assert self._backend is not None and not self._in_flight, (
            "sleep with a plan, or before start"
        )
        before = self._backend.memory()[0]
        with torch.inference_mode():
            self._drop()
            # Processed quantized weights differ from the loaded parameters, and the weight ring
            # shares parameters among layers, so neither can be restored.
            keeps = not (
                self._backend.shares_host_memory
                or self._loaded is None
                or self._loaded.weight_ring
                or self._loaded.facts.quantization
                or self._loaded.patcher
            )
            if level == 1 and self._loaded is not None and keeps:
                self._offloaded = offload_weights(self._loaded.modules)
        lora = None if self._loaded is None else self._loaded.lora
        if lora is not None:
            lora.clear()
        if level > 1 or not self._backend.shares_host_memory:
            if lora is not None:
                lora.close()
            self._loaded = None
        if level > 1:
            self._offloaded = None
        # Objects frozen after the start may be garbage now.
        gc.unfreeze()
        gc.collect()
        free = self._backend.memory()[0]
        logger.info(
            "Asleep at level %d: %s of memory given back", level, bytes_text(max(0, free - before))
        )

    def wake_weights(self) -> None:
        """Load the weights again. Stays asleep and raises RequestFailed on failure."""

        def wake() -> None:
            self._loaded = self._loaded or self._load(lambda progress: None)
            self._offloaded = None

        self._try(wake)

    def wake_up(self, on_progress: Progress) -> WorkerReady:
        """Build and warm up again, with an unchanged number of KV blocks, all empty. Stays asleep
        and raises RequestFailed on failure."""
        assert self._components is None, "wake_up of a worker that is awake"

        def wake() -> WorkerReady:
            self._loaded = self._loaded or self._load(on_progress)
            self._offloaded = None
            return self._build(self._loaded, on_progress)

        return self._try(wake)

    def share(self, data: bytes) -> bytes:
        """Broadcast the `data` of rank 0; waits for all ranks."""
        return Agreement(self._groups.host).of_first(data)

    def idle(self) -> WarmedBuckets | None:
        """Prepare the next background bucket; None if all are prepared. Only with no plan in
        flight."""
        assert self._backend is not None and not self._in_flight, (
            "idle with a plan, or before start"
        )
        if self._warmup is None or not self._warmup.num_deferred:
            return None
        with torch.inference_mode():
            buckets = self._warmup.prepare_next()
        return WarmedBuckets(buckets, self._warmup.num_deferred, self._counters.take_changed())

    def close(self) -> None:
        """Drop everything and close the device; safe to call twice."""
        self._in_flight.clear()
        self._close_profiler()
        if self._components is not None:
            self._components.end_threads()
        if self._loaded is not None:
            self._loaded.finish()
            if self._loaded.lora is not None:
                self._loaded.lora.close()
        self._runner = self._warmup = self._components = self._loaded = self._offloaded = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def _close_profiler(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None

    def _try(self, wake: Callable[[], T]) -> T:
        """Call `wake`; on failure, free everything that it left on the device."""
        assert self._backend is not None, "it was never started"
        try:
            with torch.inference_mode():
                return wake()
        except (RuntimeError, MemoryError, ConfigError) as error:
            if not (isinstance(error, ConfigError) or self._backend.is_out_of_memory(error)):
                raise
            why = str(error)
        # After the handler, because the error's frames refer to objects to be freed.
        self.sleep(1)
        raise RequestFailed(f"the worker cannot wake up, and sleeps on: {why}")

    def _make_profiler(self, backend: Backend) -> Profiler:
        config = self._config
        return Profiler(backend, config.execution, config.cache_dir, rank=self._ranks.rank)

    def _drop(self) -> None:
        """Drop everything but the weights and the back end."""
        self._close_profiler()
        self._runner = self._warmup = None
        components, self._components = self._components, None
        if components is not None:
            components.close()
            self._counters.add("graphs", -self._counters.total("graphs"))
            self._counters.add("graph_bytes", -self._counters.total("graph_bytes"))
        assert self._backend is not None
        self._backend.begin_warmup()

    def _start(self, on_progress: Progress) -> WorkerReady:
        self._backend = select_backend(
            self._config, self._ranks, lambda step: on_progress(WarmupProgress(step, 0, 0))
        )
        self._groups = make_groups(
            tensor=self._config.parallel.tensor_parallel_size,
            pipeline=self._config.parallel.pipeline_parallel_size,
            data=self._ranks.num_engines,
            mark_step=self._backend.mark_step if self._backend.compiles else None,
        )
        Agreement(self._groups.host).check_same(_versions(), f"rank {self._ranks.rank}")
        self._link = PipelineLink(self._groups.pipeline, self._backend.device)
        self._facts = read_model_config(self._config.model)
        self._loaded = self._load(on_progress)
        ready = self._build(self._loaded, on_progress)
        assert self._profiler is not None, "it was just made"
        self._profiler.begin_with_server()
        return ready

    def _load(self, on_progress: Progress) -> LoadedModel:
        config, facts, backend = self._config, self._facts, self._backend
        assert facts is not None and backend is not None, "load before start"
        pooler = choose_pooler(config, facts)
        # Load the drafter before the target, because the back end plans its threads by the costs of
        # the model loaded last.
        stage = self._link.stage
        drafter = load_drafter(config, facts, pooler, backend, self._groups, stage)
        loaded = load(
            config,
            facts,
            pooler,
            backend,
            on_progress,
            self._offloaded,
            self._groups,
            self._link,
        )
        if drafter is not None:
            loaded = with_drafter(loaded, drafter)
        elif not stage.is_last:
            loaded = keep_for_last_stage(loaded)
        if loaded.lora is not None:
            loaded.lora.on_loaded = lambda: self.on_message()
        if config.cache.calculate_kv_scales and loaded.pooler is None:
            calculate_kv_scales(loaded)
        return loaded

    def _build(self, loaded: LoadedModel, on_progress: Progress) -> WorkerReady:
        """Build all components except the weights, and warm them up."""
        config, counters, backend = self._config, self._counters, self._backend
        assert backend is not None, "build before start"
        before = memory_use(backend)
        components = build(
            loaded,
            counters,
            num_blocks=self._num_blocks,
            num_rings=self._num_rings,
            ranks=self._ranks,
        )
        self._components = components
        table = loaded.bucket_table(components.num_blocks)
        report.log_buckets(table, loaded.bucket_config, config.buckets)
        runner, graphs, cache = components.runner, components.graphs, components.cache
        self._runner = runner
        if cache is not None:
            self._num_blocks, self._num_rings = cache.num_blocks, cache.num_rings
        self._diagnostics = None
        if isinstance(backend, CountsWork):
            self._diagnostics = Diagnostics(
                backend, config.execution, counters, counts_by_phase=not graphs.captures
            )
        if cache is not None and backend.compiles:
            cache.warm_scrub()
        if components.images is not None:
            components.images.warm_up(graphs.add_bytes)
        if cache is not None and loaded.contiguous:
            cache.warm_moves()
        offload = None
        if components.offload is not None:
            components.offload.on_fetched = lambda: self.on_message()
            offload = components.offload.start(pad_block=components.num_blocks)
        if profiled := profiled_buckets(config.execution, table.limits):
            profiler = self._make_profiler(backend)
            path = profile_launches(profiled, runner, graphs, components.input_buffers, profiler)
            raise ProfileWritten(
                f"the profile is in {path}: to serve, start without --profile-prompt and "
                "--profile-decode"
            )
        warmup = Warmup(
            runner,
            graphs,
            components.input_buffers,
            backend,
            replace(config.warmup, traffic=config.warmup.traffic or config.buckets.traffic),
            loaded.block_size,
            self._diagnostics,
            loaded.agreement,
        )
        self._warmup = warmup
        start = time.perf_counter()
        prepared = warmup.start(table, on_progress)
        if self._ranks.num_engines > 1:
            # Data-parallel engines that step together are idle at different times: prepare all now.
            while warmup.num_deferred:
                prepared += warmup.prepare_next()
        method = config.speculation.choose()
        if method is not None and method.adaptive and backend.shares_host_memory:
            assert isinstance(runner, ModelRunner), "the runner of a generating model"
            max_rows = config.scheduler.max_num_seqs * (1 + method.max_drafts)
            costs = runner.measure_decodes(max_rows, loaded.agreement)
            if components.speculation is not None:
                components.speculation.measure(costs, config.scheduler.max_num_seqs)
        warmup_s = time.perf_counter() - start
        if not backend.shares_host_memory:
            log_taken("init_cache_engine", before, backend)
        if self._diagnostics is not None:
            self._diagnostics.reset()
        self._profiler = self._make_profiler(backend)
        if cache is not None and cache.pages_ahead is not None:
            cache.pages_ahead.start()
        return WorkerReady(
            num_blocks=components.num_blocks,
            block_size=loaded.block_size,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.facts.vocab_size,
            eos_token_ids=loaded.facts.eos_token_ids,
            buckets=prepared,
            # The back end is named after the real card, and does not distinguish an emulated card.
            device=config.device if config.device == "hpu-emulator" else backend.name,
            dtype=dtype_name(loaded.dtype),
            weight_bytes=sum(model.weight_bytes for model in loaded.all_models),
            kv_bytes=components.cache_bytes,
            graph_bytes=graphs.bytes,
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
            whole_images=loaded.facts.vision is not None and loaded.facts.vision.whole_images,
            prefill_launch_tokens=0 if loaded.pads else backend.prefill_launch_tokens,
            offload=offload,
        )


def _versions() -> dict[str, str]:
    """Versions that must be equal on all ranks of a model, which may be on several hosts."""
    versions = {"gaudiserve": VERSION, "Python": platform.python_version()}
    for name in ("torch", "transformers", "habana-torch-plugin"):
        versions[name] = distribution_version(name) or "not installed"
    return versions

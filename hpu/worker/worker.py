"""Worker: lifecycle of a device. Loads, builds and warms up; then receives plans and returns
results. Sleep frees the device's memory, and wake-up rebuilds the components."""

import gc
import logging
import platform
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from config.engine import EngineConfig
from config.errors import ConfigError, RequestFailed, bytes_text
from config.model.model_config import ModelConfig
from config.model.pooler import choose_pooler
from config.model.read_config import read_model_config
from config.version import VERSION
from hpu.backends.base import Backend
from hpu.backends.select import select_backend
from hpu.distributed.agreement import Agreement
from hpu.distributed.pipeline import PipelineLink
from hpu.distributed.process_groups import SINGLE_RANK, ProcessGroups, Ranks
from hpu.doctor.machine import distribution_version
from hpu.model_loader.offloaded_weights import OffloadedWeights, offload_weights
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
from hpu.runner.counters import Counters
from hpu.worker.drafter import keep_for_last_stage, load_drafter, with_drafter
from hpu.worker.kv_scales import calculate_kv_scales
from hpu.worker.load import LoadedModel, load
from hpu.worker.serving import ASLEEP, Asleep, Progress, Serving, raise_advised, start_serving

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Device(NamedTuple):
    """A started device, and the model that it serves."""

    backend: Backend
    groups: ProcessGroups
    link: PipelineLink
    model_config: ModelConfig


class Worker:
    """A device that runs step plans. Call `start` once; then `submit` and `collect` (at most once
    per submitted plan), and `mask` after each plan that defers sampling; finally `close`. Call
    `sleep` only with no plan in flight; while asleep, do not call `submit`, `mask`, `collect` or
    `handle`. Not thread-safe."""

    def __init__(self, config: EngineConfig, ranks: Ranks = SINGLE_RANK) -> None:
        """`ranks`: rank of this worker among the workers that run the model. All workers must
        receive the same calls in the same order."""
        self._config = config
        self._ranks = ranks
        self._started: _Device | None = None
        self._loaded: LoadedModel | None = None
        """None while the weights are not on the device."""
        self._offloaded: OffloadedWeights | None = None
        """Weights in host memory while the device sleeps."""
        self._awake: Serving | Asleep = ASLEEP
        self._capacity: tuple[int | None, int | None] = (None, None)
        """Numbers of KV blocks and rings, which a wake-up keeps; None: not chosen yet, or no KV
        cache."""
        self._counters = Counters()
        self._handlers: Handlers = {
            GrammarMasks: self.mask,
            LoadAdapter: lambda message: self.loaded.lora.load(message),
            DropAdapter: lambda message: self.loaded.lora.drop(message.content),
            FetchBlocks: lambda message: self.serving.components.offload.fetch(message),
            DropFiles: lambda message: self.serving.components.offload.drop_files(message.hashes),
        }
        self.on_message: Callable[[], None] = lambda: None
        """Called on another thread when `take_messages` has a new message."""

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model; it must be on the device."""
        assert self._loaded is not None, "the weights are not on the device"
        return self._loaded

    @property
    def serving(self) -> Serving:
        """The built model; the worker must be started and awake."""
        assert isinstance(self._awake, Serving), "the worker sleeps, or is not started"
        return self._awake

    @property
    def _device(self) -> _Device:
        assert self._started is not None, "the worker is not started"
        return self._started

    def start(self, on_progress: Progress) -> WorkerReady:
        """Load, build and warm up. Raises ConfigError, and ProfileWritten after launches configured
        for a profile."""
        with torch.inference_mode():
            backend = select_backend(
                self._config, self._ranks, lambda step: on_progress(WarmupProgress(step, 0, 0))
            )
            try:
                return self._start(backend, on_progress)
            except (RuntimeError, MemoryError) as error:
                if not backend.is_out_of_memory(error):
                    raise_advised(backend, error)
                raise ConfigError(
                    f"the device ran out of memory before the model was ready ({error}): use a "
                    "smaller model, a larger device or a smaller --max-num-seqs"
                ) from error
            finally:
                if self._started is None:
                    backend.close()

    def submit(self, plan: StepPlan) -> None:
        """Apply and launch a plan. Does not wait for its results (a CPU runs the plan
        synchronously)."""
        self.serving.submit(plan)

    def mask(self, masks: GrammarMasks) -> None:
        """Set the bitmasks of the newest plan's deferred requests and finish their launches. Does
        not wait for the results."""
        self.serving.mask(masks)

    @property
    def lacks_masks(self) -> bool:
        """Whether the oldest plan in flight waits for `mask`."""
        return self._awake.lacks_masks

    def has_result(self) -> bool:
        """Whether `collect` would return without waiting."""
        return self._awake.has_result()

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight and return its result."""
        return self.serving.collect()

    def idle(self) -> WarmedBuckets | None:
        """Prepare the next background bucket; None if all are prepared, or while asleep. Only with
        no plan in flight."""
        return self._awake.idle()

    def handle(self, message: ToWorker) -> None:
        """Handle a message that is neither a plan nor a call."""
        self._handlers[type(message)](message)

    def take_messages(self) -> list[AdapterLoaded | BlocksFetched]:
        """Take the results of adapter loads and block reads since the last call, including
        failures. Does not wait."""
        messages: list[AdapterLoaded | BlocksFetched] = []
        if self._loaded is not None:
            messages += self._loaded.lora.take_loaded()
        messages += self._awake.take_fetched()
        return messages

    def call(self, name: str, level: int = 0) -> str:
        """Execute a WorkerCall other than WAKE_UP and WARM_UP_NEXT. Raises UserError or
        RequestFailed."""
        if name == SLEEP:
            self.sleep(level)
            return ""
        if name == WAKE_WEIGHTS:
            self.wake_weights()
            return ""
        return self._awake.call(name)

    def sleep(self, level: int) -> None:
        """Free the KV cache, the graphs and all other components. A second call may raise the
        level; a lower level has no effect.

        Level 1 keeps the weights in place if the device shares the host's memory. Otherwise it
        copies them to host memory, except for weights of a drafter, and weights that are quantized,
        patched or partly offloaded, which wake-up reads again. Level 2 drops the weights.
        """
        backend, loaded = self._device.backend, self._loaded
        before = backend.memory()[0]
        with torch.inference_mode():
            self._drop()
            if loaded is not None:
                loaded.lora.clear()
                if backend.drops_weights(level):
                    if level == 1 and _can_offload(loaded):
                        self._offloaded = offload_weights(loaded.modules)
                    loaded.lora.close()
                    self._loaded = None
        if level > 1:
            self._offloaded = None
        del loaded
        # Objects frozen after the start may be garbage now.
        gc.unfreeze()
        gc.collect()
        free = backend.memory()[0]
        logger.info(
            "Asleep at level %d: %s of memory freed", level, bytes_text(max(0, free - before))
        )

    def wake_weights(self) -> None:
        """Load the weights again if they are not on the device. Stays asleep and raises
        RequestFailed if the checkpoint is refused or memory is full."""

        def wake() -> None:
            self._loaded = self._loaded or self._load(self._device, lambda progress: None)
            self._offloaded = None

        self._try(wake)

    def wake_up(self, on_progress: Progress) -> WorkerReady:
        """Build and warm up again, with an unchanged number of KV blocks, all empty. Stays asleep
        and raises RequestFailed if the model is refused or memory is full."""
        assert self._awake is ASLEEP, "wake_up of a worker that is awake"

        def wake() -> WorkerReady:
            self._loaded = self._loaded or self._load(self._device, on_progress)
            self._offloaded = None
            return self._build(self._loaded, on_progress)

        return self._try(wake)

    def share(self, data: bytes) -> bytes:
        """Broadcast the `data` of rank 0; waits for all ranks."""
        return Agreement(self._device.groups.host).of_first(data)

    def close(self) -> None:
        """Drop everything and close the device; safe to call twice."""
        self._awake.close(frees=False)
        if self._loaded is not None:
            self._loaded.finish()
            self._loaded.lora.close()
        self._awake, self._loaded, self._offloaded = ASLEEP, None, None
        if self._started is not None:
            self._started.backend.close()
            self._started = None

    def _try(self, wake: Callable[[], T]) -> T:
        """Call `wake`. After a ConfigError, or if memory is full, sleep at level 1 and raise
        RequestFailed; other errors are raised unchanged."""
        backend = self._device.backend
        try:
            with torch.inference_mode():
                return wake()
        except (RuntimeError, MemoryError, ConfigError) as error:
            if not (isinstance(error, ConfigError) or backend.is_out_of_memory(error)):
                raise
            why = str(error)
        # After the handler, because the error's frames refer to objects to be freed.
        self.sleep(1)
        raise RequestFailed(f"the worker cannot wake up and stays asleep: {why}")

    def _drop(self) -> None:
        assert not self._awake.in_flight, "sleep with a plan"
        self._awake.close(frees=True)
        self._awake = ASLEEP
        self._counters.add("graphs", -self._counters.total("graphs"))
        self._counters.add("graph_bytes", -self._counters.total("graph_bytes"))
        self._device.backend.begin_warmup()

    def _start(self, backend: Backend, on_progress: Progress) -> WorkerReady:
        groups = backend.make_groups(
            tensor=self._config.parallel.tensor_parallel_size,
            pipeline=self._config.parallel.pipeline_parallel_size,
            data=self._ranks.num_engines,
        )
        Agreement(groups.host).check_same(_versions(), f"rank {self._ranks.rank}")
        link = PipelineLink(groups.pipeline, backend.device)
        model_config = read_model_config(self._config.model)
        self._started = _Device(backend, groups, link, model_config)
        self._loaded = self._load(self._started, on_progress)
        ready = self._build(self._loaded, on_progress)
        self.serving.profiler.begin_with_server()
        return ready

    def _load(self, device: _Device, on_progress: Progress) -> LoadedModel:
        config, model_config, link = self._config, device.model_config, device.link
        pooler = choose_pooler(config, model_config)
        # Load the drafter before the target, because the back end plans its threads by the costs of
        # the model loaded last.
        drafter = load_drafter(
            config, model_config, pooler, device.backend, device.groups, link.stage
        )
        loaded = load(
            config,
            model_config,
            pooler,
            device.backend,
            on_progress,
            self._offloaded,
            device.groups,
            link,
        )
        if drafter is not None:
            loaded = with_drafter(loaded, drafter)
        elif not link.stage.is_last:
            loaded = keep_for_last_stage(loaded)
        loaded.lora.on_loaded = lambda: self.on_message()
        if config.cache.calculate_kv_scales and not loaded.is_pooling:
            calculate_kv_scales(loaded)
        return loaded

    def _build(self, loaded: LoadedModel, on_progress: Progress) -> WorkerReady:
        self._awake, ready = start_serving(
            loaded,
            self._ranks,
            self._counters,
            self._capacity,
            lambda: self.on_message(),
            on_progress,
        )
        self._capacity = self._awake.components.capacity
        return ready


def _can_offload(loaded: LoadedModel) -> bool:
    """Whether the weights can be copied to the host and back. Processed quantized weights differ
    from the loaded parameters, and the weight ring shares parameters among layers, so neither can
    be restored."""
    return not (loaded.weight_ring or loaded.quantization or loaded.patcher)


def _versions() -> dict[str, str]:
    """Versions that must be equal on all ranks of a model, which may run on several hosts."""
    versions = {"gaudiserve": VERSION, "Python": platform.python_version()}
    for name in ("torch", "transformers", "habana-torch-plugin"):
        versions[name] = distribution_version(name) or "not installed"
    return versions

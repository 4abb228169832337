"""Worker: one device's life. Build, load, measure, warm up; then plans in, results out."""

import time
from collections import deque
from collections.abc import Callable

import torch

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model import read_model_config
from config.pooler import choose_pooler
from hpu import announce
from hpu.backends.base import Backend
from hpu.backends.select import select_backend
from hpu.build import build_generating, name_of
from hpu.counters import Counters
from hpu.diagnostics import diagnostics_of
from hpu.pending import PendingStep
from hpu.pooling_build import build_pooling
from hpu.profiler import Profiler
from hpu.runner import Runner
from hpu.step import Masks, StepPlan, StepResult, Warmed, WarmupProgress, WorkerReady
from hpu.steps import Steps
from hpu.warmup import Warmup

Progress = Callable[[WarmupProgress], None]


class Worker:
    """One device. `start` once, then `submit` and `collect` in any order that never collects more
    than was submitted, with a `mask` behind each plan that needs one, then `close`. Not
    thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._backend: Backend | None = None
        self._runner: Steps | None = None
        self._profiler: Profiler | None = None
        self._warmup: Warmup | None = None
        self._counters = Counters()
        self._pending: deque[PendingStep] = deque()

    def start(self, on_progress: Progress) -> WorkerReady:
        """Everything before the first plan. Raises ConfigError when the checkpoint, the device and
        the settings do not fit each other."""
        try:
            with torch.inference_mode():
                return self._start(on_progress)
        except (RuntimeError, MemoryError) as error:
            if self._backend is None or not self._backend.is_out_of_memory(error):
                raise
            raise ConfigError(
                f"the device's memory is full before the model is ready ({error}): it takes a "
                "smaller model, a larger device, or smaller --max-num-seqs"
            ) from error

    def submit(self, plan: StepPlan) -> None:
        """Apply and launch a plan; does not wait for the device (a CPU runs it at once)."""
        assert self._runner is not None, "submit before start"
        assert not (self._pending and self._pending[-1].late), "submit before mask"
        with torch.inference_mode():
            self._pending.append(self._runner.submit(plan))

    def mask(self, masks: Masks) -> None:
        """What may come next in the late rows of the newest plan: launch what waited for it. Does
        not wait for the device."""
        assert isinstance(self._runner, Runner) and self._pending, "mask without a plan"
        with torch.inference_mode():
            self._runner.mask(self._pending[-1], masks)

    @property
    def lacks_masks(self) -> bool:
        """Whether the oldest plan not collected comes to no end before `mask`."""
        return bool(self._pending and self._pending[0].late)

    def has_result(self) -> bool:
        """Whether `collect` would not wait."""
        return bool(self._pending) and self._pending[0].is_done()

    def collect(self) -> StepResult:
        """Wait for the oldest submitted plan, and give its result."""
        assert self._runner is not None and self._pending, "collect without a plan"
        assert not self.lacks_masks, "collect before mask"
        with torch.inference_mode():
            return self._runner.collect(self._pending.popleft())

    def call(self, name: str) -> str:
        """Answer one of the calls of `hpu.profiler`. Raises UserError or RequestFailed."""
        assert self._profiler is not None, "call before start"
        return self._profiler.call(name)

    def idle(self) -> Warmed | None:
        """Prepare one of the buckets that were left for later; None when there is none. Only with
        nothing submitted."""
        assert self._warmup is not None and not self._pending, "idle with a plan, or before start"
        if not self._warmup.num_later:
            return None
        with torch.inference_mode():
            buckets = self._warmup.next()
        return Warmed(buckets, self._warmup.num_later, self._counters.take_changed())

    def close(self) -> None:
        """Drop everything on the device and give it back; safe to call twice."""
        self._pending.clear()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        self._runner = self._warmup = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def _start(self, on_progress: Progress) -> WorkerReady:
        config, counters = self._config, self._counters
        backend = select_backend(config)
        self._backend = backend
        facts = read_model_config(config.model)
        pooler = choose_pooler(config, facts)
        if pooler is None:
            built = build_generating(config, facts, backend, counters, on_progress)
        else:
            built = build_pooling(config, facts, pooler, backend, counters, on_progress)
        announce.tell_buckets(built.table, built.strategy)
        runner, graphs, cache = built.runner, built.graphs, built.cache
        self._runner = runner
        diagnostics = diagnostics_of(backend, config.execution, counters, captures=graphs.captures)
        runner.diagnostics = diagnostics
        if cache is not None and backend.compiles:
            cache.warm_scrub()
        if cache is not None and built.contiguous:
            cache.warm_moves()
        warmup = Warmup(runner, graphs, built.staging, backend, config.warmup, built.block_size)
        self._warmup = warmup
        start = time.perf_counter()
        prepared = warmup.start(built.table, on_progress)
        warmup_s = time.perf_counter() - start
        if diagnostics is not None:
            diagnostics.forget()
        self._profiler = Profiler(runner, backend, config.execution, config.cache_dir)
        self._profiler.begin_with_server()
        return WorkerReady(
            num_blocks=0 if cache is None else cache.num_blocks,
            block_size=built.block_size,
            max_model_len=built.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            buckets=prepared,
            device=backend.name,
            dtype=name_of(built.dtype),
            weight_bytes=built.weight_bytes,
            kv_bytes=0 if cache is None else cache.bytes,
            graph_bytes=graphs.bytes,
            total_bytes=backend.memory()[1],
            load_s=built.load_s,
            warmup_s=warmup_s,
            num_later=warmup.num_later,
            counters=counters.take_changed(),
            driver=backend.driver,
            software=backend.software,
            contiguous=built.contiguous,
            pooling=built.pooling,
        )

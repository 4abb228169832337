"""Warm-up: runs every bucket and sampler stage and captures graphs, before the first request or
while idle."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from config.errors import ConfigError
from config.execution import WarmupConfig
from config.traffic import read_traffic
from hpu.backends.base import Backend
from hpu.bucketing.bucket_table import BucketTable
from hpu.distributed.agreement import ALONE, Agreement
from hpu.profiling.diagnostics import Diagnostics
from hpu.protocol import DECODE, PREFILL, Bucket, RequestSampling, WarmupProgress
from hpu.runner.counters import phase_name
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import InputBufferPool
from hpu.runner.step_runner import StepRunner
from hpu.sampling.sampler import GREEDY
from hpu.warmup import report
from hpu.warmup.order import (
    CaptureBudget,
    by_use,
    largest_first,
    order_buckets,
    split_buckets,
    split_graphs,
)

logger = logging.getLogger(__name__)

FIRST_QUERY = 16
"""Number of tokens of the prefill that warms up an exact table."""

Progress = Callable[[WarmupProgress], None]


class Warmup:
    """Prepares buckets in passes.

    0. Each bucket is compiled without being executed, if configured and if the device has a mode
       for it: the device's software compiles while the host traces the next buckets. The largest
       bucket of each phase is executed first.
    1. Each bucket runs once without a graph, the largest first. Afterwards all forward passes are
       compiled, the device's workspace has its final size, and buckets that do not fit are known. A
       bucket that was only compiled would be slower at its first real launch. With --warmup
       compile, this pass is omitted if pass 0 has compiled all buckets.
    2. Every kind of sampling runs once in each batch width.
    3. Graphs are captured in the order in which traffic needs them, or in another configured order,
       and replayed, within the memory reserved for graphs. Nothing else allocates then, so the
       growth of memory is the size of the graph.

    A bucket without a graph can still be used.
    """

    def __init__(
        self,
        runner: StepRunner,
        graphs: GraphCache,
        input_buffers: InputBufferPool[Any],
        backend: Backend,
        config: WarmupConfig,
        diagnostics: Diagnostics,
        agreement: Agreement = ALONE,
    ) -> None:
        self._runner = runner
        self._agreement = agreement
        self._diagnostics = diagnostics
        self._graphs = graphs
        self._input_buffers = input_buffers
        self._backend = backend
        self._config = config
        self._block_size = 0
        """Block size of the bucket table, set by `start`."""
        self._budgets: dict[int, CaptureBudget] = {}
        """Memory for graphs by phase, set by `start`."""
        self._announce: Callable[[Bucket], None] = lambda bucket: None
        """Called before each bucket if there are several ranks."""
        self._full: set[int] = set()
        """Phases in which a capture ran out of device memory, or a new graph failed to run."""
        self._widths: set[tuple[int, int]] = set()
        """Values of `_width` for which every kind of sampling has been warmed up."""
        self._captured_widths: set[int] = set()
        """Batch sizes of captured decodes."""
        self._use_rank: dict[Bucket, int] = {}
        """Position of each bucket in the order of use; 0 is the most used bucket."""
        self._background: deque[Bucket] = deque()
        self._left_out: list[Bucket] = []
        """Buckets warmed up in the background that have no graph."""
        self._pads = False
        """Whether launches are padded to buckets; False for an exact table."""
        self._prompt_width: int | None = None
        """Number of sequences of every prefill, if prompts are merged into a row; None: the
        bucket's batch."""

    @property
    def num_deferred(self) -> int:
        return len(self._background)

    def start(self, table: BucketTable, on_progress: Progress) -> list[Bucket]:
        """Run the configured warm-up before the first request; returns the usable buckets. Raises
        ConfigError."""
        mode, first = self._config.mode, table.reachable
        size = self._block_size = table.limits.block_size
        prompt, decode = split_graphs(self._graphs.budget_bytes, self._config.graph_prompt_ratio)
        self._budgets[PREFILL] = CaptureBudget(int(prompt), size)
        self._budgets[DECODE] = CaptureBudget(int(decode), size)
        if table.limits.merged_prefill:
            self._prompt_width = table.limits.max_prefill_batch
        report.log_unused(len(table.buckets) - len(first))
        if mode == "skip":
            return self._skip(first)
        traffic = read_traffic(self._config.traffic) if self._config.traffic else None
        if captured := self._graphs.to_capture(first):
            self._rank_by_use(by_use(table, captured, traffic))
        if mode == "background" and first:
            first, later = split_buckets(table, first, traffic)
            self._background = deque(later)
            logger.info(
                "Warm-up in the background: %d buckets before the first request, %d between "
                "requests",
                len(first),
                len(later),
            )
        self._pads = bool(first)
        if mode == "compile" and self._compile_alone(first, on_progress):
            usable = first
        else:
            usable = self._run(first, on_progress, table.phases)
        self._start_serving()
        return usable

    def _compile_alone(self, buckets: list[Bucket], on_progress: Progress) -> bool:
        """Compile every bucket, and run only what is compiled or captured separately: the largest
        launch of each phase, the sampling of each width, and graphs. Returns False if the device
        cannot compile without running, or after an error."""
        order = largest_first(buckets, self._block_size)
        samplings = self._samplings_by_width(order)
        num_samplings = sum(len(kinds) for _, kinds in samplings)
        num_graphs = len(self._graphs.to_capture(buckets))
        progress = _Progress(len(order) + num_samplings + num_graphs, on_progress)
        self._announce = progress.begin
        if not self._compile_all(order, progress):
            logger.warning(
                "Warm-up: --warmup is compile, and this device compiles only what it runs: each "
                "bucket runs (--warmup full)"
            )
            return False
        self._sample_all(samplings, progress)
        if num_graphs:
            self._capture_all(buckets, progress)
        progress.finish()
        return True

    def _rank_by_use(self, order: list[Bucket]) -> None:
        """Set the order of captures on all ranks to the first rank's `order`: the shares of other
        ranks may be rounded differently."""
        raw = self._agreement.of_first(msgspec.msgpack.encode(order))
        agreed = msgspec.msgpack.decode(raw, type=list[Bucket])
        self._use_rank = {bucket: rank for rank, bucket in enumerate(agreed)}

    def prepare_next(self) -> list[Bucket]:
        """Prepare the next background bucket. No step may be in flight. Returns a list with the
        bucket, or an empty list when the bucket does not fit or cannot be compiled."""
        bucket = self._background.popleft()
        self._graphs.stage = "warmup"
        fits = self._prepare(bucket)
        self._start_serving()
        logger.info("Warm-up between requests: %s, %d buckets to come", bucket, self.num_deferred)
        if not self._background:
            self._log_not_captured(self._left_out)
        return [bucket] if fits else []

    def _skip(self, buckets: list[Bucket]) -> list[Bucket]:
        if buckets and self._graphs.tracks_first_runs:
            logger.warning(
                "Warm-up is skipped: each of %d buckets is compiled by the first request that "
                "needs it",
                len(buckets),
            )
            for bucket in buckets:
                self._input_buffers.prepare(bucket)
        self._graphs.on_demand = True
        self._graphs.stage = "serving"
        return buckets

    def _start_serving(self) -> None:
        """Count further compilations as serving, and end the back end's warm-up if no bucket is
        left."""
        self._graphs.stage = "serving"
        if not self._background:
            self._backend.end_warmup()

    def _run(
        self, buckets: list[Bucket], on_progress: Progress, phases: tuple[int, ...]
    ) -> list[Bucket]:
        """Prepare `buckets`. Without buckets (exact table), run a small launch per phase."""
        start, free = time.perf_counter(), self._backend.memory()[0]
        order = largest_first(buckets or _small_launches(phases), self._block_size)
        samplings = self._samplings_by_width(order)
        num_graphs = len(self._graphs.to_capture(buckets))
        num_samplings = sum(len(kinds) for _, kinds in samplings)
        num_compiled = len(order) if self._compiles_first else 0
        progress = _Progress(num_compiled + len(order) + num_samplings + num_graphs, on_progress)
        self._announce = progress.begin
        self._compile_all(order, progress)
        usable = self._run_all(order, progress)
        self._sample_all(self._samplings_by_width(usable), progress)
        if num_graphs:
            self._capture_all(usable, progress)
        progress.finish()
        taken = free - self._backend.memory()[0]
        seconds = time.perf_counter() - start
        report.log_finished(len(usable), seconds, max(0, taken), self._backend.memory_name)
        return usable if buckets else []

    def _prepare(self, bucket: Bucket) -> bool:
        """Run, sample and capture `bucket`. Returns False when it does not fit or cannot be
        compiled."""
        if not self._run_once(bucket, GREEDY):
            return False
        if self._width(bucket) not in self._widths:
            self._sample_all(self._samplings_by_width([bucket]), None)
        to_capture = self._graphs.to_capture([bucket])
        self._left_out += self._capture(to_capture, None, is_pooled=True)[1]
        return True

    @property
    def _compiles_first(self) -> bool:
        backend = self._backend
        is_on = self._config.compile_only and self._pads and backend.compiles
        return is_on and self._runner.is_compilable

    def _compile_all(self, order: list[Bucket], progress: "_Progress") -> bool:
        """Compile `order` without executing it, if this is configured and supported. The largest
        bucket of each phase is executed first: its launch creates tensors that must not contain
        garbage. An error ends this pass, since the failing bucket is not known; the next pass finds
        it. Returns whether all buckets are compiled."""
        if not self._compiles_first:
            return False
        largest = {bucket[0]: bucket for bucket in reversed(order)}
        for bucket in order:
            # Buffers created inside `compile_only` would contain garbage.
            self._prepare_inputs(bucket)
        for bucket in sorted(largest.values()):
            self._run_once(bucket, GREEDY)
        start = time.perf_counter()
        with self._backend.compile_only() as is_on:
            fits = is_on and self._compile_each(order, progress)
        self._input_buffers.drop_dynamic()
        if fits:
            seconds = time.perf_counter() - start
            logger.info("Warm-up: %d buckets compiled in %.1f s", len(order), seconds)
        return fits

    def _compile_each(self, order: list[Bucket], progress: "_Progress") -> bool:
        """Compile `order` inside `Backend.compile_only`. Returns False after an error on any
        rank."""
        for bucket in order:
            try:
                self._runner.warm_up(bucket, GREEDY, prompts=True)
                fits = True
            except (RuntimeError, MemoryError) as error:
                if not (
                    self._backend.is_compile_failure(error) or self._backend.is_out_of_memory(error)
                ):
                    raise
                logger.warning("Warm-up: buckets are compiled one by one, because of: %s", error)
                fits = False
            if not self._agreement.all_true(fits):
                return False
            progress.step()
        return True

    def _prepare_inputs(self, bucket: Bucket) -> None:
        if self._graphs.tracks_first_runs and self._pads:
            self._input_buffers.prepare(bucket)

    def _run_all(self, order: list[Bucket], progress: "_Progress") -> list[Bucket]:
        usable: list[Bucket] = []
        counts = {phase: [b[0] for b in order].count(phase) for phase in (PREFILL, DECODE)}
        numbers = dict.fromkeys(counts, 0)
        for bucket in order:
            phase = bucket[0]
            numbers[phase] += 1
            if self._run_once(bucket, GREEDY):
                usable.append(bucket)
            if self._pads:
                free, _ = self._backend.memory()
                report.log_step(bucket, numbers[phase], counts[phase], free, graph=False)
            progress.step()
        for phase, name, flag in (
            (PREFILL, "prompt", "--max-num-batched-tokens"),
            (DECODE, "decode", "--max-num-seqs"),
        ):
            if counts[phase] and all(bucket[0] != phase for bucket in usable):
                raise ConfigError(
                    f"0 of {counts[phase]} {name} buckets fit into the device's memory and can be "
                    "compiled (the log names each): lower "
                    "--gpu-memory-utilization, the number of KV blocks if it is set, or "
                    f"{flag}"
                )
        return usable

    def _sample_all(
        self,
        samplings: list[tuple[Bucket, tuple[RequestSampling, ...]]],
        progress: "_Progress | None",
    ) -> None:
        for bucket, kinds in samplings:
            if not self._run_once(bucket, *kinds):
                rows = math.prod(self._width(bucket))
                raise ConfigError(
                    f"sampling of {rows} rows does not fit into the device's memory: lower "
                    "--max-num-seqs, --gpu-memory-utilization, or the number of KV blocks if it is "
                    "set"
                )
            self._widths.add(self._width(bucket))
            if progress is not None:
                for _ in kinds:
                    progress.step()

    def _width(self, bucket: Bucket) -> tuple[int, int]:
        """(rows sampled per request, number of requests) of a launch in `bucket`. Launches of equal
        width run the same sampling operations."""
        if bucket[0] == PREFILL:
            return 1, self._prompt_width or bucket[1]
        return self._runner.decode_width, bucket[1]

    def _samplings_by_width(
        self, buckets: list[Bucket]
    ) -> list[tuple[Bucket, tuple[RequestSampling, ...]]]:
        """(smallest bucket, kinds of sampling) for each width, the largest width first. Excludes
        GREEDY, which the first run of each bucket uses."""
        kinds = tuple(settings for settings in self._runner.warmup_settings if settings != GREEDY)
        if not kinds:
            return []
        smallest = {self._width(bucket): bucket for bucket in buckets}
        return [(smallest[width], kinds) for width in sorted(smallest, reverse=True)]

    def _capture_all(self, buckets: list[Bucket], progress: "_Progress") -> None:
        """Capture prompts within their share, decodes within their share and the rest of the
        prompts' share, then the remaining prompts within the memory left by decodes. Each phase is
        captured in its configured order."""
        config = self._config
        report.log_graph_memory(
            self._graphs.budget_bytes,
            {phase: budget.remaining_bytes for phase, budget in self._budgets.items()},
            self._backend.memory()[0],
            config.graph_prompt_ratio,
        )
        orders = {PREFILL: config.prompt_order, DECODE: config.decode_order}
        left: dict[int, list[Bucket]] = {}
        for phase, is_pooled in ((PREFILL, False), (DECODE, True)):
            in_phase = [bucket for bucket in buckets if bucket[0] == phase]
            if orders[phase] == "traffic":
                order = sorted(in_phase, key=self._use_rank.__getitem__)
            else:
                order = order_buckets(in_phase, orders[phase], self._block_size)
            left[phase] = []
            if order:
                left[phase] = self._capture_phase(phase, order, progress, is_pooled=is_pooled)
        if (
            left[PREFILL]
            and PREFILL not in self._full
            and self._fits_budget(left[PREFILL][0], True)
        ):
            left[PREFILL] = self._capture_phase(PREFILL, left[PREFILL], progress, is_pooled=True)
        self._log_not_captured(left[PREFILL] + left[DECODE])

    def _log_not_captured(self, buckets: list[Bucket]) -> None:
        for phase in (PREFILL, DECODE):
            in_phase = [bucket for bucket in buckets if bucket[0] == phase]
            if in_phase:
                report.log_not_captured(phase, in_phase, self._config, full=phase in self._full)

    def _capture_phase(
        self, phase: int, order: list[Bucket], progress: "_Progress", *, is_pooled: bool
    ) -> list[Bucket]:
        start, before = time.perf_counter(), self._graphs.bytes
        captured, left_out = self._capture(order, progress, is_pooled=is_pooled)
        seconds = time.perf_counter() - start
        report.log_graphs(phase, captured, len(order), self._graphs.bytes - before, seconds)
        return left_out

    def _capture(
        self, order: list[Bucket], progress: "_Progress | None", *, is_pooled: bool
    ) -> tuple[list[Bucket], list[Bucket]]:
        """Capture `order`. Returns (captured buckets, buckets without memory for a graph). Buckets
        that cannot be compiled are in neither list."""
        captured: list[Bucket] = []
        left_out: list[Bucket] = []
        for number, bucket in enumerate(order, start=1):
            phase = bucket[0]
            taken = None
            if bucket in self._graphs.uncompilable:
                continue
            if phase not in self._full and self._fits_budget(bucket, is_pooled):
                taken = self._graphs.capture(self._input_buffers.get(bucket))
                if taken is None:
                    is_full = bucket not in self._graphs.uncompilable
                else:
                    is_full = not self._run_graph(bucket)
                if is_full:
                    self._full.add(phase)
            if taken is None:
                if bucket not in self._graphs.uncompilable:
                    left_out.append(bucket)
                continue
            self._budgets[phase].record(bucket, taken)
            captured.append(bucket)
            if progress is not None:
                free, _ = self._backend.memory()
                report.log_step(bucket, number, len(order), free, graph=True)
                progress.step()
        return captured, left_out

    def _run_graph(self, bucket: Bucket) -> bool:
        """Replay a new graph once, since the first replay is slower. The first decode of a batch
        size also captures the sampler, within the same budget, and is replayed with each of the
        sampler's settings. Returns False when a run fails (see `_run_once`)."""
        settings: tuple[RequestSampling, ...] = (GREEDY,)
        if bucket[0] == DECODE and bucket[1] not in self._captured_widths:
            self._captured_widths.add(bucket[1])
            settings = self._runner.captured_settings
        before = self._graphs.bytes
        fits = all(self._run_once(bucket, sampling) for sampling in settings)
        # Only the ranks of the last pipeline stage sample: use the largest value.
        taken = self._agreement.largest(self._graphs.bytes - before)
        self._budgets[bucket[0]].remaining_bytes -= taken
        return fits

    def _fits_budget(self, bucket: Bucket, is_pooled: bool) -> bool:
        """Whether a graph of `bucket` fits the budget of its phase. With `is_pooled`, a budget that
        is too small first takes over the rest of the other phase's budget."""
        budget = self._budgets[bucket[0]]
        if budget.fits(bucket) or not is_pooled:
            return budget.fits(bucket)
        other = self._budgets[DECODE if bucket[0] == PREFILL else PREFILL]
        budget.remaining_bytes += max(0, other.remaining_bytes)
        other.remaining_bytes = min(0, other.remaining_bytes)
        return budget.fits(bucket)

    def _run_once(self, bucket: Bucket, *samplings: RequestSampling) -> bool:
        """Run `bucket` and sample with each of `samplings`. Returns False when memory is full or
        the device's compiler rejects the bucket, on any rank; the failing rank logs the reason."""
        if not self._agreement.is_alone:
            # Log the bucket: a rank may block forever if another rank prepares a different bucket.
            self._announce(bucket)
        return self._agreement.all_true(self._try_once(bucket, samplings))

    def _try_once(self, bucket: Bucket, samplings: tuple[RequestSampling, ...]) -> bool:
        try:
            self._prepare_inputs(bucket)
            prompts = self._pads and GREEDY in samplings
            self._runner.warm_up(bucket, *samplings, prompts=prompts)
        except (RuntimeError, MemoryError) as error:
            if self._backend.is_compile_failure(error):
                report.log_uncompilable(bucket, error)
            elif self._backend.is_out_of_memory(error):
                report.log_too_large(bucket)
            else:
                raise
            return False
        self._diagnostics.warmed_up(bucket[0])
        return True


class _Progress:
    """Reports progress in steps of a known total."""

    def __init__(self, total: int, on_progress: Progress) -> None:
        self._done = 0
        self._total = total
        self._on_progress = on_progress
        self._left_s = 0.0
        self._start_s = time.perf_counter()
        on_progress(WarmupProgress("warmup", 0, total))

    def begin(self, bucket: Bucket) -> None:
        """Report the bucket that is going to be prepared."""
        name = f"{phase_name(bucket[0])} bucket {bucket[1:]}"
        self._on_progress(
            WarmupProgress("warmup", self._done, self._total, self._left_s, bucket=name)
        )

    def step(self) -> None:
        self._done = min(self._done + 1, self._total)
        # Runs without a graph take the largest buckets first, so the estimate tends to be too high.
        step_s = (time.perf_counter() - self._start_s) / self._done
        self._left_s = step_s * (self._total - self._done)
        self._on_progress(WarmupProgress("warmup", self._done, self._total, self._left_s))

    def finish(self) -> None:
        """Report skipped steps as done."""
        if self._done < self._total:
            self._done = self._total
            self._on_progress(WarmupProgress("warmup", self._done, self._total))


def _small_launches(phases: tuple[int, ...]) -> list[Bucket]:
    small = {PREFILL: (PREFILL, 1, FIRST_QUERY, 0), DECODE: (DECODE, 1, 1, 1)}
    return [small[phase] for phase in phases]

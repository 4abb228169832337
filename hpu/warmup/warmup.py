"""Warm-up: every prepared bucket, every sampler shape and every graph, before the first request or
between requests. Knows no sequences."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from config.errors import ConfigError
from config.execution import WarmupConfig
from config.traffic import read_traffic
from hpu.backends.base import Backend
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import DECODE, PREFILL, RequestSampling, WarmupProgress
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import Bucket, InputBufferPool
from hpu.runner.step_runner import StepRunner
from hpu.sampling.sampler import GREEDY
from hpu.warmup import report
from hpu.warmup.order import CaptureBudget, cell_of, largest_first, order_buckets, split_buckets
from hpu.worker.memory import GIB, split_graphs

logger = logging.getLogger(__name__)

FIRST_QUERY = 16
"""Tokens of the one prefill that warms an exact table."""

Progress = Callable[[WarmupProgress], None]


class Warmup:
    """Prepares buckets in three passes.

    First each runs once without a graph, the largest first: what is compiled is compiled, the
    device's workspace has its final size, and what cannot fit is known. Then every kind of sampling
    runs once in each batch width. Last, graphs are captured in the configured order, each replayed
    once for real, as long as the memory reserved for them lasts; since nothing else grows any more,
    what a capture takes is the graph's own. A bucket without a graph has been compiled and runs.
    """

    def __init__(
        self,
        runner: StepRunner,
        graphs: GraphCache,
        input_buffers: InputBufferPool[Any],
        backend: Backend,
        config: WarmupConfig,
        block_size: int,
    ) -> None:
        self._runner = runner
        self._graphs = graphs
        self._input_buffers = input_buffers
        self._backend = backend
        self._config = config
        self._block_size = block_size
        prompt, decode = split_graphs(graphs.budget_bytes, prompt_ratio=config.graph_prompt_ratio)
        self._budgets = {PREFILL: CaptureBudget(int(prompt)), DECODE: CaptureBudget(int(decode))}
        self._full: set[int] = set()
        """Phases in which a capture found the device's memory full."""
        self._widths: set[int] = set()
        """Batch widths whose sampling has run."""
        self._background: deque[Bucket] = deque()
        self._left_out: list[Bucket] = []
        """Of those that came later, without a graph."""
        self._pads = False
        """Whether there is a table of buckets."""

    @property
    def num_later(self) -> int:
        """Buckets that `next` has yet to prepare."""
        return len(self._background)

    def start(self, table: BucketTable, on_progress: Progress) -> list[Bucket]:
        """What the settings ask for before the first request. Gives the buckets that can be used
        from now on. Raises ConfigError when no bucket of a phase fits into memory, or when the
        traffic's file cannot be read."""
        mode, first = self._config.mode, table.reachable
        report.log_unneeded(len(table.buckets) - len(first))
        if mode == "skip":
            return self._skip(first)
        if mode == "background" and first:
            traffic = read_traffic(self._config.traffic) if self._config.traffic else None
            first, later = split_buckets(table, first, traffic)
            self._background = deque(later)
            logger.info(
                "Warm-up in the background: %d buckets before the first request, %d between "
                "requests",
                len(first),
                len(later),
            )
        usable = self._run(first, on_progress, table.phases)
        self._settle()
        return usable

    def prepare_next(self) -> list[Bucket]:
        """Prepare the next of the buckets that were left for later; nothing may be in flight.
        Gives it, or nothing when it does not fit."""
        bucket = self._background.popleft()
        self._graphs.stage = "warmup"
        fits = self._prepare(bucket)
        self._settle()
        logger.info("Warm-up between requests: %s, %d buckets to come", bucket, self.num_later)
        if not self._background:
            self._tell_left_out(self._left_out)
        return [bucket] if fits else []

    def _skip(self, buckets: list[Bucket]) -> list[Bucket]:
        if buckets and (self._graphs.captures or self._backend.compiles):
            logger.warning(
                "Warm-up is skipped: each of %d buckets is compiled by the first request that "
                "needs it",
                len(buckets),
            )
        if self._graphs.captures:
            for bucket in buckets:
                self._input_buffers.prepare(bucket)
        self._graphs.on_demand = True
        self._graphs.stage = "serving"
        return buckets

    def _settle(self) -> None:
        """From now on a compilation is a request's, unless `next` is called."""
        self._graphs.stage = "serving"
        if not self._background:
            self._backend.end_warmup()

    def _run(
        self, buckets: list[Bucket], on_progress: Progress, phases: tuple[int, ...]
    ) -> list[Bucket]:
        """Without buckets (an exact table) one small launch of each phase runs."""
        start, free = time.perf_counter(), self._backend.memory()[0]
        self._pads = bool(buckets)
        order = largest_first(buckets or _first_of(phases), self._block_size)
        kinds = _sampling(order, self._runner.warmup_settings)
        num_graphs = len(buckets) if self._graphs.captures else 0
        progress = _Steps(len(order) + len(kinds) + num_graphs, on_progress)
        usable = self._run_all(order, progress)
        self._sample_all(_sampling(usable, self._runner.warmup_settings), progress)
        if num_graphs:
            self._capture_all(usable, progress)
        progress.finish()
        taken = (free - self._backend.memory()[0]) / GIB
        logger.info(
            "Warm-up: %d buckets in %.1f s, %.3f GiB of memory",
            len(usable),
            time.perf_counter() - start,
            max(0.0, taken),
        )
        return usable if buckets else []

    def _prepare(self, bucket: Bucket) -> bool:
        """One bucket, from first run to graph."""
        if not self._try(bucket, GREEDY):
            report.log_unfit(bucket)
            return False
        if bucket[1] not in self._widths:
            self._sample_all(_sampling([bucket], self._runner.warmup_settings), None)
        if self._graphs.captures:
            self._left_out += self._capture([bucket], None, is_pooled=True)[1]
        return True

    def _run_all(self, order: list[Bucket], progress: "_Steps") -> list[Bucket]:
        usable: list[Bucket] = []
        counts = {phase: [b[0] for b in order].count(phase) for phase in (PREFILL, DECODE)}
        numbers = dict.fromkeys(counts, 0)
        for bucket in order:
            phase = bucket[0]
            numbers[phase] += 1
            if self._try(bucket, GREEDY):
                usable.append(bucket)
            else:
                report.log_unfit(bucket)
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
                    f"0 of {counts[phase]} {name} buckets fit into the device's memory: lower "
                    "--gpu-memory-utilization, the number of KV blocks where it was given, or "
                    f"{flag}"
                )
        return usable

    def _sample_all(
        self, kinds: list[tuple[Bucket, RequestSampling]], progress: "_Steps | None"
    ) -> None:
        for bucket, sampling in kinds:
            if not self._try(bucket, sampling):
                raise ConfigError(
                    f"sampling of {bucket[1]} rows does not fit into the device's memory: lower "
                    "--max-num-seqs, --gpu-memory-utilization, or the number of KV blocks where it "
                    "was given"
                )
            self._widths.add(bucket[1])
            if progress is not None:
                progress.step()

    def _capture_all(self, buckets: list[Bucket], progress: "_Steps") -> None:
        """Prompts from their share, decodes from theirs and what prompts left, then again prompts
        from what decodes left."""
        config = self._config
        orders = {PREFILL: config.prompt_order, DECODE: config.decode_order}
        left: dict[int, list[Bucket]] = {}
        for phase, is_pooled in ((PREFILL, False), (DECODE, True)):
            own = [bucket for bucket in buckets if bucket[0] == phase]
            order = order_buckets(own, orders[phase], self._block_size)
            left[phase] = []
            if order:
                left[phase] = self._capture_phase(phase, order, progress, is_pooled=is_pooled)
        if left[PREFILL] and PREFILL not in self._full and self._admits(left[PREFILL][0], True):
            left[PREFILL] = self._capture_phase(PREFILL, left[PREFILL], progress, is_pooled=True)
        self._tell_left_out(left[PREFILL] + left[DECODE])

    def _tell_left_out(self, buckets: list[Bucket]) -> None:
        for phase in (PREFILL, DECODE):
            own = [bucket for bucket in buckets if bucket[0] == phase]
            if own:
                report.log_left_out(phase, own, self._config, full=phase in self._full)

    def _capture_phase(
        self, phase: int, order: list[Bucket], progress: "_Steps", *, is_pooled: bool
    ) -> list[Bucket]:
        start, before = time.perf_counter(), self._graphs.bytes
        done, left_out = self._capture(order, progress, is_pooled=is_pooled)
        seconds = time.perf_counter() - start
        report.log_graphs(phase, done, len(order), self._graphs.bytes - before, seconds)
        return left_out

    def _capture(
        self, order: list[Bucket], progress: "_Steps | None", *, is_pooled: bool
    ) -> tuple[list[Bucket], list[Bucket]]:
        """(captured, left out) of one phase's buckets, in the order given."""
        done: list[Bucket] = []
        left_out: list[Bucket] = []
        for number, bucket in enumerate(order, start=1):
            phase = bucket[0]
            taken = None
            if phase not in self._full and self._admits(bucket, is_pooled):
                taken = self._graphs.capture(self._input_buffers.get(bucket))
                # Replayed for real: the first replay of a graph still costs something.
                if taken is None or not self._try(bucket, GREEDY):
                    self._full.add(phase)
            if taken is None:
                left_out.append(bucket)
                continue
            self._budgets[phase].record(cell_of(bucket, self._block_size), taken)
            done.append(bucket)
            if progress is not None:
                free, _ = self._backend.memory()
                report.log_step(bucket, number, len(order), free, graph=True)
                progress.step()
        return done, left_out

    def _admits(self, bucket: Bucket, is_pooled: bool) -> bool:
        """Whether the phase's budget holds another graph; with `is_pooled`, what the other phase
        has left of its own too."""
        own = self._budgets[bucket[0]]
        cell = cell_of(bucket, self._block_size)
        if own.fits(cell) or not is_pooled:
            return own.fits(cell)
        other = self._budgets[DECODE if bucket[0] == PREFILL else PREFILL]
        own.remaining_bytes += max(0, other.remaining_bytes)
        other.remaining_bytes = min(0, other.remaining_bytes)
        return own.fits(cell)

    def _try(self, bucket: Bucket, sampling: RequestSampling) -> bool:
        """Run a bucket with one row of this sampling; False when memory is full."""
        try:
            if self._graphs.captures and self._pads:
                self._input_buffers.prepare(bucket)
            self._runner.warm_up(bucket, sampling, prompts=self._pads and sampling == GREEDY)
        except (RuntimeError, MemoryError) as error:
            if not self._backend.is_out_of_memory(error):
                raise
            return False
        return True


class _Steps:
    """StepRunner done of a known total, told one by one."""

    def __init__(self, total: int, on_progress: Progress) -> None:
        self._done = 0
        self._total = total
        self._on_progress = on_progress
        self._start_s = time.perf_counter()
        on_progress(WarmupProgress("warmup", 0, total))

    def step(self) -> None:
        self._done = min(self._done + 1, self._total)
        # The largest come first, so this is rather too long than too short.
        a_step_s = (time.perf_counter() - self._start_s) / self._done
        left_s = a_step_s * (self._total - self._done)
        self._on_progress(WarmupProgress("warmup", self._done, self._total, left_s))

    def finish(self) -> None:
        """StepRunner that were left out are over too."""
        if self._done < self._total:
            self._done = self._total
            self._on_progress(WarmupProgress("warmup", self._done, self._total))


def _first_of(phases: tuple[int, ...]) -> list[Bucket]:
    small = {PREFILL: (PREFILL, 1, FIRST_QUERY, 0), DECODE: (DECODE, 1, 1, 1)}
    return [small[phase] for phase in phases]


def _sampling(
    buckets: list[Bucket], settings: tuple[RequestSampling, ...]
) -> list[tuple[Bucket, RequestSampling]]:
    """Every kind of sampling that the buckets' own runs do not meet, once for each batch width in
    its smallest bucket, the widest first."""
    smallest = {bucket[1]: bucket for bucket in buckets}
    return [
        (smallest[width], sampling)
        for width in sorted(smallest, reverse=True)
        for sampling in settings
        if sampling != GREEDY
    ]

"""EngineCore: schedules, submits and collects steps, and processes their results."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from config.engine import EngineConfig
from config.errors import UserError, counted
from config.lora.info import LoRAInfo
from engine.core.admission import Admission
from engine.core.coupled_steps import StepSync
from engine.core.output_processor import OutputProcessor
from engine.core.prefill_rate import PrefillRate
from engine.core.sleep_state import SleepState
from engine.executors.base import Executor
from engine.kv_cache.manager import KVCacheManager
from engine.request import MATCHING, ModelLimits, Request
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.encoder_cache import EncoderCacheManager
from engine.scheduling.grammar_masks import deferred_masks
from engine.scheduling.grammar_matching import GrammarMatching
from engine.scheduling.launch_packer import LaunchPacker
from engine.scheduling.lora_slots import LoRASlots
from engine.scheduling.pooling_scheduler import PoolingScheduler
from engine.scheduling.resource import Refusal
from engine.scheduling.scheduler import Scheduler, SchedulerOutput
from engine.stats import PHASES, StepStats
from engine.structured_output.grammar import Grammar
from engine.transport.messages import (
    AWAKE,
    FRONT_END_SHIFT,
    REGISTER_ADAPTER,
    SLEEP,
    SLEEPING,
    UNLOAD_ADAPTER,
    WAKE_UP,
    AddRequest,
    EngineStats,
    StepOutput,
)
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import (
    PREFILL,
    PROFILE_CALLS,
    WARM_UP_NEXT,
    AdapterLoaded,
    BlocksFetched,
    Handlers,
    StepPlan,
    StepResult,
    WarmedBuckets,
    WorkerCall,
    WorkerReady,
)

logger = logging.getLogger(__name__)

_ARGUMENTS = {
    SLEEP: ("level", "mode"),
    WAKE_UP: ("tags",),
    REGISTER_ADAPTER: ("info",),
    UNLOAD_ADAPTER: ("lora_name",),
}
"""Argument names of controls; controls that are not listed take no arguments."""


Clock = Callable[[], float]
"""Monotonic time in seconds."""


OnStart = Callable[[list[tuple[int, StepOutput]]], None]
"""Receives the messages about started requests before their first plan is submitted, so that front
ends know which requests had started if the plan crashes the process."""


class InflightStep(NamedTuple):
    """A submitted step whose result is not collected yet."""

    plan: StepPlan
    output: SchedulerOutput


class CoreParts(NamedTuple):
    """Collaborators of an EngineCore."""

    table: BucketTable
    packer: LaunchPacker
    kv: KVCacheManager
    lora: LoRASlots
    encoder: EncoderCacheManager
    scheduler: Scheduler | PoolingScheduler
    stats: StepStats
    sync: StepSync


class EngineCore:
    """An engine without channels. Not thread-safe: all calls must come from the same thread.

    The caller calls `step` while there is work. Each request ends with exactly one Finish, except
    aborted requests, which get no Finish.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        ready: WorkerReady,
        parts: CoreParts,
        clock: Clock,
        on_start: OnStart | None,
    ) -> None:
        self._executor = executor
        self._on_start = on_start
        self._clock = clock
        self._max_inflight = config.max_inflight_steps
        self._reports_rate = config.scheduler.max_ttft_s > 0
        limits = ModelLimits(
            ready.max_model_len,
            ready.vocab_size,
            frozenset(ready.eos_token_ids),
            ready.prompt_vocab_size,
        )
        self._admission = Admission(
            config, parts.sync.engine, limits, parts.scheduler, (parts.encoder, parts.lora)
        )
        self._table, self._packer, self._stats = parts.table, parts.packer, parts.stats
        self._kv, self._offload = parts.kv, parts.kv.offload
        self._lora, self._encoder = parts.lora, parts.encoder
        self._scheduler, self._sync = parts.scheduler, parts.sync
        self.num_deferred = ready.num_deferred
        """Buckets that remain to be warmed up while the engine is idle."""
        self.is_warming_up = False
        """Whether the workers are warming up a bucket."""
        self.is_waiting = False
        """Whether the caller must wait for a message of a front end, a worker or another engine
        before the next step, at most `wait_s`."""
        self._handlers: Handlers = {
            StepResult: self._process,
            WarmedBuckets: self._on_warmed,
            AdapterLoaded: self._on_loaded,
            BlocksFetched: parts.kv.offload.on_fetched,
        }
        """Handlers of the workers' messages, by type."""
        senders = (parts.lora, parts.kv.offload)
        self._senders = tuple(sender for sender in senders if sender.is_enabled)
        """Resources with messages for the workers."""
        # A front end may know adapters of a crashed engine: an empty list is sent, too.
        self._has_new_adapters = parts.lora.is_enabled
        self._matching = GrammarMatching()
        self._outputs = OutputProcessor(self._kv, self._matching)
        self._sleep_state = SleepState(executor)
        self._requests: dict[int, Request] = {}
        self._deadlines = Deadlines()
        self._prefill_rate = PrefillRate()
        self._guided: set[int] = set()
        """Keys of requests with a grammar, which may have finished; filled for coupled engines
        only."""
        self._front_ends: set[int] = set()
        self._inflight: deque[InflightStep] = deque()
        self._step = 0
        self._has_output = False

    @property
    def num_inflight(self) -> int:
        """Submitted plans whose results are not collected yet."""
        return len(self._inflight)

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, apart from handling the workers' answers to messages
        other than plans."""
        return (
            bool(self._inflight)
            or self._scheduler.has_work
            or self._has_output
            or self._matching.has_work
            or not self._outputs.is_empty
            or (self._sleep_state.is_pending and not self._requests)
            or self._is_called
        )

    @property
    def _is_called(self) -> bool:
        """Whether another engine has proposed the next step, so that this engine must join it."""
        return self._sync.is_called(self._step)

    @property
    def wait_s(self) -> float:
        """Maximum wait in seconds before the next step of an engine that `is_waiting`: until the
        next deadline, and at most the executor's `poll_s` while a plan is in flight."""
        left_s = self._deadlines.seconds_left(self._clock()) if self._deadlines else math.inf
        return min(left_s, self._executor.poll_s) if self._inflight else left_s

    def warm_up_next(self) -> None:
        """Warm up one of the remaining buckets. Call it when the engine is idle and no bucket is
        being warmed up."""
        self.is_warming_up = True
        self._executor.send(WorkerCall(WARM_UP_NEXT))

    def _on_warmed(self, warmed: WarmedBuckets) -> None:
        self.is_warming_up = False
        self._table.add(warmed.buckets)
        self._packer.invalidate()
        self._stats.update_counters(warmed.counters)
        self.num_deferred = warmed.num_deferred
        self._has_output = True

    def add_front_end(self, front_end: int) -> None:
        """Register a front end: it receives the stats of every step, even without requests."""
        self._front_ends.add(front_end)
        self._has_output = True

    def remove_front_end(self, front_end: int) -> int:
        """Abort the requests of a disconnected front end; returns their number."""
        keys = [key for key in self._requests if key >> FRONT_END_SHIFT == front_end]
        self.abort(keys)
        self._outputs.discard(front_end)
        self._front_ends.discard(front_end)
        return len(keys)

    def add_request(
        self, message: AddRequest, hashes: list[bytes], grammar: Grammar | None = None
    ) -> None:
        """Add a request to the waiting queue. A request that cannot run gets a Finish with reason
        "error" in the next messages.

        `hashes`: block hashes of the prompt (engine.kv_cache.prefix_hashes.block_hashes); empty
        without prefix caching. `grammar`: compiled from the message's spec.
        """
        key = message.key
        self._front_ends.add(key >> FRONT_END_SHIFT)
        if key in self._requests:
            # The caller cannot tell the outputs of the two requests apart, so both are ended.
            self.abort([key])
            self._outputs.reject(
                key, f"a request with the key {key} already exists: both requests are aborted"
            )
            return
        is_accepted = message.is_continuation and not self._sleep_state.is_sleeping
        if self._sleep_state.state != AWAKE and not is_accepted:
            self._outputs.reject(key, SLEEPING, is_retryable=True)
            return
        now = self._clock()
        request = self._admission.admit(message, hashes, grammar, now)
        if isinstance(request, Refusal):
            error, param, is_retryable = request
            self._outputs.reject(key, error, param, is_retryable=is_retryable)
            return
        if request.needs_no_step:
            self._outputs.start(request, 0, now)
            self._outputs.finish(request, "length", now)
            return
        self._requests[key] = request
        if message.timeout_s:
            deadline_s = now + message.timeout_s
            self._deadlines.add(key, deadline_s, self._requests, len(self._requests))
        if self._sync.is_coupled and request.is_guided:
            self._guided.add(key)
        self._scheduler.add_request(request)
        if request.state == MATCHING:
            self._matching.add(request)
        self._has_output = True

    def abort(self, keys: Iterable[int]) -> None:
        """Abort requests; unknown keys are ignored. No Finish is sent for them."""
        for key in keys:
            if request := self._requests.pop(key, None):
                self._scheduler.finish_requests([request])
                self._outputs.retract(request)
                self._has_output = True

    def _end_overdue(self) -> None:
        now = self._clock()
        for key in self._deadlines.take_passed(now):
            request = self._requests.pop(key, None)
            if request is None:
                continue
            self._scheduler.finish_requests([request])
            reached = "it waited to be scheduled"
            if request.started_at >= 0:
                reached = f"{request.num_output_tokens} output tokens were generated"
            self._outputs.fail(request, reached, now, is_timeout=True)
            self._has_output = True

    def control(self, name: str, arguments: dict[str, Any]) -> Any:
        """Execute a Control and return its value. Raises UserError, and the errors of
        `Executor.call`."""
        calls: dict[str, Callable[..., Any]] = {
            "ping": lambda: "pong",
            "reset_prefix_cache": self._reset_prefix_cache,
            "shapes": lambda: self._stats.shapes,
            "sleep_state": lambda: self._sleep_state.state,
            SLEEP: self._sleep,
            WAKE_UP: self._wake_up,
            REGISTER_ADAPTER: self._register_adapter,
            UNLOAD_ADAPTER: self._unload_adapter,
            **dict.fromkeys(PROFILE_CALLS, lambda: self._executor.call(name)),
        }
        if name not in calls:
            raise UserError(f"control {name!r} is not one of {', '.join(calls)}")
        known = _ARGUMENTS.get(name, ())
        if not set(arguments) <= set(known):
            raise UserError(
                f"control {name!r} takes the arguments {list(known)}, it got {list(arguments)}"
            )
        return calls[name](**arguments)

    def _register_adapter(self, info: LoRAInfo) -> None:
        self._lora.register(info)
        self._has_new_adapters = True

    def _unload_adapter(self, lora_name: str) -> int:
        num_requests = self._lora.unregister(lora_name)
        self._has_new_adapters = self._has_output = True
        return num_requests

    @property
    def adapters(self) -> list[LoRAInfo]:
        """All served adapters."""
        return self._lora.infos

    def take_adapters(self) -> list[LoRAInfo] | None:
        """All served adapters if they have changed since the last call, else None."""
        if not self._has_new_adapters:
            return None
        self._has_new_adapters = False
        return self._lora.infos

    def _receive(self, *, waits: bool = False) -> bool:
        """Handle the messages of the workers; returns whether a step result was among them. Must
        not run between a schedule and its submit: the plan may use a slot that a file read is about
        to fill."""
        num_inflight = len(self._inflight)
        for message in self._executor.receive(waits=waits):
            self._handlers[type(message)](message)
        return len(self._inflight) < num_inflight

    def _send_messages(self) -> None:
        """Send the messages of the resources. Must not run between a schedule and its submit."""
        if self._sleep_state.is_sleeping:
            return
        for sender in self._senders:
            for message in sender.take_messages():
                self._executor.send(message)

    def _on_loaded(self, loaded: AdapterLoaded) -> None:
        if not self._lora.on_loaded(loaded):
            self._fail_adapter(loaded)

    def _fail_adapter(self, loaded: AdapterLoaded) -> None:
        requests = [
            request for request in self._requests.values() if request.adapter == loaded.content
        ]
        logger.error("%s failed: %s", counted(len(requests), "request"), loaded.error)
        self._scheduler.finish_requests(requests)
        now = self._clock()
        for request in requests:
            self._outputs.fail(request, loaded.error, now)
            del self._requests[request.key]
        self._has_output = True

    def _reset_prefix_cache(self) -> bool:
        self._kv.reset_prefix_cache(self._scheduler.requests_with_blocks)
        self._send_messages()
        return True

    def _sleep(self, level: int = 1, mode: str = "abort") -> str:
        """Release device memory, see hpu.worker.worker.Worker.sleep. Mode "abort": at once;
        unfinished requests end with an error. Mode "wait": after the last request has finished;
        from now on, new requests that continue no accepted sequence are rejected. Returns the
        state. Raises UserError."""
        if level not in (1, 2):
            raise UserError(f"level is {level}, it must be 1 or 2", param="level")
        if mode not in ("abort", "wait"):
            raise UserError(f"mode is {mode!r}, it must be abort or wait", param="mode")
        if self._sync.is_coupled:
            raise UserError(
                "an engine whose experts are distributed over several engines "
                "(--enable-expert-parallel with --data-parallel-size) cannot sleep"
            )
        self._has_output = True
        self._sleep_state.request(level)
        if mode == "abort" or not self._requests:
            self._enter_sleep()
        return self._sleep_state.state

    def _enter_sleep(self) -> None:
        now = self._clock()
        self._scheduler.finish_requests(self._requests.values())
        for request in self._requests.values():
            self._outputs.fail(request, SLEEPING, now, is_retryable=True)
        self._requests.clear()
        while self._has_open_messages:
            # Wait for open messages: sleeping now could make a worker cancel a read that another
            # rank has already answered.
            self._send_messages()
            self._receive(waits=True)
        self._send_messages()
        self._sleep_state.sleep()
        self._scheduler.reset()
        self._kv.reset_prefix_cache((), drops_files=False)
        self._stats.update_counters({"graphs": 0, "graph_bytes": 0})
        self.num_deferred = 0
        self._has_output = True

    @property
    def _has_open_messages(self) -> bool:
        """Whether the workers still have to answer a message."""
        return (
            bool(self._inflight)
            or self._offload.num_fetching > 0
            or self._lora.num_loading > 0
            or self.is_warming_up
        )

    def _wake_up(self, tags: Sequence[str] = ()) -> str:
        """Restore the memory named by `tags`; all memory if empty. Requests are accepted again once
        everything is restored. Returns the state. Raises UserError and RequestFailed."""
        self._has_output = True
        ready = self._sleep_state.wake_up(tags)
        if ready is not None:
            if not self._table.is_exact:
                self._table.restrict(ready.buckets)
            self._packer.invalidate()
            self._stats.update_counters(ready.counters)
            self.num_deferred = ready.num_deferred
            self._offload.restart(ready.offload)
        return self._sleep_state.state

    def step(self) -> list[tuple[int, StepOutput]]:
        """If a step result has arrived, process it and submit nothing. Otherwise submit the next
        plan, if there is one and fewer than `max_inflight_steps` plans are in flight. Then wait for
        a message of the workers if the limit is reached, or if nothing was submitted and plans are
        in flight. A coupled engine waits only at the limit, and for results that its grammar masks
        need. A step that finds no plan to submit and does not wait sets `is_waiting` if the workers
        still have to answer a message.

        Returns (front end, message) pairs, at most one message per front end.
        """
        self.is_waiting = False
        if self._deadlines:
            self._end_overdue()
        if self._sleep_state.is_pending and not self._requests:
            self._enter_sleep()
        if self._receive():
            return self._drain_events()
        if self._guided:
            self._collect_for_masks()
        if self._matching.has_work:
            self._catch_up()
        if self._senders:
            self._send_messages()
        if len(self._inflight) < self._max_inflight:
            output = self._scheduler.schedule(self._step)
            if output.started or output.failed:
                self._report_scheduled(output)
                # Needed even with a step in flight: `send` may compute in this process and crash.
                if self._on_start is not None:
                    self._on_start(self._take_messages())
            if self._sync.is_coupled and (output.plan is not None or self._is_called):
                output.plan = self._share(output)
            if output.plan is not None:
                if not self._inflight:
                    self._prefill_rate.begin(self._clock())
                self._executor.send(output.plan)
                self._inflight.append(InflightStep(output.plan, output))
                self._step += 1
                if self._senders:
                    self._send_messages()
                if len(self._inflight) < self._max_inflight:
                    return []
            elif self._sync.is_coupled or not self._inflight:
                # Nothing to submit. Coupled engines do not wait for padding steps in flight, since
                # another engine may propose the next step. Requests of an uncoupled engine may
                # still wait for an adapter or for file reads.
                self._send_messages()
                self.is_waiting = self._has_open_messages
                return self._drain_events()
        if self._inflight:
            self._receive(waits=True)
        return self._drain_events()

    def _drain_events(self) -> list[tuple[int, StepOutput]]:
        if not self._has_output and self._outputs.is_empty:
            return []
        return self._take_messages()

    def _share(self, output: SchedulerOutput) -> StepPlan:
        """Return the plan of `output` with the buckets that all engines agree on; a plan of padding
        if `output` has no plan. Blocks until all engines have proposed."""
        plan = output.plan or StepPlan(output.step, [])
        useful = {id(launch): launch.bucket[0] * launch.bucket[1] for launch in plan.launches}
        plan = self._sync.share(output.step, plan)
        for launch in plan.launches:
            computed = launch.bucket[0] * launch.bucket[1]
            added = computed - useful.get(id(launch), 0)
            if added:
                self._stats.count_padding(PHASES[launch.phase], added)
        return plan

    def _collect_for_masks(self) -> None:
        """If requests have a grammar, process all plans in flight. All masks are then known when a
        plan is made, and no launch is deferred, so that all engines launch in the same order."""
        self._guided.intersection_update(self._requests)
        while self._guided and self._inflight:
            self._receive(waits=True)

    def take_outputs(self) -> list[tuple[int, StepOutput]]:
        """Take the pending messages without running a step."""
        return self._take_messages() if self._has_output else []

    def _report_scheduled(self, output: SchedulerOutput) -> None:
        now = self._clock()
        for request, num_cached in output.started:
            self._outputs.start(request, num_cached, now)
        for request, error in output.failed:
            # An empty `param` marks a client error that concerns the whole request.
            self._outputs.fail(request, error, now, param="")
            del self._requests[request.key]

    def _process(self, result: StepResult) -> None:
        plan, output = self._inflight.popleft()
        now = self._clock()
        if self._offload.is_enabled:
            self._drop_corrupt(self._offload.on_loaded(output.step, result.corrupt_loads))
        finished = self._outputs.process(output, result, now)
        self._scheduler.finish_requests(finished)
        for request in finished:
            del self._requests[request.key]
        if self._matching.has_behind:
            for request in self._scheduler.hold_back(self._matching.take_behind()):
                self._requests[request.key] = request
                self._matching.add(request)
        self._submit_deferred_masks()
        self._scheduler.update_from_output(output.step)
        phases = [launch.phase for launch in plan.launches]
        if self._offload.is_enabled:
            for launch, seconds in zip(plan.launches, result.seconds, strict=False):
                if launch.phase == PREFILL:
                    self._offload.rates.add_prefill(sum(launch.query_lens), seconds)
        # Skip steps that only padded for other engines.
        if output.num_tokens or not self._sync.is_coupled:
            self._stats.count_step(self._outputs.num_step_tokens, phases, result.seconds)
            self._has_output = True
        if self._reports_rate:
            num_tokens = sum(chunk.num_tokens for chunk in output.chunks)
            num_tokens += sum(num_cached for _, num_cached in output.started)
            has_waiting = len(self._scheduler.waiting) > 0
            self._prefill_rate.observe(num_tokens, now, has_waiting=has_waiting)
        if result.counters:
            compiled = self._stats.num_compiled
            self._stats.update_counters(result.counters)
            self._log_compilations(plan, output, self._stats.num_compiled - compiled)
            self._has_output = True
        if not self._requests and not self._inflight:
            self._check_idle()

    def _catch_up(self) -> None:
        """Match output tokens that the grammars of their requests have not matched yet."""
        ready, failed = self._matching.catch_up()
        for request in ready:
            self._scheduler.enqueue(request)
        self._scheduler.finish_requests([request for request, _ in failed])
        now = self._clock()
        for request, error in failed:
            self._outputs.fail(request, error, now, param="structured_outputs")
            del self._requests[request.key]

    def _drop_corrupt(self, blocks: list[tuple[int, bytes]]) -> None:
        """Drop blocks, as (block, hash), whose copies from the host in the plan being processed
        were corrupt, and restart the requests that use them."""
        for block, block_hash in blocks:
            self._kv.drop(block, block_hash)
        if blocks:
            for request in self._scheduler.restart_requests({block for block, _ in blocks}):
                self._requests[request.key] = request

    def _submit_deferred_masks(self) -> None:
        """Send the deferred grammar masks of the oldest plan in flight, which depend on the result
        just processed. Sent early, since the worker cannot sample without them."""
        if self._inflight:
            plan, output = self._inflight[0]
            if output.deferred:
                self._executor.send(deferred_masks(plan, output.deferred))

    def _log_compilations(self, plan: StepPlan, output: SchedulerOutput, count: int) -> None:
        """Log the compilations of a step and the requests that waited for them."""
        if not count:
            return
        shapes = ", ".join(f"{PHASES[launch.phase]} {launch.bucket}" for launch in plan.launches)
        requests = [*output.decodes, *(chunk.request for chunk in output.prefills)]
        names = ", ".join(request.name for request in requests)
        logger.warning(
            "Step %d compiled %d times while serving: %s, for %s",
            output.step,
            count,
            shapes,
            names or "no request",
        )

    def _take_messages(self) -> list[tuple[int, StepOutput]]:
        self._has_output = False
        if not self._front_ends:
            return []
        return self._outputs.take_messages(
            self._snapshot(with_samples=True), sorted(self._front_ends)
        )

    def stats(self) -> EngineStats:
        """Current gauges and counters. The samples stay queued for the next message."""
        return self._snapshot(with_samples=False)

    def _snapshot(self, *, with_samples: bool) -> EngineStats:
        waiting, pool = self._scheduler.waiting, self._kv.pool
        rate: dict[str, float] = {}
        if self._reports_rate:
            rate["prefill_tokens_per_s"] = self._prefill_rate.tokens_per_s
            rate["prefilling_tokens"] = self._scheduler.num_prefilling_tokens
        oldest = waiting.oldest()
        return self._stats.snapshot(
            **self._lora.gauges,
            **self._encoder.gauges,
            **waiting.gauges,
            **rate,
            running=self._scheduler.num_running,
            waiting=len(waiting),
            waiting_prompt_tokens=waiting.num_tokens,
            oldest_waiting_s=0.0 if oldest is None else self._clock() - oldest.arrived_at,
            blocks_used=pool.size - pool.num_free,
            blocks_total=pool.size,
            kv_offload=self._offload.gauges,
            sleep=self._sleep_state.state,
            with_samples=with_samples,
        )

    def check(self) -> None:
        """Raise AssertionError unless every block and every index is free or belongs to an
        unfinished or draining request."""
        self._scheduler.check()
        if not self._requests and not self._inflight:
            self._check_idle()

    def _check_idle(self) -> None:
        pool, waiting = self._kv.pool, self._scheduler.waiting
        assert pool.num_free == pool.size, (
            f"{pool.num_free} of {pool.size} blocks are free when idle"
        )
        assert len(waiting) == 0, f"{len(waiting)} requests wait when none is unfinished"
        running = self._scheduler.num_running
        assert running == 0, f"{running} requests run when none is unfinished"

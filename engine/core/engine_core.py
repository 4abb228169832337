"""EngineCore: runs steps: schedule, submit, collect, process the result."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from config.engine import EngineConfig
from config.errors import UserError
from config.lora.info import LoRAInfo
from engine.core.admission import admission_error, num_prompt_tokens
from engine.core.coupled_steps import DPSync
from engine.core.output_processor import OutputProcessor
from engine.core.prefill_rate import PrefillRate
from engine.core.sleep_state import SleepState
from engine.executors.base import AdapterExecutor, Executor, OffloadExecutor
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.offload import KVOffload
from engine.request import NO_ALLOWED_TOKEN, ModelLimits, Request
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.encoder_cache import EncoderCacheManager
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.grammar_masks import deferred_masks
from engine.scheduling.launch_packer import LaunchPacker
from engine.scheduling.lora_slots import LoRASlots
from engine.scheduling.pooling_scheduler import PoolingScheduler, pooling_refusal
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
    DECODE,
    PREFILL,
    PROFILE_CALLS,
    AdapterLoaded,
    DropFiles,
    StepPlan,
    StepResult,
    WarmupProgress,
    WorkerReady,
)

logger = logging.getLogger(__name__)

CALL_POLL_S = 50e-6
"""Poll interval for the next call while an idle engine's devices compute padding."""
MAX_CALL_WAIT_S = 0.1
"""Maximum time of this polling before the engine waits for its devices only."""

FETCH_POLL_S = 0.002
"""Maximum wait for file reads before an engine checks for new requests."""
MAX_SHARES = 256
"""Maximum number of waiting shares reported to front ends."""

ADAPTER_POLL_S = 0.002
"""Maximum wait for an adapter before an engine checks for new requests."""

_ARGUMENTS = {
    SLEEP: ("level", "mode"),
    WAKE_UP: ("tags",),
    REGISTER_ADAPTER: ("info",),
    UNLOAD_ADAPTER: ("lora_name",),
}
"""Argument names of controls; controls that are not listed take no arguments."""


class EngineCore:
    """An engine without channels. All calls must come from a single thread.

    The caller calls `step` while there is work. Each request ends with exactly one Finish, except
    aborted requests: an abort ends all messages about the request.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        ready: WorkerReady,
        table: BucketTable,
        clock: Callable[[], float],
        on_progress: Callable[[WarmupProgress], None] = lambda progress: None,
        *,
        on_start: Callable[[list[tuple[int, StepOutput]]], None] | None = None,
        engine: int = 0,
        coupled: DPSync | None = None,
        adapters: Iterable[LoRAInfo] = (),
    ) -> None:
        """`adapters`: served from the start. `on_progress`: called during warm-up after a sleep.
        `on_start`: receives the messages about started requests before their first plan is
        submitted, so that front ends know the started requests if the plan crashes the process.
        `engine`: data-parallel index. `coupled`: set if the engines step together."""
        scheduler = config.scheduler
        self._executor = executor
        self._on_start = on_start
        self._clock = clock
        self._coupled = coupled
        self._max_inflight = config.max_inflight_steps
        self._max_queue_len = scheduler.max_queue_len
        self._by_priority = scheduler.policy == "priority"
        self._limits = ModelLimits(
            ready.max_model_len,
            ready.vocab_size,
            frozenset(ready.eos_token_ids),
            ready.prompt_vocab_size,
        )
        # Each engine draws different seeds: a prompt may be sent to several engines.
        self._seeds = random.Random(config.seed + (engine << 64))
        self._stats = StepStats(graph_bytes=ready.graph_bytes)
        self._stats.update_counters(ready.counters)
        self._table = table
        self.num_deferred = ready.num_deferred
        """Buckets that remain to be warmed up while the engine is idle."""
        self._offload: KVOffload | None = None
        if ready.offload is not None:
            self._offload = KVOffload(
                ready.offload,
                ready.block_size,
                only_preempted=config.offload.kv_offloading_size == 0,
            )
        self._files = executor if isinstance(executor, OffloadExecutor) else None
        self._kv = KVCacheManager(
            _num_usable_blocks(config, ready, table),
            ready.block_size,
            prefix_caching=config.cache.enable_prefix_caching
            and ready.bucket_limits.prefix_caching,
            contiguous=ready.contiguous,
            num_lookahead_tokens=(ready.max_tokens_per_step - 1) * config.max_inflight_steps,
            offload=self._offload,
            all_see_images=ready.request_tiles > 0,
        )
        longest_text = 0 if ready.pooling is None else ready.max_model_len
        self._max_batched_tokens = scheduler.token_budget(longest_text)
        self._packer = LaunchPacker(
            table,
            max_prefill_batch=scheduler.prefill_batch(
                is_pooling=ready.pooling is not None, is_exact=table.is_exact
            ),
            max_tokens=self._max_batched_tokens,
            stats=self._stats,
            on_unwarmed=config.warmup.on_unwarmed_shape,
            contiguous=ready.contiguous,
            merges_prompts=table.limits.merged_prefill,
        )
        self._lora = LoRASlots(config.lora) if config.lora.enable_lora else None
        self._adapters = executor if isinstance(executor, AdapterExecutor) else None
        assert self._lora is None or self._adapters is not None, "the executor takes no adapters"
        self._has_new_adapters = False
        for info in adapters:
            self._register_adapter(info)
        self._encoder: EncoderCacheManager | None = None
        if ready.encoder_cache_tokens:
            self._encoder = EncoderCacheManager(
                ready.encoder_cache_tokens,
                whole_images=ready.whole_images,
                request_tiles=ready.request_tiles,
            )
        self._pooling = ready.pooling
        self._scheduler: Scheduler | PoolingScheduler
        if ready.pooling is not None:
            self._scheduler = PoolingScheduler(
                scheduler, ready.pooling, self._packer, self._max_batched_tokens, self._lora
            )
        else:
            self._scheduler = Scheduler(
                scheduler,
                self._kv,
                self._packer,
                self._stats,
                defrag_threshold=config.execution.defrag_threshold,
                prefill_launch_tokens=ready.prefill_launch_tokens,
                num_stages=config.parallel.pipeline_parallel_size,
                max_tokens_per_step=ready.max_tokens_per_step,
                lora=self._lora,
                encoder=self._encoder,
            )
        self._outputs = OutputProcessor(self._kv)
        self._sleep_state = SleepState(executor, on_progress)
        self._requests: dict[int, Request] = {}
        self._deadlines = Deadlines()
        self._prefill_rate = PrefillRate() if scheduler.max_ttft_s > 0 else None
        self._guided: set[int] = set()
        """Keys of possibly unfinished requests with a grammar; filled for coupled engines only."""
        self._front_ends: set[int] = set()
        self._inflight: deque[SchedulerOutput] = deque()
        self._step = 0
        self._num_arrivals = 0
        self._has_output = False

    @property
    def num_inflight(self) -> int:
        """Submitted plans that are not collected."""
        return len(self._inflight)

    @property
    def num_requests(self) -> int:
        """Unfinished requests, waiting or running."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return (
            bool(self._inflight)
            or self._scheduler.has_work
            or self._has_output
            or not self._outputs.is_empty
            or (self._sleep_state.is_pending and not self._requests)
            or self._is_called
        )

    @property
    def _is_called(self) -> bool:
        """Whether another engine has proposed the next step, so that this engine must join it."""
        return self._coupled is not None and self._coupled.is_called(self._step)

    def warm_up_next(self) -> bool:
        """Warm up a remaining bucket; called when the engine is idle. Returns whether to call again
        soon."""
        may_continue = self._executor.warm_up_next()
        self._take_warmed()
        return may_continue

    def _take_warmed(self) -> None:
        for warmed in self._executor.take_warmed():
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

        `hashes`: engine.kv_cache.prefix_hashes.block_hashes of the prompt; empty without prefix
        caching. `grammar`: compiled from the message's spec.
        """
        key = message.key
        self._front_ends.add(key >> FRONT_END_SHIFT)
        if key in self._requests:
            # The caller cannot tell the outputs of the two requests apart, so both end.
            self.abort([key])
            self._outputs.reject(key, f"key {key} was already open; both requests are ended")
            return
        assert (grammar is None) == (message.sampling.structured_outputs is None)
        is_accepted = message.is_continuation and not self._sleep_state.is_sleeping
        if self._sleep_state.state != AWAKE and not is_accepted:
            self._outputs.reject(key, SLEEPING, is_retryable=True)
            return
        error = self._admission_error(message)
        if error is not None:
            self._outputs.reject(key, error)
            return
        if message.images and (error := self._images_error(message)) is not None:
            # param "": a client error, caused by too many or too large images.
            self._outputs.reject(key, error, param="")
            return
        refusal = pooling_refusal(message.pooling, self._pooling, num_prompt_tokens(message))
        if refusal is not None:
            self._outputs.reject(key, *refusal)
            return
        if message.adapter and not self._serves_adapter(message):
            self._outputs.reject(key, "the adapter of the request was unloaded", "model")
            return
        params = message.sampling
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed & (2**63 - 1)
        now = self._clock()
        request = Request(
            message,
            hashes,
            seed=seed,
            priority_key=(
                message.priority if self._by_priority else 0,
                -1 if message.is_continuation else self._num_arrivals,
            ),
            limits=self._limits,
            arrived_at=now,
            grammar=grammar,
        )
        self._num_arrivals += 1
        if request.guide is not None and request.has_no_allowed_token:
            self._outputs.reject(key, NO_ALLOWED_TOKEN, "structured_outputs")
            return
        is_empty = params.max_tokens == 0 and params.prompt_logprobs is None
        if is_empty and message.pooling is None:
            self._outputs.start(request, 0, now)
            self._outputs.finish(request, "length", now)
            return
        self._requests[key] = request
        if message.timeout_s:
            deadline_s = now + message.timeout_s
            self._deadlines.add(key, deadline_s, self._requests, len(self._requests))
        if self._coupled is not None and request.guide is not None:
            self._guided.add(key)
        self._scheduler.add_request(request)
        self._has_output = True

    def _admission_error(self, message: AddRequest) -> str | None:
        error = admission_error(message, self._limits, None if self._pooling else self._kv)
        num_waiting = len(self._scheduler.waiting)
        is_new = message.resumption is None
        if error is None and is_new and num_waiting >= self._max_queue_len:
            error = f"{num_waiting} requests wait, at most {self._max_queue_len} may"
        return error

    def _images_error(self, message: AddRequest) -> str | None:
        if self._encoder is None or message.pooling is not None:
            return f"the request has {len(message.images)} images, the model takes 0"
        return self._encoder.refusal(message, self._max_batched_tokens)

    def abort(self, keys: Iterable[int]) -> None:
        """Abort requests; unknown keys are ignored. No further message is sent for them."""
        for key in keys:
            request = self._requests.pop(key, None)
            if request is not None:
                self._scheduler.finish_requests([request])
                self._outputs.retract(request)
                self._has_output = True

    def _end_overdue(self) -> None:
        """Fail the requests whose deadlines have passed."""
        now = self._clock()
        for key in self._deadlines.take_passed(now):
            request = self._requests.pop(key, None)
            if request is None:
                continue
            self._scheduler.finish_requests([request])
            reached = "it waited to be scheduled"
            if request.started_at >= 0:
                reached = f"{request.num_output_tokens} output tokens were generated"
            self._outputs.finish(request, "error", now, error=reached, is_timeout=True)
            self._has_output = True

    def control(self, name: str, arguments: dict[str, Any]) -> Any:
        """Execute a Control and return its value. Raises UserError for an unknown name or argument,
        and the errors of `Executor.call`."""
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
                f"control {name!r} takes {len(known)} arguments, it got {len(arguments)}"
            )
        return calls[name](**arguments)

    def _serves_adapter(self, message: AddRequest) -> bool:
        return self._lora is not None and self._lora.serves(
            message.adapter,
            is_continuation=message.is_continuation or message.resumption is not None,
        )

    def _register_adapter(self, info: LoRAInfo) -> None:
        self._adapter_slots.register(info)
        self._has_new_adapters = True

    def _unload_adapter(self, lora_name: str) -> int:
        num_requests = self._adapter_slots.unregister(lora_name)
        self._has_new_adapters = self._has_output = True
        return num_requests

    @property
    def _adapter_slots(self) -> LoRASlots:
        if self._lora is None:
            raise UserError("this server serves no adapters: start it with --enable-lora")
        return self._lora

    @property
    def adapters(self) -> list[LoRAInfo]:
        """All served adapters."""
        return [] if self._lora is None else self._lora.infos

    def take_adapters(self) -> list[LoRAInfo] | None:
        """All served adapters if they have changed since the last call, else None."""
        if self._lora is None or not self._has_new_adapters:
            return None
        self._has_new_adapters = False
        return self._lora.infos

    def _update_adapters(self, lora: LoRASlots) -> None:
        """Process finished adapter loads, and send new loads and drops to the workers."""
        executor = self._adapters
        assert executor is not None, "checked at the start"
        if lora.num_loading:
            for loaded in executor.take_loaded():
                if not lora.on_loaded(loaded):
                    self._fail_adapter(loaded)
        for drop in lora.take_drops():
            executor.drop_adapter(drop)
        for load in lora.take_loads():
            executor.load_adapter(load)

    def _fail_adapter(self, loaded: AdapterLoaded) -> None:
        """Fail the requests of an adapter that cannot be read."""
        requests = [
            request for request in self._requests.values() if request.adapter == loaded.content
        ]
        logger.error("%d requests end: %s", len(requests), loaded.error)
        self._scheduler.finish_requests(requests)
        now = self._clock()
        for request in requests:
            self._outputs.finish(request, "error", now, error=loaded.error)
            del self._requests[request.key]
        self._has_output = True

    def _reset_prefix_cache(self) -> bool:
        self._kv.reset_prefix_cache(self._scheduler.requests_with_blocks)
        if self._offload is not None:
            self._send_file_orders(self._offload)
        return True

    def _update_offload(self, offload: KVOffload) -> None:
        """Process answered file reads, and send new reads and deletions to the workers. Must not
        run between a schedule and its submit: the plan may still use a slot that is read to."""
        if offload.num_fetching:
            assert self._files is not None, "checked when the read was sent"
            for answer in self._files.take_fetched():
                offload.on_fetched(answer)
        self._send_file_orders(offload)

    def _send_file_orders(self, offload: KVOffload) -> None:
        executor = self._files
        if self._sleep_state.is_sleeping:
            return
        if dropped := offload.take_dropped_files():
            assert executor is not None, "the executor has no files"
            executor.drop_files(DropFiles(dropped))
        for fetch in offload.take_fetches():
            assert executor is not None, "the executor has no files"
            executor.fetch_blocks(fetch)

    def _sleep(self, level: int = 1, mode: str = "abort") -> str:
        """Release device memory, see hpu.worker.Worker.sleep. Mode "abort": at once; unfinished
        requests end with an error. Mode "wait": after the last request has finished; new requests
        are rejected from now on. Returns the state. Raises UserError."""
        if level not in (1, 2):
            raise UserError(f"level is {level}, it must be 1 or 2", param="level")
        if mode not in ("abort", "wait"):
            raise UserError(f"mode is {mode!r}, it must be abort or wait", param="mode")
        if self._coupled is not None:
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
            self._outputs.finish(request, "error", now, error=SLEEPING, is_retryable=True)
        self._requests.clear()
        while self._inflight:
            self._process(self._executor.collect())
        while self._offload is not None and self._offload.num_fetching:
            self._update_offload(self._offload)
            if self._offload.num_fetching and self._files is not None:
                self._files.wait_fetched(FETCH_POLL_S)
        while self._lora is not None and self._lora.num_loading:
            # Sleeping now could make a worker cancel a read that another rank has answered.
            self._update_adapters(self._lora)
            if self._lora.num_loading and self._adapters is not None:
                self._adapters.wait_loaded(ADAPTER_POLL_S)
        self._sleep_state.sleep()
        self._scheduler.reset()
        self._kv.reset_prefix_cache((), drops_files=False)
        self._stats.update_counters({"graphs": 0, "graph_bytes": 0})
        self.num_deferred = 0
        self._has_output = True

    def _wake_up(self, tags: Sequence[str] = ()) -> str:
        """Restore the memory that `tags` name; all memory if empty. Requests are accepted again
        once everything is restored. Returns the state. Raises UserError and RequestFailed."""
        self._has_output = True
        ready = self._sleep_state.wake_up(tags)
        if ready is not None:
            if not self._table.is_exact:
                self._table.restrict(ready.buckets)
            self._packer.invalidate()
            self._stats.update_counters(ready.counters)
            self.num_deferred = ready.num_deferred
            if self._offload is not None and ready.offload is not None:
                self._offload.restart(ready.offload)
        return self._sleep_state.state

    def step(self) -> list[tuple[int, StepOutput]]:
        """Submit a plan if fewer than `max_inflight_steps` are in flight, then collect the oldest
        plan if the limit is reached or nothing was submitted. If a result is already available,
        only processes that result.

        Returns (front end, message) pairs, at most one message per front end.
        """
        if self.num_deferred:
            self._take_warmed()
        if self._deadlines:
            self._end_overdue()
        if self._sleep_state.is_pending and not self._requests:
            self._enter_sleep()
        if self._inflight and self._executor.has_result():
            self._process(self._executor.collect())
            return self._drain_events()
        if self._coupled is not None and self._guided:
            self._collect_for_masks()
        if self._lora is not None:
            self._update_adapters(self._lora)
        if self._offload is not None:
            self._update_offload(self._offload)
        if len(self._inflight) < self._max_inflight:
            output = self._scheduler.schedule(self._step)
            if output.started or output.failed:
                self._report_scheduled(output)
                # Needed even with a step in flight: an executor may compute during submit.
                if self._on_start is not None:
                    self._on_start(self._take_messages())
            if self._coupled is not None and (output.plan is not None or self._is_called):
                output.plan = self._share(output, self._coupled)
            if output.plan is not None:
                if self._prefill_rate is not None and not self._inflight:
                    self._prefill_rate.begin(self._clock())
                self._executor.submit(output.plan)
                self._inflight.append(output)
                self._step += 1
                if self._offload is not None:
                    self._send_file_orders(self._offload)
                if len(self._inflight) < self._max_inflight:
                    return []
            elif self._coupled is not None and self._inflight and self._wait_for_peers():
                return self._drain_events()
        if self._inflight:
            self._process(self._executor.collect())
        elif self._adapters is not None and self._lora is not None and self._lora.num_loading:
            # Every waiting request waits for its adapter.
            self._adapters.wait_loaded(ADAPTER_POLL_S)
        elif self._files is not None and self._offload is not None and self._offload.num_fetching:
            # Every waiting request waits for file reads.
            self._send_file_orders(self._offload)
            self._files.wait_fetched(FETCH_POLL_S)
        return self._drain_events()

    def _drain_events(self) -> list[tuple[int, StepOutput]]:
        """Pending messages; empty if nothing has changed."""
        if not self._has_output and self._outputs.is_empty:
            return []
        return self._take_messages()

    def _share(self, output: SchedulerOutput, coupled: DPSync) -> StepPlan:
        """The plan of `output` in the buckets that all engines agree on. Blocks until all engines
        have proposed."""
        before = [] if output.plan is None else output.plan.launches
        useful = {id(launch): launch.bucket[0] * launch.bucket[1] for launch in before}
        plan = coupled.share(output.step, output.plan)
        for launch in plan.launches:
            computed = launch.bucket[0] * launch.bucket[1]
            added = computed - useful.get(id(launch), 0)
            if added:
                self._stats.count_padding(PHASES[launch.phase], added)
        return plan

    def _collect_for_masks(self) -> None:
        """Process all plans in flight if requests have a grammar. Then all masks are known when a
        plan is made, and no launch is deferred: the engines' launches keep a common order."""
        self._guided.intersection_update(self._requests)
        while self._guided and self._inflight:
            self._process(self._executor.collect())

    def _wait_for_peers(self) -> bool:
        """Poll for another engine's proposal of the next step while the devices compute padding:
        without this, the proposal would have to wait for the end of the padding. False if a result
        came first or MAX_CALL_WAIT_S passed."""
        end_s = time.monotonic() + MAX_CALL_WAIT_S
        while not self._executor.has_result() and time.monotonic() < end_s:
            if self._is_called:
                return True
            time.sleep(CALL_POLL_S)
        return False

    def take_outputs(self) -> list[tuple[int, StepOutput]]:
        """Pending messages, without running a step."""
        return self._take_messages() if self._has_output else []

    def _report_scheduled(self, output: SchedulerOutput) -> None:
        now = self._clock()
        for request, num_cached in output.started:
            self._outputs.start(request, num_cached, now)
        for request, error, param in output.failed:
            self._outputs.finish(request, "error", now, error=error, param=param)
            del self._requests[request.key]

    def _process(self, result: StepResult) -> None:
        output = self._inflight.popleft()
        assert output.plan is not None, f"step {output.step} was never submitted"
        now = self._clock()
        if self._offload is not None:
            self._drop_corrupt(self._offload.on_loaded(output.step, result.corrupt_loads))
        finished = self._outputs.process(output, result, now)
        self._scheduler.finish_requests(finished)
        for request in finished:
            del self._requests[request.key]
        self._submit_deferred_masks()
        self._scheduler.update_from_output(output.step)
        phases = [launch.phase for launch in output.plan.launches]
        if self._offload is not None:
            for launch, seconds in zip(output.plan.launches, result.seconds, strict=False):
                if launch.phase == PREFILL:
                    self._offload.rates.add_prefill(sum(launch.query_lens), seconds)
        # A step of padding for other engines is not counted.
        if output.num_tokens or self._coupled is None:
            self._stats.count_step(self._outputs.num_step_tokens, phases, result.seconds)
            self._has_output = True
        if self._prefill_rate is not None:
            num_tokens = sum(chunk.num_tokens for chunk in output.chunks)
            num_tokens += sum(num_cached for _, num_cached in output.started)
            has_waiting = len(self._scheduler.waiting) > 0
            self._prefill_rate.observe(num_tokens, now, has_waiting=has_waiting)
        if result.counters:
            compiled = self._stats.num_compiled
            self._stats.update_counters(result.counters)
            self._log_compilations(output, self._stats.num_compiled - compiled)
            self._has_output = True
        if not self._requests and not self._inflight:
            self._check_idle()

    def _drop_corrupt(self, blocks: list[tuple[int, bytes]]) -> None:
        """Drop blocks, as (block, hash), that were copied from the host with wrong contents in the
        plan being processed, and restart the requests that use them."""
        for block, block_hash in blocks:
            self._kv.drop(block, block_hash)
        if blocks:
            for request in self._scheduler.restart_requests({block for block, _ in blocks}):
                self._requests[request.key] = request

    def _submit_deferred_masks(self) -> None:
        """Send the deferred grammar masks of the oldest plan in flight, which depend on the result
        just processed. Sent early, since the worker cannot sample without them."""
        running = self._inflight[0] if self._inflight else None
        if running is not None and running.deferred:
            assert running.plan is not None, "only a plan has deferred requests"
            self._executor.submit_masks(deferred_masks(running.plan, running.deferred))

    def _log_compilations(self, output: SchedulerOutput, count: int) -> None:
        """Log the compilations of a step and the requests that waited for them."""
        if not count:
            return
        assert output.plan is not None, "a step without a plan compiles nothing"
        shapes = ", ".join(
            f"{PHASES[launch.phase]} {launch.bucket}" for launch in output.plan.launches
        )
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
        """Current gauges and counters. Samples are left for the next message."""
        return self._snapshot(with_samples=False)

    def _snapshot(self, *, with_samples: bool) -> EngineStats:
        waiting, pool = self._scheduler.waiting, self._kv.pool
        adapters = {} if self._lora is None else self._lora.gauges
        images = {} if self._encoder is None else self._encoder.gauges
        offload = {} if self._offload is None else self._offload.gauges
        shares: dict[str, Any] = {}
        if self._prefill_rate is not None and waiting.shares is not None:
            shares["prefill_tokens_per_s"] = self._prefill_rate.tokens_per_s
            shares["prefilling_tokens"] = self._scheduler.num_prefilling_tokens
            first = islice(waiting.shares.items(), MAX_SHARES)
            shares["waiting_shares"] = [(*share, count) for share, count in first]
        if isinstance(waiting, FairQueue):
            shares["waiting_tenants"] = waiting.num_waiting_tenants
            shares["tenant_tokens"] = waiting.served.copy()
        oldest = waiting.oldest()
        return self._stats.snapshot(
            **adapters,
            **images,
            **shares,
            running=self._scheduler.num_running,
            waiting=len(waiting),
            waiting_prompt_tokens=waiting.num_tokens,
            oldest_waiting_s=0.0 if oldest is None else self._clock() - oldest.arrived_at,
            blocks_used=pool.size - pool.num_free,
            blocks_total=pool.size,
            kv_offload=offload,
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


def _num_usable_blocks(config: EngineConfig, ready: WorkerReady, table: BucketTable) -> int:
    """KV blocks to use: all blocks of the worker. If decodes read a slice of the cache and
    unprepared shapes are rejected: at most the blocks of the widest prepared decode."""
    may_reject = config.warmup.on_unwarmed_shape == "reject" and not table.is_exact
    if not (ready.contiguous and may_reject):
        return ready.num_blocks
    widest = max((bucket[3] for bucket in table.buckets if bucket[0] == DECODE), default=0)
    return min(ready.num_blocks, widest)

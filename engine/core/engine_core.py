"""EngineCore: turn after turn: plan, submit, collect, apply. Knows no sockets and no threads."""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from config.engine import EngineConfig
from config.errors import UserError
from engine.core.admission import num_prompt_tokens, what_is_wrong
from engine.core.output_processor import OutputProcessor
from engine.core.request import CORNERED, ModelLimits, Request
from engine.core.sleep import Sleeping
from engine.core.stats import PHASES, StepStats
from engine.executors.base import Executor
from engine.kv_cache.manager import KVCacheManager
from engine.scheduling.grammar_masks import late_masks
from engine.scheduling.launch_packer import Packer
from engine.scheduling.pooling_scheduler import PoolingScheduler, pooling_refusal
from engine.scheduling.scheduler import Scheduler, SchedulerOutput
from engine.structured_output.grammar import Grammar
from engine.transport.messages import (
    AWAKE,
    FRONT_END_SHIFT,
    SLEEP,
    WAKE_UP,
    AddRequest,
    EngineStats,
    StepOutput,
)
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import DECODE, PROFILE_CALLS, StepResult, WarmupProgress, WorkerReady

logger = logging.getLogger(__name__)

SLEEPS = "the engine sleeps"

_ARGUMENTS = {SLEEP: ("level", "mode"), WAKE_UP: ("tags",)}
"""Of controls that take any."""


class EngineCore:
    """All of an engine but its channels. Called from one thread only.

    A caller that has work calls `turn` again and again. Each open request ends with exactly one
    Finish, unless it is aborted: then nothing more is sent for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        ready: WorkerReady,
        table: BucketTable,
        clock: Callable[[], float],
        on_progress: Callable[[WarmupProgress], None] = lambda progress: None,
    ) -> None:
        """`on_progress` hears of warm-ups that follow a sleep."""
        schedule = config.scheduler
        self._executor = executor
        self._clock = clock
        self._depth = schedule.max_inflight_steps
        self._max_waiting = schedule.max_queue_len
        self._by_priority = schedule.policy == "priority"
        self._limits = ModelLimits(
            ready.max_model_len, ready.vocab_size, frozenset(ready.eos_token_ids)
        )
        self._seeds = random.Random(config.seed)
        self._counts = StepStats(graph_bytes=ready.graph_bytes)
        self._counts.take_counters(ready.counters)
        self._table = table
        self.num_later = ready.num_later
        """Buckets that are still to be prepared, between requests."""
        self._kv = KVCacheManager(
            _blocks_to_lend(config, ready, table),
            ready.block_size,
            prefix_caching=config.cache.enable_prefix_caching,
            contiguous=ready.contiguous,
        )
        self._packer = Packer(
            table,
            max_prefill_batch=schedule.prefill_batch(
                is_pooling=ready.pooling is not None, is_exact=table.is_exact
            ),
            max_tokens=schedule.max_num_batched_tokens,
            stats=self._counts,
            on_unwarmed=config.warmup.on_unwarmed_shape,
            contiguous=ready.contiguous,
        )
        self._pooling = ready.pooling
        self._scheduler: Scheduler | PoolingScheduler
        if ready.pooling is not None:
            self._scheduler = PoolingScheduler(schedule, ready.pooling, self._packer)
        else:
            self._scheduler = Scheduler(
                schedule,
                self._kv,
                self._packer,
                self._counts,
                defrag_threshold=config.execution.defrag_threshold,
            )
        self._outputs = OutputProcessor(self._kv)
        self._sleeping = Sleeping(executor, on_progress)
        self._requests: dict[int, Request] = {}
        self._front_ends: set[int] = set()
        self._in_flight: deque[SchedulerOutput] = deque()
        self._step = 0
        self._arrivals = 0
        self._has_news = False

    @property
    def in_flight(self) -> int:
        """Plans submitted and not collected."""
        return len(self._in_flight)

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        return (
            bool(self._in_flight)
            or self._scheduler.has_work
            or self._has_news
            or not self._outputs.is_empty
            or (self._sleeping.is_falling and not self._requests)
        )

    def idle(self) -> bool:
        """There has been no work for a while: go on with what is left of the warm-up, one bucket.
        Whether to call again soon."""
        is_busy = self._executor.idle()
        self._hear_warmed()
        return is_busy

    def _hear_warmed(self) -> None:
        for warmed in self._executor.take_warmed():
            self._table.add(warmed.buckets)
            self._packer.forget()
            self._counts.take_counters(warmed.counters)
            self.num_later = warmed.num_later
            self._has_news = True

    def attach(self, front_end: int) -> None:
        """A front-end is there: from now on it gets every step's stats, even without requests."""
        self._front_ends.add(front_end)
        self._has_news = True

    def detach(self, front_end: int) -> None:
        """A front-end is gone: abort all it asked, and send it nothing more."""
        self.abort([key for key in self._requests if key >> FRONT_END_SHIFT == front_end])
        self._front_ends.discard(front_end)
        self._outputs.forget(front_end)

    def add(self, message: AddRequest, hashes: list[bytes], grammar: Grammar | None = None) -> None:
        """Stand in line. What cannot run gets a Finish of reason error with the next turn.

        `hashes` are engine.prefix.block_hashes of the prompt; empty without prefix caching.
        `grammar` is what the message's spec was compiled to.
        """
        key = message.key
        self._front_ends.add(key >> FRONT_END_SHIFT)
        if key in self._requests:
            # The caller cannot tell the two apart, so neither goes on.
            self.abort([key])
            self._outputs.refuse(key, f"key {key} was already open; both requests are ended")
            return
        assert (grammar is None) == (message.sampling.structured_outputs is None)
        may_go_on = message.goes_on and not self._sleeping.is_asleep
        if self._sleeping.state != AWAKE and not may_go_on:
            self._outputs.refuse(key, SLEEPS, is_late=True)
            return
        error = self._what_is_wrong(message)
        if error is not None:
            self._outputs.refuse(key, error)
            return
        refusal = pooling_refusal(message.pooling, self._pooling, num_prompt_tokens(message))
        if refusal is not None:
            self._outputs.refuse(key, *refusal)
            return
        params = message.sampling
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed & (2**63 - 1)
        now = self._clock()
        request = Request(
            message,
            hashes,
            seed=seed,
            rank=(
                message.priority if self._by_priority else 0,
                -1 if message.goes_on else self._arrivals,
            ),
            limits=self._limits,
            arrived_at=now,
            grammar=grammar,
        )
        self._arrivals += 1
        if request.guide is not None and request.is_cornered:
            self._outputs.refuse(key, CORNERED, "structured_outputs")
            return
        asks_nothing = params.max_tokens == 0 and params.prompt_logprobs is None
        if asks_nothing and message.pooling is None:
            self._outputs.start(request, 0, now)
            self._outputs.finish(request, "length", now)
            return
        self._requests[key] = request
        self._scheduler.add(request)
        self._has_news = True

    def _what_is_wrong(self, message: AddRequest) -> str | None:
        error = what_is_wrong(message, self._limits, None if self._pooling else self._kv)
        if error is None and len(self._scheduler.line) >= self._max_waiting:
            error = f"{len(self._scheduler.line)} requests wait, at most {self._max_waiting} may"
        return error

    def abort(self, keys: Iterable[int]) -> None:
        """Forget these; unknown keys are ignored. Nothing more is sent for them."""
        for key in keys:
            request = self._requests.pop(key, None)
            if request is not None:
                self._scheduler.drop(request)
                self._outputs.retract(request)
                self._has_news = True

    def control(self, name: str, arguments: dict[str, Any]) -> Any:
        """Answer a call. Raises UserError for a name or argument that it does not know, and what
        `Executor.call` raises."""
        calls: dict[str, Callable[..., Any]] = {
            "ping": lambda: "pong",
            "reset_prefix_cache": self._reset_prefix_cache,
            "shapes": lambda: self._counts.shapes,
            "sleep_state": lambda: self._sleeping.state,
            SLEEP: self._sleep,
            WAKE_UP: self._wake_up,
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

    def _reset_prefix_cache(self) -> bool:
        self._kv.forget_prefixes(self._scheduler.holders)
        return True

    def _sleep(self, level: int = 1, mode: str = "abort") -> str:
        """Give the device's memory back, as hpu.worker.Worker.sleep does: by mode abort at once,
        where requests that are open end with an error; by mode wait when the last of them has
        ended, where none is taken from now on. Gives the state. Raises UserError."""
        if level not in (1, 2):
            raise UserError(f"level is {level}, it must be 1 or 2", param="level")
        if mode not in ("abort", "wait"):
            raise UserError(f"mode is {mode!r}, it must be abort or wait", param="mode")
        self._has_news = True
        self._sleeping.fall(level)
        if mode == "abort" or not self._requests:
            self._fall_asleep()
        return self._sleeping.state

    def _fall_asleep(self) -> None:
        now = self._clock()
        for request in list(self._requests.values()):
            self._scheduler.drop(request)
            self._outputs.finish(request, "error", now, error=SLEEPS, is_late=True)
        self._requests.clear()
        while self._in_flight:
            self._apply(self._executor.collect())
        self._sleeping.begin()
        self._scheduler.start_afresh()
        self._kv.forget_prefixes(())
        self._counts.graphs = self._counts.graph_bytes = self.num_later = 0
        self._has_news = True

    def _wake_up(self, tags: Sequence[str] = ()) -> str:
        """Take requests again, or only take memory again for what the tags name. Gives the state.
        Raises UserError and RequestFailed."""
        self._has_news = True
        ready = self._sleeping.end(tags)
        if ready is not None:
            if not self._table.is_exact:
                self._table.restrict(ready.buckets)
            self._packer.forget()
            self._counts.take_counters(ready.counters)
            self.num_later = ready.num_later
        return self._sleeping.state

    def turn(self) -> list[tuple[int, StepOutput]]:
        """Submit one plan if there is room for it, then collect the oldest if no more fit. A result
        that is there already goes out first.

        Returns what front-ends must hear: one message each, by front-end index.
        """
        if self.num_later:
            self._hear_warmed()
        if self._sleeping.is_falling and not self._requests:
            self._fall_asleep()
        if self._in_flight and self._executor.has_result():
            self._apply(self._executor.collect())
            return self._send()
        if len(self._in_flight) < self._depth:
            decision = self._scheduler.plan(self._step)
            if decision.started or decision.failed:
                self._tell(decision)
            if decision.plan is not None:
                self._executor.submit(decision.plan)
                self._in_flight.append(decision)
                self._step += 1
                if len(self._in_flight) < self._depth:
                    return []
        if self._in_flight:
            self._apply(self._executor.collect())
        elif not self._has_news and self._outputs.is_empty:
            return []
        return self._send()

    def news(self) -> list[tuple[int, StepOutput]]:
        """What front-ends must hear by now, as of `turn`."""
        return self._send() if self._has_news else []

    def _tell(self, decision: SchedulerOutput) -> None:
        now = self._clock()
        for request, num_cached in decision.started:
            self._outputs.start(request, num_cached, now)
        for request, error, param in decision.failed:
            self._outputs.finish(request, "error", now, error=error, param=param)
            del self._requests[request.key]

    def _apply(self, result: StepResult) -> None:
        decision = self._in_flight.popleft()
        assert decision.plan is not None, f"step {decision.step} was never submitted"
        for request in self._outputs.apply(decision, result, self._clock()):
            self._scheduler.drop(request)
            del self._requests[request.key]
        self._mask_next()
        self._scheduler.collected(decision.step)
        phases = [launch.phase for launch in decision.plan.launches]
        self._counts.count_step(decision.num_tokens, phases, result.seconds)
        if result.counters:
            compiled = self._counts.num_compiled
            self._counts.take_counters(result.counters)
            self._tell_compiled(decision, self._counts.num_compiled - compiled)
        self._has_news = True
        if not self._requests and not self._in_flight:
            self._check_idle()

    def _mask_next(self) -> None:
        """Say what may come next in the plan that runs, where it had to wait for the result that
        was just applied: before anything else, since the worker cannot sample until then."""
        running = self._in_flight[0] if self._in_flight else None
        if running is not None and running.late:
            assert running.plan is not None, "only a plan has late rows"
            self._executor.mask(late_masks(running.plan, running.late))

    def _tell_compiled(self, decision: SchedulerOutput, count: int) -> None:
        """Log what a step compiled, and who had to wait for it."""
        if not count:
            return
        assert decision.plan is not None, "a step without a plan compiles nothing"
        shapes = ", ".join(
            f"{PHASES[launch.phase]} {launch.bucket}" for launch in decision.plan.launches
        )
        waited = [*decision.decodes, *(chunk.request for chunk in decision.prefills)]
        names = ", ".join(request.name for request in waited)
        logger.warning(
            "Step %d compiled %d times while serving: %s, for %s",
            decision.step,
            count,
            shapes,
            names or "no request",
        )

    def _send(self) -> list[tuple[int, StepOutput]]:
        self._has_news = False
        if not self._front_ends:
            return []
        return self._outputs.take(self._snapshot(with_samples=True), sorted(self._front_ends))

    def stats(self) -> EngineStats:
        """Gauges and counters now; the samples wait for the next message."""
        return self._snapshot(with_samples=False)

    def _snapshot(self, *, with_samples: bool) -> EngineStats:
        line, pool = self._scheduler.line, self._kv.pool
        return self._counts.snapshot(
            running=self._scheduler.num_running,
            waiting=len(line),
            waiting_prompt_tokens=line.num_tokens,
            blocks_used=pool.size - pool.free,
            blocks_total=pool.size,
            sleep=self._sleeping.state,
            with_samples=with_samples,
        )

    def fail(self, message: str) -> list[tuple[int, StepOutput]]:
        """The executor is gone: end every open request with this error. Plans in flight are
        given up; nothing can be added or turned afterwards."""
        now = self._clock()
        for request in self._requests.values():
            self._outputs.finish(request, "error", now, error=message)
        self._requests.clear()
        return self._send()

    def check_books(self) -> None:
        """Raise AssertionError, with the numbers, unless every block, row and request is accounted
        for: held by someone open, or on its way out."""
        self._scheduler.check()
        if not self._requests and not self._in_flight:
            self._check_idle()

    def _check_idle(self) -> None:
        pool, line = self._kv.pool, self._scheduler.line
        assert pool.free == pool.size, f"{pool.free} of {pool.size} blocks are free when idle"
        assert len(line) == 0, f"{len(line)} requests wait when none is open"
        running = self._scheduler.num_running
        assert running == 0, f"{running} requests run when none is open"


def _blocks_to_lend(config: EngineConfig, ready: WorkerReady, table: BucketTable) -> int:
    """All blocks of the worker; but where decodes read a slice of the cache, and nothing may run
    that is not prepared, only those that lie within the widest prepared decode."""
    may_reject = config.warmup.on_unwarmed_shape == "reject" and not table.is_exact
    if not (ready.contiguous and may_reject):
        return ready.num_blocks
    widest = max((bucket[3] for bucket in table.buckets if bucket[0] == DECODE), default=0)
    return min(ready.num_blocks, widest)

"""RouterClient: EngineClient over several engines; routes each request to an engine."""

import asyncio
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from config.errors import EngineDied, UserError
from config.lora.info import LoRAInfo
from engine.client.base import SingleEngineClient, check_ttft
from engine.client.common_end import FailurePropagation, IndependentEnds
from engine.client.output_queue import RequestOutputQueue
from engine.client.request_limits import NO_LIMITS, RequestLimits
from engine.client.resumption import NoObserver, ResumptionObserver
from engine.client.state import Failure, Pause
from engine.client.ttft import Share
from engine.kv_cache.prefix_hashes import block_hashes
from engine.transport.messages import (
    AWAKE,
    BACKGROUND_WARMUP,
    FALLING_ASLEEP,
    LOAD_ADAPTER,
    SLEEP,
    UNLOAD_ADAPTER,
    WAKE_UP,
    AddRequest,
    EngineStats,
    Progress,
    Ready,
    engine_of,
)
from hpu.protocol import TOKEN_BYTES

BUSY_RATIO = 1.5
BUSY_TOKENS = 2048
"""An engine is clearly busier than another engine if it has more than BUSY_RATIO times as many
outstanding tokens (see `outstanding_tokens`), and over BUSY_TOKENS more in addition to the tokens
that its longer cached prefix saves."""

MAX_BLOCKS = 1024
"""Maximum number of leading prompt blocks to hash; less than a millisecond on the event loop."""
MAX_CACHED_BLOCKS = 65_536
"""Maximum number of block hashes kept for each engine."""

FULL_SHARE = 0.5
"""Share of an engine's KV cache that prompts may fill before a prefix match of less than half of
the prompt loses to an engine whose cache is filled less than half as much. The rest of the cache is
headroom for outputs, which the router cannot see."""

PREFIX, BUSY, ROOM, LOAD = REASONS = ("prefix", "busy", "room", "load")
"""Reasons for choosing an engine. PREFIX: longest cached prefix. BUSY: the engine with the longest
prefix is clearly busier. ROOM: the engine with the longest prefix has only a short match, and its
cache is filled more than FULL_SHARE. LOAD: no engine has cached a prefix; this engine has the
fewest waiting and running tokens (Candidate.outstanding_tokens)."""


class CachedPrefixes:
    """Estimate of an engine's cached blocks, from the prompts that were sent to it. Evicts the
    least recently used block first, like the engine."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        self.capacity = MAX_CACHED_BLOCKS
        """Number of blocks to keep: the size of the engine's cache, at most MAX_CACHED_BLOCKS."""

    def num_cached(self, hashes: Iterable[bytes]) -> int:
        """Number of leading `hashes` that are cached."""
        known, count = self._hashes, 0
        for block_hash in hashes:
            if block_hash not in known:
                break
            count += 1
        return count

    def add(self, hashes: Sequence[bytes]) -> None:
        """Record a prompt with these block hashes that was sent to the engine."""
        known = self._hashes
        # Touch the last block first: a prefix is evicted after the blocks that follow it.
        for block_hash in reversed(hashes):
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > self.capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()

    @property
    def fill(self) -> float:
        """Share of the cache that the recorded blocks take."""
        return len(self._hashes) / self.capacity


@dataclass(frozen=True, slots=True)
class Candidate:
    """State of an engine when a request is routed."""

    cached_tokens: int
    """Tokens of the request's prompt in the engine's prefix cache."""
    outstanding_tokens: int
    """Waiting prompt tokens, and tokens in the KV cache of running requests."""
    num_routed: int = 0
    """Requests routed to the engine so far; breaks ties."""
    fill: float = 0.0
    """CachedPrefixes.fill."""


def choose(candidates: Sequence[Candidate], num_tokens: int = 0) -> tuple[int, str]:
    """Choose the engine for a request of `num_tokens`; returns its index and the reason, from
    REASONS.

    The engine with the longest cached prefix is chosen, unless it is clearly busier than the engine
    with the fewest waiting and running tokens (BUSY_TOKENS), or less than half of the request is
    cached and another engine's cache has much more room (FULL_SHARE). If no engine has a prefix,
    the engine with the fewest waiting and running tokens is chosen.
    """
    indices = range(len(candidates))

    def load(index: int) -> tuple[int, int]:
        return candidates[index].outstanding_tokens, candidates[index].num_routed

    idlest = min(indices, key=load)
    longest = max(candidate.cached_tokens for candidate in candidates)
    if not longest:
        return idlest, LOAD
    nearest = min((i for i in indices if candidates[i].cached_tokens == longest), key=load)
    saved = longest - candidates[idlest].cached_tokens
    busy, idle = candidates[nearest].outstanding_tokens, candidates[idlest].outstanding_tokens
    if busy > BUSY_RATIO * idle and busy - idle > BUSY_TOKENS + saved:
        return idlest, BUSY
    fill = candidates[nearest].fill
    if fill > FULL_SHARE and 2 * longest < num_tokens:
        # Such a prefix is mostly a system prompt. Once every engine has cached it, only the load
        # matters.
        with_room = [i for i in indices if 2 * candidates[i].fill < fill]
        if with_room:
            return min(with_room, key=load), ROOM
    return nearest, PREFIX


class RouterClient:
    """EngineClient for several engines. Belongs to a single asyncio loop.

    All engines must start, except engines that had failed before this client was created. An engine
    that fails later is removed: its requests end with EngineDied, new requests go to the other
    engines, and the router has failed when no engine is left. After `resume`, other engines take
    over the requests of an engine that crashes and is restarted. Coupled engines, which step
    together, end together.
    """

    def __init__(
        self,
        engines: Sequence[SingleEngineClient],
        *,
        prefix_caching: bool = True,
        are_coupled: bool = False,
        max_ttft_s: float = 0.0,
        on_route: Callable[[int, str], None] = lambda engine, reason: None,
    ) -> None:
        """`engines`: in the order of their numbers. `on_route`: called with the engine number of
        each request and the reason, from REASONS."""
        self._engines = tuple(engines)
        self._prefix_caching = prefix_caching
        self._max_ttft_s = max_ttft_s
        self.on_route = on_route
        self._prefixes = [CachedPrefixes() for _ in engines]
        self._num_routed = [0] * len(engines)
        self._ready: Ready | None = None
        self._stats = EngineStats()
        self._observer: ResumptionObserver[SingleEngineClient] = NoObserver()
        self._stats_of: list[EngineStats] = []
        """The stats of the living engines that `_stats` sums; `_stats` is recomputed when they
        change."""
        self._adapters: Mapping[str, LoRAInfo] = {}
        self._adapters_of: list[Mapping[str, LoRAInfo]] = []
        """The adapters of the running engines, from which `_adapters` was made."""
        for engine, prefixes in zip(engines, self._prefixes, strict=True):
            engine.on_prompt(prefixes.add)
            engine.wanted_adapters = partial(self._wanted_adapters, engine)
        self._ends = FailurePropagation(engines) if are_coupled else IndependentEnds()
        self._present = tuple(engine for engine in engines if not engine.has_failed) or engines
        """Engines that had not failed when this client was created; all engines if all had
        failed."""

    @property
    def engines(self) -> Sequence[SingleEngineClient]:
        return self._engines

    @property
    def living(self) -> list[SingleEngineClient]:
        """Engines that have not failed."""
        return [engine for engine in self._engines if not engine.has_failed]

    @property
    def is_restarting(self) -> bool:
        living = self.living
        return bool(living) and all(engine.is_restarting for engine in living)

    @property
    def lost(self) -> Failure | None:
        """Why no engine runs: the failure of the first engine that is being restarted. None while
        an engine runs, or if no engine is being restarted."""
        return self.living[0].lost if self.is_restarting else None

    @property
    def ready(self) -> Ready | None:
        """Ready of the first engine in `_present`, with the shortest max_model_len of these
        engines; None until all of them are ready."""
        if self._ready is None:
            messages = [engine.ready for engine in self._present if engine.ready is not None]
            if len(messages) < len(self._present):
                return None
            max_model_len = min(message.max_model_len for message in messages)
            self._ready = msgspec.structs.replace(messages[0], max_model_len=max_model_len)
            for engine, message in zip(self._present, messages, strict=True):
                capacity = min(message.num_blocks, MAX_CACHED_BLOCKS)
                self._prefixes[engine.engine].capacity = capacity
        return self._ready

    @property
    def progress(self) -> Progress | None:
        """Progress of the first engine that is still starting; after the start, the sum of the
        background warm-up of all engines."""
        known = [engine.progress for engine in self._engines if engine.progress is not None]
        if self.ready is None:
            starting = [engine.progress for engine in self._present if engine.ready is None]
            return next((engine for engine in starting if engine is not None), None)
        later = [engine for engine in known if engine.stage == BACKGROUND_WARMUP]
        if not later:
            return None
        return Progress(
            0,
            BACKGROUND_WARMUP,
            sum(engine.done for engine in later),
            sum(engine.total for engine in later),
        )

    @property
    def failure(self) -> str | None:
        if not self.has_failed:
            return None
        return next(engine.failure for engine in self._present if engine.has_failed)

    @property
    def has_failed(self) -> bool:
        num_failed = sum(engine.has_failed for engine in self._present)
        return num_failed > 0 and (self.ready is None or num_failed == len(self._present))

    @property
    def is_misconfigured(self) -> bool:
        return any(engine.is_misconfigured for engine in self._engines)

    @property
    def has_profile(self) -> bool:
        return any(engine.has_profile for engine in self._engines)

    @property
    def is_failure_logged(self) -> bool:
        return any(engine.is_failure_logged for engine in self._engines)

    @property
    def stats(self) -> EngineStats:
        """Sums over the living engines (see `summed`), recomputed when their stats change."""
        parts = [engine.stats for engine in self.living]
        if not _are_same(parts, self._stats_of):
            self._stats, self._stats_of = summed(parts), parts
        return self._stats

    @property
    def adapters(self) -> Mapping[str, LoRAInfo]:
        """Adapters that every running engine serves. Engines may differ while an adapter is being
        loaded or unloaded. If no engine runs: the adapters of the engine that crashed last.
        Recomputed when the adapters of an engine change."""
        running = self._running
        parts = [engine.adapters for engine in running]
        if not parts or not _are_same(parts, self._adapters_of):
            self._adapters, self._adapters_of = self._common_adapters(running), parts
        return self._adapters

    @property
    def _running(self) -> list[SingleEngineClient]:
        return [engine for engine in self._engines if engine.is_alive]

    def _wanted_adapters(self, restarted: SingleEngineClient) -> Mapping[str, LoRAInfo]:
        """Adapters that `restarted` must serve: `_common_adapters` of the other running engines."""
        return self._common_adapters([e for e in self._running if e is not restarted])

    def _common_adapters(self, running: Sequence[SingleEngineClient]) -> Mapping[str, LoRAInfo]:
        """Adapters that all engines in `running` serve under the same name; if it is empty, the
        adapters of the engine that crashed last."""
        if not running:
            return max(self._engines, key=lambda engine: engine.state.since_s).state.adapters
        first, *others = [engine.adapters for engine in running]
        if not others:
            return first
        return {
            name: info
            for name, info in first.items()
            if all(name in other and other[name].content == info.content for other in others)
        }

    def resume(self, observer: ResumptionObserver[SingleEngineClient]) -> None:
        """Resume requests of a crashed engine on another engine at once; if no engine runs, on the
        first engine that is restarted. `observer` is notified."""
        self._observer = observer
        for engine in self._engines:
            engine.resume(self)

    def engine_lost(self, client: SingleEngineClient, *, has_poison: bool) -> None:
        """Notify the observer, and resume the requests of `client` on other engines. If no other
        engine runs, the requests stay with `client`."""
        self._observer.engine_lost(client, has_poison=has_poison)
        self._prefixes[client.engine].clear()
        for queue in client.queues:
            self._hand_over(client, queue)

    def engine_restored(self, client: SingleEngineClient, pause: Pause) -> None:
        """Notify the observer, and move the requests of engines that are still being restarted to a
        running engine."""
        for other in self._engines:
            if other.is_restarting and not other.is_crash_pending:
                for queue in other.queues:
                    self._hand_over(other, queue)
        self._observer.engine_restored(client, pause)

    def _hand_over(self, client: SingleEngineClient, queue: RequestOutputQueue) -> None:
        message = queue.message
        assert message is not None, f"request {queue.key} cannot be resumed"
        engine, _, hashes = self._route(message, queue.share)
        if engine.is_alive:
            engine.adopt(client, [queue])
            self._prefixes[engine.engine].add(hashes)

    async def start(self) -> None:
        for engine in self._engines:
            await engine.start()

    async def close(self) -> None:
        self._ends.end(Failure("the client was closed"))
        for engine in self._engines:
            await engine.close()

    async def wait_ready(self) -> Ready:
        """Wait until all engines are ready. Raises EngineDied or ConfigError if an engine fails,
        and ProfileWritten at the end of a profile run."""
        waiting = [asyncio.ensure_future(engine.wait_ready()) for engine in self._present]
        try:
            await asyncio.gather(*waiting)
        finally:
            for waiter in waiting:
                waiter.cancel()
        ready = self.ready
        assert ready is not None, "an engine has no Ready after it was waited for"
        return ready

    def add(
        self, request: AddRequest, request_limits: RequestLimits = NO_LIMITS
    ) -> RequestOutputQueue:
        """Like SingleEngineClient.add, on the engine that `choose` selects."""
        engine, reason, hashes = self._route(request, (request.priority, request_limits.tenant))
        queue = engine.add(request, request_limits)
        self._prefixes[engine.engine].add(hashes)
        self._num_routed[engine.engine] += 1
        self.on_route(engine.engine, reason)
        return queue

    def abort(self, keys: list[int]) -> None:
        """Like SingleEngineClient.abort; each key goes to its engine."""
        for number in {engine_of(key) for key in keys}:
            self._engines[number].abort([key for key in keys if engine_of(key) == number])

    async def control(self, name: str, **arguments: Any) -> Any:
        """Like SingleEngineClient.control, on all running engines; returns the `combined` answers.
        Waits for all engines, then raises the first error; the death of an engine is no error if
        another engine has answered. LOAD_ADAPTER and UNLOAD_ADAPTER also call the engines whose
        restart ends meanwhile; UNLOAD_ADAPTER succeeds if an engine had the adapter."""
        called: list[SingleEngineClient] = []
        answers: list[object] = []
        while engines := self._uncalled(called):
            called += engines
            calls = (engine.control(name, **arguments) for engine in engines)
            answers += await asyncio.gather(*calls, return_exceptions=True)
            if name not in (LOAD_ADAPTER, UNLOAD_ADAPTER):
                break
        values = [answer for answer in answers if not isinstance(answer, BaseException)]
        for engine, answer in zip(called, answers, strict=True):
            # An engine that died during the call is ignored if another engine has answered.
            has_died = isinstance(answer, EngineDied) or not engine.is_alive
            has_none = name == UNLOAD_ADAPTER and isinstance(answer, UserError)
            if isinstance(answer, BaseException) and not (values and (has_died or has_none)):
                raise answer
        if name in ("reset_prefix_cache", SLEEP):
            for prefixes in self._prefixes:
                prefixes.clear()
        return combined(name, values)

    def _uncalled(self, called: Sequence[SingleEngineClient]) -> list[SingleEngineClient]:
        """Engines that a control must call after the engines in `called`."""
        if called:
            return [engine for engine in self._running if engine not in called]
        return self._running or self.living or list(self._engines)

    def fail(self, message: str, *, is_config: bool = False) -> None:
        """Report that all engines have ended."""
        self._ends.end(Failure(message, is_config))
        for engine in self._engines:
            engine.fail(message, is_config=is_config)

    def check_ttft(self, num_tokens: int, *, priority: int, request_limits: RequestLimits) -> None:
        """Like SingleEngineClient.check_ttft, with the smallest expected time of all engines."""
        share, engines = (priority, request_limits.tenant), self._routable
        check_ttft(
            min((engine.ttft_s(num_tokens, share) for engine in engines), default=0.0),
            self._max_ttft_s,
        )

    @property
    def _routable(self) -> list[SingleEngineClient]:
        """Engines that new requests may go to."""
        running = self._running or self.living
        return [engine for engine in running if engine.stats.sleep == AWAKE] or running

    def _route(
        self, request: AddRequest, share: Share
    ) -> tuple[SingleEngineClient, str, list[bytes]]:
        """The engine for a request, the reason, and the block hashes of the prompt. An engine whose
        expected time to first token exceeds --max-ttft is chosen only if all engines exceed it."""
        ready = self.ready
        engines = self._routable
        num_tokens = request.prompt.nbytes // TOKEN_BYTES
        if self._max_ttft_s:
            engines = [
                engine for engine in engines if engine.ttft_s(num_tokens, share) <= self._max_ttft_s
            ] or engines
        if ready is None or not engines:
            # No engine accepts requests: `add` of the returned engine raises the error.
            starting = (engine for engine in self._present if engine.ready is None)
            return next(starting, self._engines[0]), LOAD, []
        hashes: list[bytes] = []
        if self._prefix_caching:
            end = MAX_BLOCKS * ready.block_size * TOKEN_BYTES
            hashes = block_hashes(
                request.prompt[:end],
                ready.block_size,
                request.cache_salt,
                request.adapter,
                request.images,
                all_see_images=ready.request_tiles > 0,
            )
        candidates = [
            Candidate(
                self._prefixes[engine.engine].num_cached(hashes) * ready.block_size,
                outstanding_tokens(engine, ready.block_size),
                self._num_routed[engine.engine],
                self._prefixes[engine.engine].fill,
            )
            for engine in engines
        ]
        index, reason = choose(candidates, num_tokens)
        return engines[index], reason, hashes


def _are_same(parts: Sequence[object], others: Sequence[object]) -> bool:
    """Whether both sequences hold the same objects, compared by identity."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def outstanding_tokens(engine: SingleEngineClient, block_size: int) -> int:
    """Prompt tokens that wait for `engine`, and tokens in the KV cache of its running requests.

    The engine reports its waiting tokens over all front ends with each step. The report may lack
    tokens that this front end has sent since, so the larger count is used.
    """
    stats = engine.stats
    waiting = max(stats.waiting_prompt_tokens, engine.num_waiting_tokens)
    return waiting + stats.blocks_used * block_size


def summed(parts: Sequence[EngineStats]) -> EngineStats:
    """Sums of the integer fields and, by key, of the dict fields; the sleep state is
    `combined_sleep`. The other fields keep their defaults."""
    total = EngineStats(sleep=combined_sleep([part.sleep for part in parts] or [AWAKE]))
    for part in parts:
        for name in EngineStats.__struct_fields__:
            value = getattr(part, name)
            if isinstance(value, int):
                setattr(total, name, getattr(total, name) + value)
            elif isinstance(value, dict):
                sums = getattr(total, name)
                for key, count in value.items():
                    sums[key] = sums.get(key, 0) + count
    return total


def combined_sleep(states: Sequence[str]) -> str:
    """AWAKE if any engine is awake, else FALLING_ASLEEP if any engine is, else the first engine's
    state."""
    for state in (AWAKE, FALLING_ASLEEP):
        if state in states:
            return state
    return states[0]


def combined(name: str, values: Sequence[Any]) -> Any:
    """Combine the answers of several engines to control `name`: sums of launch shapes,
    `combined_sleep` of sleep states; otherwise the common answer if all answers are equal, else the
    list of answers."""
    if name == "shapes":
        return _summed_shapes(values)
    if name in (SLEEP, WAKE_UP, "sleep_state"):
        return combined_sleep(values)
    return values[0] if all(value == values[0] for value in values) else list(values)


def _summed_shapes(reports: Iterable[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Sums of StepStats.shapes over several engines: entries with equal (phase, batch, query,
    blocks) are added."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for report in reports:
        for shape in report:
            key = tuple(shape[:4])
            counts = sums.get(key, [0] * len(shape[4:]))
            sums[key] = [mine + other for mine, other in zip(counts, shape[4:], strict=True)]
    return [[*key, *counts] for key, counts in sums.items()]

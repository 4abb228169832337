"""RouterClient: an EngineClient of several engines, which chooses the engine of each request."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from config.errors import EngineDied
from config.lora.info import LoRAInfo
from engine.client.base import (
    Failure,
    Pause,
    ResumptionObserver,
    SingleEngineClient,
    check_ttft,
)
from engine.client.common_end import CommonEnd
from engine.client.output_queue import RequestOutputQueue
from engine.client.terms import NO_TERMS, RequestTerms
from engine.client.ttft import Share
from engine.kv_cache.prefix_hashes import block_hashes
from engine.transport.messages import (
    AWAKE,
    FALLING_ASLEEP,
    LATER,
    SLEEP,
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
"""An engine is clearly busier than another if it has more than BUSY_RATIO times as many tokens in
hand, and at least BUSY_TOKENS more beyond the tokens that its longer cached prefix saves."""

MAX_BLOCKS = 1024
"""Leading blocks of a prompt that are hashed, on the event loop: less than a millisecond."""
MAX_CACHED_BLOCKS = 65_536
"""Hashes kept for each engine, if it has more blocks."""

FULL_SHARE = 0.5
"""A request of which less than half is cached does not go to an engine whose cache is filled beyond
this share by prompts, if another's is filled less than half as much: the rest of the share is for
outputs, of which the router knows nothing."""

PREFIX, BUSY, ROOM, LOAD = REASONS = ("prefix", "busy", "room", "load")
"""Why an engine was chosen: it has the longest cached prefix; the one that has it is clearly
busier; the one that has a short one has a full cache, and this one has room; no engine has a
prefix, and this one has the fewest tokens in hand."""


class CachedPrefixes:
    """Which blocks an engine has cached, estimated from the prompts that it was sent: the least
    recently used are forgotten first, as in the engine."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        self.capacity = MAX_CACHED_BLOCKS
        """Blocks of the engine's cache."""

    def num_cached(self, hashes: Iterable[bytes]) -> int:
        """How many of the leading `hashes` are cached."""
        known, count = self._hashes, 0
        for block_hash in hashes:
            if block_hash not in known:
                break
            count += 1
        return count

    def add(self, hashes: Sequence[bytes]) -> None:
        """The engine was sent a prompt with these block hashes."""
        known = self._hashes
        # The tail first: a prefix is evicted after what follows it.
        for block_hash in reversed(hashes):
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > self.capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()

    @property
    def fill(self) -> float:
        """The share of the cache that the known blocks take."""
        return len(self._hashes) / self.capacity


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of an engine when a request is routed."""

    cached_tokens: int
    """Of the request's prompt."""
    tokens_in_hand: int
    """Prompt tokens that wait, and tokens in the KV cache of running requests."""
    num_routed: int = 0
    """Requests that it was sent before."""
    fill: float = 0.0
    """CachedPrefixes.fill."""


def choose(candidates: Sequence[Candidate], num_tokens: int = 0) -> tuple[int, str]:
    """The index of the engine that gets a request of `num_tokens`, and which of REASONS it was.
    That is the one with the longest cached prefix, unless it is clearly busier than the one with
    the fewest tokens in hand, or its cache is full and that of another has room."""
    indices = range(len(candidates))

    def load(index: int) -> tuple[int, int]:
        return candidates[index].tokens_in_hand, candidates[index].num_routed

    idlest = min(indices, key=load)
    longest = max(candidate.cached_tokens for candidate in candidates)
    if not longest:
        return idlest, LOAD
    nearest = min((i for i in indices if candidates[i].cached_tokens == longest), key=load)
    saved = longest - candidates[idlest].cached_tokens
    busy, idle = candidates[nearest].tokens_in_hand, candidates[idlest].tokens_in_hand
    if busy > BUSY_RATIO * idle and busy - idle > BUSY_TOKENS + saved:
        return idlest, BUSY
    fill = candidates[nearest].fill
    if fill > FULL_SHARE and 2 * longest < num_tokens:
        # Such a prefix is mostly a system prompt: once each engine has it, only the load counts.
        with_room = [i for i in indices if 2 * candidates[i].fill < fill]
        if with_room:
            return min(with_room, key=load), ROOM
    return nearest, PREFIX


class RouterClient:
    """One EngineClient for several engines. Belongs to one asyncio loop.

    All engines must start, but for those that have failed before. One that dies later is taken out:
    its requests end with EngineDied, new ones go to the others; the router has failed when none is
    left. Coupled engines, which step together, end together.
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
        """`engines` are in the order of their numbers. `on_route` is called with the engine of each
        request and with one of REASONS."""
        self._engines = tuple(engines)
        self._prefix_caching = prefix_caching
        self._max_ttft_s = max_ttft_s
        self.on_route = on_route
        self._prefixes = [CachedPrefixes() for _ in engines]
        self._num_routed = [0] * len(engines)
        self._ready: Ready | None = None
        self._stats = EngineStats()
        self._observer: ResumptionObserver | None = None
        self._stats_of: list[EngineStats] = []
        """What `_stats` is the sum of."""
        for engine, prefixes in zip(engines, self._prefixes, strict=True):
            engine.on_prompt(prefixes.add)
        self._common_end = CommonEnd(engines) if are_coupled else None
        self._present = tuple(engine for engine in engines if engine.failure is None) or engines
        """Without those that had died, while others ran, before this client existed."""

    @property
    def engines(self) -> Sequence[SingleEngineClient]:
        return self._engines

    @property
    def living(self) -> list[SingleEngineClient]:
        """The engines that have not failed."""
        return [engine for engine in self._engines if engine.failure is None]

    @property
    def lost(self) -> Failure | None:
        """Why the last engine that ran has died; None while one runs, or none is started anew."""
        living = self.living
        if any(engine.lost is None for engine in living):
            return None
        return next((engine.lost for engine in living), None)

    @property
    def ready(self) -> Ready | None:
        """That of the first engine, with the shortest context of all; None until all are ready."""
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
        """That of the first engine that is still starting; after the start, of all together."""
        known = [engine.progress for engine in self._engines if engine.progress is not None]
        if self.ready is None:
            starting = [engine.progress for engine in self._present if engine.ready is None]
            return next((one for one in starting if one is not None), None)
        later = [one for one in known if one.stage == LATER]
        if not later:
            return None
        return Progress(0, LATER, sum(one.done for one in later), sum(one.total for one in later))

    @property
    def failure(self) -> str | None:
        failures = [engine.failure for engine in self._present if engine.failure is not None]
        if not failures or (self.ready is not None and len(failures) < len(self._present)):
            return None
        return failures[0]

    @property
    def is_misconfigured(self) -> bool:
        return any(engine.is_misconfigured for engine in self._engines)

    @property
    def is_failure_logged(self) -> bool:
        return any(engine.is_failure_logged for engine in self._engines)

    @property
    def stats(self) -> EngineStats:
        """Sums over the living engines. They are awake if one of them is."""
        parts = [engine.stats for engine in self.living]
        if len(parts) != len(self._stats_of) or any(
            part is not before for part, before in zip(parts, self._stats_of, strict=True)
        ):
            self._stats, self._stats_of = summed(parts), parts
        return self._stats

    @property
    def adapters(self) -> Mapping[str, LoRAInfo]:
        """Those of the living engines, which all serve the same; while one is told of a change,
        those that each of them serves."""
        first, *others = [engine.adapters for engine in self.living] or [{}]
        if not others:
            return first
        return {
            name: info
            for name, info in first.items()
            if all(name in one and one[name].content == info.content for one in others)
        }

    def resume(self, observer: ResumptionObserver) -> None:
        """Requests of an engine that dies go on in another one, at once; if none is left, when an
        engine was started anew. Tells `observer`."""
        self._observer = observer
        for engine in self._engines:
            engine.resume(self)

    def engine_lost(self, client: SingleEngineClient, *, has_poison: bool) -> None:
        """Its requests go on in other engines."""
        assert self._observer is not None
        self._observer.engine_lost(client, has_poison=has_poison)
        self._prefixes[client.engine].clear()
        for queue in client.queues:
            self._hand_over(client, queue)

    def engine_restored(self, client: SingleEngineClient, pause: Pause) -> None:
        """It takes requests again, also those of engines that are still being restarted."""
        assert self._observer is not None
        for other in self._engines:
            if other.lost is not None and not other.awaits_verdict:
                for queue in other.queues:
                    self._hand_over(other, queue)
        self._observer.engine_restored(client, pause)

    def _hand_over(self, client: SingleEngineClient, queue: RequestOutputQueue) -> None:
        message = queue.message
        assert message is not None, f"request {queue.key} cannot be resumed"
        engine, _, hashes = self._route(message, queue.share)
        if engine.lost is None and engine.failure is None:
            engine.adopt(client, [queue])
            self._prefixes[engine.engine].add(hashes)

    async def start(self) -> None:
        for engine in self._engines:
            await engine.start()

    async def close(self) -> None:
        if self._common_end is not None:
            self._common_end.end(Failure("the client was closed"))
        for engine in self._engines:
            await engine.close()

    async def wait_ready(self) -> Ready:
        """Wait until all engines are ready. Raises EngineDied or ConfigError when the first of them
        fails."""
        waiting = [asyncio.ensure_future(engine.wait_ready()) for engine in self._present]
        try:
            await asyncio.gather(*waiting)
        finally:
            for one in waiting:
                one.cancel()
        ready = self.ready
        assert ready is not None, "an engine has no Ready after it was waited for"
        return ready

    def add(self, request: AddRequest, terms: RequestTerms = NO_TERMS) -> RequestOutputQueue:
        """Like SingleEngineClient.add, for the engine that fits best."""
        engine, reason, hashes = self._route(request, (request.priority, terms.tenant))
        queue = engine.add(request, terms)
        self._prefixes[engine.engine].add(hashes)
        self._num_routed[engine.engine] += 1
        self.on_route(engine.engine, reason)
        return queue

    def abort(self, keys: list[int]) -> None:
        """Like SingleEngineClient.abort; each key goes to its engine."""
        for number in {engine_of(key) for key in keys}:
            self._engines[number].abort([key for key in keys if engine_of(key) == number])

    async def control(self, name: str, **arguments: Any) -> Any:
        """Like SingleEngineClient.control, for all living engines: `combined` of their answers.
        Raises the first error, once all have answered."""
        living = [one for one in self.living if one.lost is None]
        living = living or self.living or list(self._engines)
        calls = (engine.control(name, **arguments) for engine in living)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        values = [one for one in answers if not isinstance(one, BaseException)]
        for error in answers:
            # The others have done what one that died no longer has to.
            if isinstance(error, BaseException) and not (values and isinstance(error, EngineDied)):
                raise error
        if name in ("reset_prefix_cache", SLEEP):
            for prefixes in self._prefixes:
                prefixes.clear()
        return combined(name, values)

    def fail(self, message: str, *, is_config: bool = False) -> None:
        """All engines are gone."""
        if self._common_end is not None:
            self._common_end.end(Failure(message, is_config))
        for engine in self._engines:
            engine.fail(message, is_config=is_config)

    def check_ttft(self, num_tokens: int, *, priority: int, terms: RequestTerms) -> None:
        """Like SingleEngineClient.check_ttft, of the engine that is the first to be expected."""
        share, engines = (priority, terms.tenant), self._routable
        check_ttft(
            min((one.ttft_s(num_tokens, share) for one in engines), default=0.0), self._max_ttft_s
        )

    @property
    def _routable(self) -> list[SingleEngineClient]:
        """The engines that new requests may go to."""
        running = [one for one in self.living if one.lost is None] or self.living
        return [one for one in running if one.stats.sleep == AWAKE] or running

    def _route(
        self, request: AddRequest, share: Share
    ) -> tuple[SingleEngineClient, str, list[bytes]]:
        """The engine for a request, the reason, and the hashes of the prompt's blocks. An engine
        that is expected to be too slow for --max-ttft is chosen only if all are."""
        ready = self.ready
        engines = self._routable
        num_tokens = request.prompt.nbytes // TOKEN_BYTES
        if self._max_ttft_s:
            engines = [
                one for one in engines if one.ttft_s(num_tokens, share) <= self._max_ttft_s
            ] or engines
        if ready is None or not engines:
            # Its `add` raises.
            starting = (one for one in self._present if one.ready is None)
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
                self._prefixes[one.engine].num_cached(hashes) * ready.block_size,
                tokens_in_hand(one, ready.block_size),
                self._num_routed[one.engine],
                self._prefixes[one.engine].fill,
            )
            for one in engines
        ]
        index, reason = choose(candidates, num_tokens)
        return engines[index], reason, hashes


def tokens_in_hand(engine: SingleEngineClient, block_size: int) -> int:
    """Prompt tokens that wait for `engine`, and tokens in the KV cache of its running requests.

    The engine reports what waits in it, from all front ends, with each step; what this front end
    has sent since then it knows itself.
    """
    stats = engine.stats
    waiting = max(stats.waiting_prompt_tokens, engine.num_waiting_tokens)
    return waiting + stats.blocks_used * block_size


def summed(parts: Sequence[EngineStats]) -> EngineStats:
    """Gauges and counters summed, without samples."""
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
    """Awake if one engine is, else falling asleep if one does, else asleep as the first is."""
    for state in (AWAKE, FALLING_ASLEEP):
        if state in states:
            return state
    return states[0]


def combined(name: str, values: Sequence[Any]) -> Any:
    """The answer to control `name` from the answers of several engines: of launch shapes the sums,
    of sleep states `combined_sleep`, else the one answer that all gave, or the list of them."""
    if name == "shapes":
        return _summed_shapes(values)
    if name in (SLEEP, WAKE_UP, "sleep_state"):
        return combined_sleep(values)
    return values[0] if all(value == values[0] for value in values) else list(values)


def _summed_shapes(reports: Iterable[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """StepStats.shapes of several engines: the counts behind (phase, batch, query, blocks) added
    up."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for report in reports:
        for shape in report:
            key = tuple(shape[:4])
            counts = sums.get(key, [0] * len(shape[4:]))
            sums[key] = [mine + other for mine, other in zip(counts, shape[4:], strict=True)]
    return [[*key, *counts] for key, counts in sums.items()]

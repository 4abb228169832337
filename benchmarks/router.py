"""Prefix hits of several engines behind the router, compared with a single engine that has all of
the cache.

    python benchmarks/router.py
    python benchmarks/router.py --engines 8 --conversations 2000 --seed 3

Real routers, clients and engine cores, with a device that computes nothing, in simulated time: each
engine takes one step a tick. Conversations begin at random; each turn sends all of the conversation
so far and a new message, after a random pause. Prints, for the router, for round robin
and for a single large engine: the share of prompt tokens that were found in a prefix cache, and how
evenly the requests were spread.
"""

import argparse
import heapq
import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.null_device import NullDevice
from config.buckets import BucketConfig
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.params.sampling import SamplingParams
from engine.client.base import EngineClient, SingleEngineClient
from engine.client.output_queue import RequestOutputQueue
from engine.client.queue_limits import QueueLimits
from engine.client.request_limits import NO_LIMITS, RequestLimits
from engine.client.router import RouterClient
from engine.core.build import build_core
from engine.core.loop import make_ready, make_table
from engine.kv_cache.prefix_hashes import block_hashes
from engine.transport.messages import UNSENT, AddRequest, ToEngine, engine_of

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000


@dataclass(frozen=True)
class Traffic:
    """Chats: lengths in tokens, times in ticks."""

    num_conversations: int = 400
    between_arrivals: float = 4.0
    num_turns: tuple[int, int] = (2, 10)
    system_tokens: tuple[int, ...] = (64, 256)
    """Lengths of the system prompts, which conversations use in turn."""
    message_tokens: tuple[int, int] = (10, 200)
    answer_tokens: tuple[int, int] = (10, 120)
    think_ticks: tuple[int, int] = (20, 300)


@dataclass
class Result:
    """Results of a simulation."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ticks: int = 0
    requests: Counter[int] = field(default_factory=Counter)
    """Number of requests by engine."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """Requests of the busiest engine, divided by the mean of the engines that got any."""
        counts = self.requests.values()
        return max(counts) * len(counts) / sum(counts)


class CoreClient(SingleEngineClient):
    """Client of an engine core that a simulation steps."""

    def __init__(
        self, config: EngineConfig, limits: QueueLimits, clock: Callable[[], float], engine: int
    ) -> None:
        super().__init__(0, limits, engine=engine)
        device = NullDevice(config)
        worker = device.start(lambda progress: None)
        self._core = build_core(config, device, worker, make_table(config, worker), clock)
        self._core.add_front_end(0)
        self._receive(make_ready(engine, worker, config))

    def _send(self, message: ToEngine) -> bool:
        assert isinstance(message, AddRequest), "a simulation only adds requests"
        hashes = block_hashes(message.prompt, BLOCK_SIZE, message.cache_salt)
        self._core.add_request(message, hashes)
        return True

    def step(self) -> None:
        """One step, whose result arrives at once."""
        if self._core.has_work:
            for _, output in self._core.step():
                self._receive(output)


class RoundRobin(RouterClient):
    """Sends requests to the engines in turn."""

    def add(
        self, request: AddRequest, request_limits: RequestLimits = NO_LIMITS
    ) -> RequestOutputQueue:
        self._turn = getattr(self, "_turn", -1) + 1
        return self.engines[self._turn % len(self.engines)].add(request, request_limits)


def engine_config(num_blocks: int, max_num_seqs: int) -> EngineConfig:
    """Settings of an engine with `num_blocks` blocks and `max_num_seqs` sequences."""
    return EngineConfig(
        model="none",
        max_model_len=8192,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=64 * max_num_seqs
        ),
        buckets=BucketConfig(strategy="exponential"),
    )


class Simulation:
    """Simulation of conversations with a client, tick by tick."""

    def __init__(
        self,
        engines: Sequence[CoreClient],
        client: EngineClient,
        traffic: Traffic,
        seed: int,
    ) -> None:
        self._engines = engines
        self._client = client
        self._traffic = traffic
        self._random = random.Random(seed)
        self._systems = [self._tokens(length) for length in traffic.system_tokens]
        self._due: list[tuple[float, int, Conversation]] = []
        self.result = Result()

    def run(self) -> Result:
        """Run until the last conversation has ended."""
        at = 0.0
        for number in range(self._traffic.num_conversations):
            at += self._random.expovariate(1 / self._traffic.between_arrivals)
            system = self._systems[number % len(self._systems)]
            turns = self._random.randint(*self._traffic.num_turns)
            # Each conversation has its own generator, so that its numbers do not depend on the
            # order of events.
            own = random.Random(self._random.getrandbits(64))
            heapq.heappush(self._due, (at, number, Conversation(array("I", system), turns, own)))
        open_requests: dict[int, tuple[int, Conversation, RequestOutputQueue]] = {}
        while self._due or open_requests:
            while self._due and self._due[0][0] <= self.result.ticks:
                _, number, conversation = heapq.heappop(self._due)
                open_requests[number] = (number, conversation, self._send(conversation))
            for engine in self._engines:
                engine.step()
            for number, conversation, queue in list(open_requests.values()):
                if self._has_ended(conversation, queue):
                    del open_requests[number]
                    if conversation.turns_left:
                        think = conversation.random.randint(*self._traffic.think_ticks)
                        due = (self.result.ticks + think, number, conversation)
                        heapq.heappush(self._due, due)
            self.result.ticks += 1
        return self.result

    def _send(self, conversation: "Conversation") -> RequestOutputQueue:
        own, traffic = conversation.random, self._traffic
        conversation.tokens.extend(self._tokens(own.randint(*traffic.message_tokens), own))
        conversation.turns_left -= 1
        params = SamplingParams(max_tokens=own.randint(*traffic.answer_tokens), ignore_eos=True)
        queue = self._client.add(
            AddRequest(UNSENT, memoryview(conversation.tokens.tobytes()), params)
        )
        self.result.prompt_tokens += len(conversation.tokens)
        self.result.requests[engine_of(queue.key)] += 1
        return queue

    def _has_ended(self, conversation: "Conversation", queue: RequestOutputQueue) -> bool:
        """Take the request's new tokens and return whether it has ended."""
        # The update that `get` would return, without awaiting it.
        update, queue._update = queue._update, None
        if update is None:
            return False
        self.result.cached_tokens += update.num_cached_tokens or 0
        conversation.tokens.extend(update.tokens)
        assert update.finish is None or update.finish.reason == "length", update.finish
        return update.finish is not None

    def _tokens(self, count: int, numbers: random.Random | None = None) -> "array[int]":
        draw = numbers or self._random
        return array("I", (draw.randrange(VOCAB_SIZE) for _ in range(count)))


@dataclass
class Conversation:
    """State of a chat: its tokens, remaining turns and random generator."""

    tokens: "array[int]"
    turns_left: int
    random: random.Random


def simulate(
    num_engines: int,
    num_blocks: int,
    traffic: Traffic,
    *,
    seed: int = 0,
    max_num_seqs: int = 32,
    router: type[RouterClient] = RouterClient,
) -> Result:
    """Result of `traffic` on engines that together have `num_blocks` blocks and run `max_num_seqs`
    sequences each."""
    limits = QueueLimits(max_requests=2**31, max_prompt_tokens=2**62)
    config = engine_config(num_blocks // num_engines, max_num_seqs)
    engines = [CoreClient(config, limits, lambda: 0.0, number) for number in range(num_engines)]
    client: EngineClient = engines[0] if num_engines == 1 else router(engines)
    return Simulation(engines, client, traffic, seed).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument(
        "--blocks", type=int, default=8000, help="number of KV blocks of all engines"
    )
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    traffic = Traffic(num_conversations=given.conversations)
    print("| engines | hit rate | of the large engine's | most requests over mean | ticks |")
    print("| --- | ---: | ---: | ---: | ---: |")
    large = simulate(1, given.blocks, traffic, seed=given.seed, max_num_seqs=32 * given.engines)
    for name, router in (("router", RouterClient), ("round robin", RoundRobin)):
        found = simulate(given.engines, given.blocks, traffic, seed=given.seed, router=router)
        print(
            f"| {given.engines}, {name} | {found.hit_rate:.1%} | "
            f"{found.hit_rate / large.hit_rate:.1%} | {found.imbalance:.2f} | {found.ticks} |"
        )
    print(f"| 1 large | {large.hit_rate:.1%} | 100.0% | 1.00 | {large.ticks} |")


if __name__ == "__main__":
    main()

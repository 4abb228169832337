"""RouterClient: choice of the engine, combined reports of engines, and engine crashes."""

import asyncio
from typing import Any

import msgspec
import pytest
from engine_rig import asking, prompt_of, request_of
from scripted_client import ready as ready_message
from waits import until

from benchmarks.router import RoundRobin, Traffic, simulate
from config.errors import ConfigError, EngineDied, Overloaded, UserError
from config.lora.info import LoRAInfo
from engine.client.base import CAUSE_GRACE_S, SingleEngineClient
from engine.client.queue_limits import QueueLimits
from engine.client.router import (
    BUSY,
    BUSY_RATIO,
    BUSY_TOKENS,
    FULL_SHARE,
    LOAD,
    PREFIX,
    ROOM,
    CachedPrefixes,
    Candidate,
    RouterClient,
    choose,
    combined,
)
from engine.client.state import Failure, Pause
from engine.kv_cache.prefix_hashes import block_hashes
from engine.process.child_process import ProcessEnd
from engine.transport.messages import (
    ASLEEP,
    AWAKE,
    BACKGROUND_WARMUP,
    FALLING_ASLEEP,
    LOAD_ADAPTER,
    SLEEP,
    UNLOAD_ADAPTER,
    Abort,
    Adapters,
    AddRequest,
    Control,
    EngineStats,
    Failed,
    Finish,
    Progress,
    PromptBlocks,
    Reply,
    StepOutput,
    ToEngine,
    engine_of,
)

BLOCK = 16


class FakeEngine(SingleEngineClient):
    """Stores the received messages; a test sends the engine's answers with `says`."""

    def __init__(self, engine: int, limits: QueueLimits, front_end: int = 0) -> None:
        super().__init__(front_end, limits, engine=engine)
        self.sent: list[ToEngine] = []
        self.says = self._receive
        self.answers: dict[str, Reply] = {}

    async def start(self) -> None:
        self.says(msgspec.structs.replace(ready_message(), engine=self.engine))

    async def close(self) -> None:
        self.fail("closed")

    def _send(self, message: ToEngine) -> bool:
        self.sent.append(message)
        if isinstance(message, Control):
            reply = self.answers.get(message.name, Reply(0))
            self.says(msgspec.structs.replace(reply, call=message.call))
        return True

    @property
    def added(self) -> list[AddRequest]:
        return [message for message in self.sent if isinstance(message, AddRequest)]

    def reports(self, **gauges: Any) -> None:
        self.says(StepOutput(1, stats=EngineStats(**gauges)))


async def started(count: int = 2, **options: Any) -> tuple[RouterClient, list[FakeEngine]]:
    limits = QueueLimits(max_requests=100, max_prompt_tokens=1_000_000)
    engines = [FakeEngine(engine, limits) for engine in range(count)]
    router = RouterClient(engines, **options)
    await router.start()
    await router.wait_ready()
    return router, engines


def chat(number: int, num_tokens: int) -> bytes:
    return prompt_of(*([number] * num_tokens))


def test_the_engine_with_the_longest_cached_prefix_is_chosen() -> None:
    candidates = [Candidate(0, 0), Candidate(32, 900), Candidate(16, 0)]

    assert choose(candidates) == (1, PREFIX)


def test_without_a_prefix_the_engine_with_the_fewest_tokens_then_requests_is_chosen() -> None:
    assert choose([Candidate(0, 9), Candidate(0, 3), Candidate(0, 5)]) == (1, LOAD)
    assert choose([Candidate(0, 3, 7), Candidate(0, 3, 6)]) == (1, LOAD)


@pytest.mark.parametrize(
    ("busy", "idle", "saved", "expected"),
    [
        # Both numbers must be exceeded.
        (BUSY_TOKENS + 2, 0, 1, BUSY),
        (BUSY_TOKENS + 1, 0, 1, PREFIX),
        (int(BUSY_RATIO * 100_000) + 1, 100_000, 1, BUSY),
        (int(BUSY_RATIO * 100_000), 100_000, 1, PREFIX),
        # The saved prefix is worth the wait.
        (BUSY_TOKENS + 2000, 0, 2000, PREFIX),
        (BUSY_TOKENS + 2001, 0, 2000, BUSY),
    ],
)
def test_a_clearly_busier_engine_loses_a_request_whose_prefix_it_has(
    busy: int, idle: int, saved: int, expected: str
) -> None:
    candidates = [Candidate(100 + saved, busy), Candidate(100, idle)]

    assert choose(candidates) == ((0, PREFIX) if expected == PREFIX else (1, BUSY))


def test_a_short_cached_prefix_does_not_outweigh_a_full_cache() -> None:
    def chosen(cached: int, fill: float, others: float) -> tuple[int, str]:
        candidates = [Candidate(cached, 0, fill=fill), Candidate(0, 10, fill=others)]
        return choose(candidates, num_tokens=100)

    assert chosen(49, FULL_SHARE + 0.1, 0.2) == (1, ROOM)
    assert chosen(50, FULL_SHARE + 0.1, 0.2) == (0, PREFIX)
    assert chosen(49, FULL_SHARE, 0.2) == (0, PREFIX)
    assert chosen(49, FULL_SHARE + 0.1, 0.3) == (0, PREFIX)


def test_the_less_loaded_of_two_engines_with_the_prefix_gets_the_request() -> None:
    assert choose([Candidate(32, 50), Candidate(32, 40), Candidate(0, 0)]) == (1, PREFIX)


def test_the_tail_of_a_prompt_is_forgotten_before_its_prefix() -> None:
    prefixes = CachedPrefixes()
    prefixes.capacity = 3
    long, other = block_hashes(chat(1, 48), BLOCK), block_hashes(chat(2, 16), BLOCK)
    prefixes.add(long)

    prefixes.add(other)

    assert prefixes.num_cached(long) == 2
    assert prefixes.num_cached(other) == 1
    assert prefixes.num_cached(block_hashes(chat(1, 48), BLOCK, "salt")) == 0


async def test_a_conversation_stays_with_its_engine_and_other_requests_are_balanced() -> None:
    router, engines = await started(3)

    for turn in range(1, 4):
        for number in range(1, 7):
            router.add(request_of(chat(number, 40 * turn), asking(1)))

    homes = [{bytes(item.prompt[:4]) for item in engine.added} for engine in engines]
    assert [len(home) for home in homes] == [2, 2, 2]
    assert len(set.union(*homes)) == 6
    assert [len(engine.added) for engine in engines] == [6, 6, 6]


async def test_each_routing_decision_is_reported_with_its_engine() -> None:
    routed: list[tuple[int, str]] = []
    router, engines = await started(on_route=lambda *facts: routed.append(facts))

    router.add(request_of(chat(1, 64), asking(1)))
    router.add(request_of(chat(1, 64), asking(1)))
    engines[0].reports(blocks_used=1000)
    router.add(request_of(chat(1, 64), asking(1)))

    assert routed == [(0, LOAD), (0, PREFIX), (1, BUSY)]


async def test_waiting_requests_are_counted_before_the_engine_reports_them() -> None:
    router, engines = await started()

    router.add(request_of(chat(1, 5000), asking(1)))
    router.add(request_of(chat(2, 10), asking(1)))
    router.add(request_of(chat(3, 10), asking(1)))
    key = engines[0].added[0].key
    engines[0].says(StepOutput(1, started=[key], started_cached=[0], stats=EngineStats()))
    router.add(request_of(chat(4, 10), asking(1)))

    assert [len(engine.added) for engine in engines] == [2, 2]


async def test_a_prompt_is_routed_to_the_engine_with_its_prefix_from_another_front_end() -> None:
    router, engines = await started()
    hashes = block_hashes(chat(5, 64), BLOCK)

    engines[1].says(PromptBlocks(hashes))
    router.add(request_of(chat(5, 80), asking(1)))

    assert [len(engine.added) for engine in engines] == [0, 1]


async def test_without_a_prefix_cache_requests_are_routed_by_load() -> None:
    router, engines = await started(prefix_caching=False)

    for _ in range(4):
        router.add(request_of(chat(1, 64), asking(1)))

    assert [len(engine.added) for engine in engines] == [2, 2]


async def test_keys_name_the_engine_and_aborts_go_to_it() -> None:
    router, engines = await started(3)
    queues = [router.add(request_of(chat(number, 20), asking(1))) for number in range(3)]

    router.abort([queue.key for queue in queues[1:]])

    assert sorted(engine_of(queue.key) for queue in queues) == [0, 1, 2]
    assert len({queue.key for queue in queues}) == 3
    for queue in queues:
        (engine,) = (engine for engine in engines if engine.engine == engine_of(queue.key))
        aborts = [message.keys for message in engine.sent if isinstance(message, Abort)]
        assert aborts == ([] if queue is queues[0] else [[queue.key]])


async def test_queue_limits_apply_to_the_whole_front_end() -> None:
    limits = QueueLimits(max_requests=3, max_prompt_tokens=1000)
    engines = [FakeEngine(engine, limits) for engine in range(2)]
    router = RouterClient(engines)
    await router.start()
    queues = [router.add(request_of(chat(number, 10), asking(1))) for number in range(3)]

    with pytest.raises(Overloaded, match="3 requests are waiting, at most 3 may"):
        router.add(request_of(chat(4, 10), asking(1)))
    router.abort([queues[0].key])
    router.add(request_of(chat(4, 10), asking(1)))


async def test_the_router_is_ready_with_all_engines_and_has_the_shortest_context() -> None:
    limits = QueueLimits(max_requests=3, max_prompt_tokens=1000)
    engines = [FakeEngine(engine, limits) for engine in range(2)]
    router = RouterClient(engines)
    engines[0].says(ready_message(max_model_len=100))
    engines[1].says(Progress(1, "warmup", 3, 9))

    with pytest.raises(Overloaded, match="warming up, 3 of 9"):
        router.add(request_of(chat(1, 5), asking(1)))
    assert router.ready is None and router.progress == Progress(1, "warmup", 3, 9)
    engines[1].says(ready_message(max_model_len=80))

    assert (await router.wait_ready()).max_model_len == 80
    for engine in engines:
        engine.says(Progress(engine.engine, BACKGROUND_WARMUP, 2, 5))
    assert router.progress == Progress(0, BACKGROUND_WARMUP, 4, 10)


async def test_a_failed_start_of_an_engine_fails_the_router() -> None:
    limits = QueueLimits(max_requests=3, max_prompt_tokens=1000)
    engines = [FakeEngine(engine, limits) for engine in range(2)]
    router = RouterClient(engines)
    engines[0].says(ready_message())

    engines[1].says(Failed(1, "no such dtype", is_config=True))

    with pytest.raises(ConfigError, match="no such dtype"):
        await router.wait_ready()
    assert router.failure == "no such dtype" and router.is_misconfigured


async def test_a_dead_engine_fails_its_requests_and_gets_no_new_requests() -> None:
    router, engines = await started()
    lost, kept = (router.add(request_of(chat(number, 64), asking(1))) for number in (1, 2))

    engines[0].fail("engine 0 was killed")
    queues = [router.add(request_of(chat(1, 80), asking(1))) for _ in range(3)]

    with pytest.raises(EngineDied, match="engine 0 was killed"):
        await lost.get()
    assert router.failure is None
    assert {engine_of(queue.key) for queue in (kept, *queues)} == {1}
    engines[1].says(StepOutput(1, finished=[Finish(kept.key, "stop")]))
    assert (await kept.get()).finish is not None
    engines[1].fail("engine 1 was killed")
    assert router.failure == "engine 0 was killed"
    with pytest.raises(EngineDied):
        router.add(request_of(chat(3, 5), asking(1)))


class Restorations:
    """Records the number of requests of an engine when it is back."""

    def __init__(self) -> None:
        self.restored: list[tuple[int, int]] = []

    def engine_lost(self, client: SingleEngineClient, *, has_poison: bool) -> None:
        """Ignored: only restored engines are recorded."""

    def engine_restored(self, client: SingleEngineClient, pause: Pause) -> None:
        self.restored.append((client.engine, len(client.queues)))


async def test_after_all_engines_died_the_first_restored_engine_gets_all_requests() -> None:
    router, engines = await started()
    noted = Restorations()
    router.resume(noted)
    queues = [router.add(request_of(chat(number, 64))) for number in range(4)]
    first, second = engines

    first._lose(Failure("killed"))
    assert len(second.added) == len(queues)
    second._lose(Failure("killed too"))
    assert len(first.added) == 2 and not first.queues
    await first.start()

    assert noted.restored == [(0, 4)] and len(first.added) == 2 + 4
    assert {engine_of(queue.key) for queue in queues} == {0} and not second.queues
    await second.start()
    assert noted.restored == [(0, 4), (1, 0)] and len(second.added) == len(queues)
    first.says(StepOutput(1, keys=[queues[3].key], tokens=[7]))
    assert (await queues[3].get()).tokens == [7]


SEGFAULT = ProcessEnd("engine 0 was killed by SIGSEGV", False, 7)


async def test_a_request_that_crashed_two_engines_is_not_sent_to_a_third() -> None:
    """Requests are handed over only once the engines are known to have crashed by themselves."""
    router, engines = await started(3)
    router.resume(Restorations())
    poison = router.add(request_of(chat(1, 8)))
    for _ in range(2):
        (engine,) = (engine for engine in engines if engine.queues)
        engine.says(StepOutput(0, started=[poison.key], started_cached=[0]))
        engine._lose(Failure("the engine has disconnected", is_external=None))
        assert engine.queues and engine.is_crash_pending

        engine.set_exit_cause(SEGFAULT)

    assert not any(engine.queues for engine in engines)
    assert sum(len(engine.added) for engine in engines) == 2
    assert "died 2 times" in ((await poison.get()).finish or Finish(0, "")).error  # type: ignore[operator]


async def test_a_crash_without_a_reported_cause_counts_as_external() -> None:
    router, engines = await started(2)
    noted = Restorations()
    router.resume(noted)
    queue = router.add(request_of(chat(1, 8)))
    for deaths in (1, 2):
        (engine,) = (engine for engine in engines if engine.queues)
        engine.says(StepOutput(0, started=[queue.key], started_cached=[0]))
        engine._lose(Failure("the engine has disconnected", is_external=None))
        if deaths == 1:
            await asyncio.sleep(CAUSE_GRACE_S + 0.1)
        # A new engine that is ready before the cause is known does not wait for it.
        await engine.start()

    assert (queue.num_deaths, queue.num_external_deaths) == (2, 2)
    assert sum(len(engine.queues) for engine in engines) == 1 and len(noted.restored) == 2


async def test_the_kill_of_a_hung_engine_is_not_external() -> None:
    router, engines = await started(1)
    router.resume(Restorations())
    queue = router.add(request_of(chat(1, 8)))
    engines[0].says(StepOutput(0, started=[queue.key], started_cached=[0]))
    engines[0].has_hung = True

    engines[0].set_exit_cause(SEGFAULT._replace(is_external=True))
    await engines[0].start()

    assert (queue.num_deaths, queue.num_external_deaths) == (1, 0)
    assert not engines[0].has_hung


async def test_stats_are_summed_over_living_engines() -> None:
    router, engines = await started()
    engines[0].reports(running=2, blocks_used=3, lookups={"decode.hit": 4})
    engines[1].reports(running=5, blocks_used=1, lookups={"decode.hit": 1, "prefill.hit": 2})

    both = router.stats
    engines[0].fail("killed")

    assert (both.running, both.blocks_used) == (7, 4)
    assert both.lookups == {"decode.hit": 5, "prefill.hit": 2}
    assert router.stats.running == 5
    assert engines[0].stats.lookups == {"decode.hit": 4}


async def test_a_sleeping_engine_gets_no_request_while_another_is_awake() -> None:
    router, engines = await started()
    engines[0].reports(sleep=ASLEEP[0])

    queues = [router.add(request_of(chat(number, 64), asking(1))) for number in range(3)]

    assert router.stats.sleep == AWAKE
    assert {engine_of(queue.key) for queue in queues} == {1}


@pytest.mark.parametrize(
    ("name", "values", "answer"),
    [
        ("ping", ["pong", "pong"], "pong"),
        ("stop_profile", ["a.json", "b.json"], ["a.json", "b.json"]),
        (SLEEP, [ASLEEP[0], FALLING_ASLEEP], FALLING_ASLEEP),
        ("sleep_state", [ASLEEP[0], ASLEEP[0]], ASLEEP[0]),
        (
            "shapes",
            [[["decode", 4, 1, 8, 10, 9, 40, 2]], [["decode", 4, 1, 8, 1, 1, 4, 0]]],
            [["decode", 4, 1, 8, 11, 10, 44, 2]],
        ),
    ],
)
def test_answers_of_engines_are_combined(name: str, values: list[Any], answer: object) -> None:
    assert combined(name, values) == answer


async def test_a_control_is_sent_to_all_engines_and_fails_with_the_first_error() -> None:
    router, engines = await started()
    engines[0].answers["ping"] = engines[1].answers["ping"] = Reply(0, "pong")
    engines[1].answers["wake_up"] = Reply(0, error="it is awake", is_refusal=True)

    assert await router.control("ping") == "pong"
    with pytest.raises(UserError, match="it is awake"):
        await router.control("wake_up")
    engines[1].fail("killed")
    assert await router.control("ping") == "pong"

    names = [
        [message.name for message in engine.sent if isinstance(message, Control)]
        for engine in engines
    ]
    assert names == [["ping", "wake_up", "ping"], ["ping", "wake_up"]]


async def test_a_prefix_cache_reset_also_resets_the_router() -> None:
    router, engines = await started()
    router.add(request_of(chat(1, 64), asking(1)))
    await router.control("reset_prefix_cache")
    engines[0].reports(blocks_used=4)

    router.add(request_of(chat(1, 64), asking(1)))

    assert [len(engine.added) for engine in engines] == [1, 1]


class AdapterEngine(FakeEngine):
    """Loads and unloads adapters like an engine, whose `configured` adapters come with its
    start."""

    def __init__(self, engine: int, limits: QueueLimits, *configured: LoRAInfo) -> None:
        super().__init__(engine, limits)
        self.configured = {info.name: info for info in configured}
        self.has: dict[str, LoRAInfo] = {}
        self.dies_before_answer = False

    async def start(self) -> None:
        self.has = dict(self.configured)
        self.says(Adapters([*self.has.values()]))
        await super().start()

    def _send(self, message: ToEngine) -> bool:
        if not isinstance(message, Control) or message.name not in (LOAD_ADAPTER, UNLOAD_ADAPTER):
            return super()._send(message)
        if self.dies_before_answer:
            self._lose(Failure("killed", is_external=True))
            return True
        error = None
        if message.name == LOAD_ADAPTER:
            named = message.arguments["adapter"]
            self.has[named.name] = LoRAInfo(named.name, named.path, named.path, 4, 8)
        elif self.has.pop(message.arguments["lora_name"], None) is None:
            error = "there is no adapter of this name"
        self.says(Adapters([*self.has.values()]))
        self.says(Reply(message.call, error=error, is_refusal=error is not None))
        return True


async def with_adapters(*configured: LoRAInfo) -> tuple[RouterClient, list[AdapterEngine]]:
    limits = QueueLimits(max_requests=100, max_prompt_tokens=1_000_000)
    engines = [AdapterEngine(engine, limits, *configured) for engine in range(2)]
    router = RouterClient(engines)
    await router.start()
    await router.wait_ready()
    router.resume(Restorations())
    return router, engines


async def restarted(engine: AdapterEngine) -> None:
    await engine.start()
    await until(lambda: engine.is_alive)


def adapter(name: str, path: str = "") -> LoRAInfo:
    return LoRAInfo(name, path or f"/{name}", path or f"/{name}", 4, 8)


async def test_adapters_that_change_during_a_restart_are_the_same_on_all_engines_after_it() -> None:
    router, (first, second) = await with_adapters(adapter("own"))
    await router.control(LOAD_ADAPTER, adapter=adapter("old").named)
    first._lose(Failure("killed", is_external=True))

    await router.control(LOAD_ADAPTER, adapter=adapter("new").named)
    await router.control(UNLOAD_ADAPTER, lora_name="old")
    await router.control(UNLOAD_ADAPTER, lora_name="own")
    meanwhile = set(router.adapters)
    await restarted(first)

    assert meanwhile == set(router.adapters) == {"new"}
    assert first.has == second.has == {"new": adapter("new")}


async def test_after_all_engines_died_the_first_restored_engine_has_all_adapters() -> None:
    router, (first, second) = await with_adapters()
    first._lose(Failure("killed", is_external=True))
    await router.control(LOAD_ADAPTER, adapter=adapter("new").named)
    second._lose(Failure("killed too", is_external=True))
    meanwhile = set(router.adapters)
    await restarted(first)

    assert meanwhile == set(router.adapters) == set(first.has) == {"new"}


async def test_an_adapter_whose_load_killed_an_engine_is_loaded_by_the_next_engine() -> None:
    router, (first, second) = await with_adapters()
    first.dies_before_answer = True
    await router.control(LOAD_ADAPTER, adapter=adapter("new").named)
    first.dies_before_answer = False
    await restarted(first)

    assert set(router.adapters) == set(first.has) == set(second.has) == {"new"}


async def test_an_adapter_that_a_single_engine_has_can_be_loaded_and_unloaded() -> None:
    router, (first, second) = await with_adapters()
    for has_extra in (first, second):
        await has_extra.control(LOAD_ADAPTER, adapter=adapter("extra").named)
        assert not router.adapters
        await router.control(LOAD_ADAPTER, adapter=adapter("extra").named)
        assert set(router.adapters) == {"extra"}
        await first.control(UNLOAD_ADAPTER, lora_name="extra")
        await router.control(UNLOAD_ADAPTER, lora_name="extra")
        assert not first.has and not second.has
    with pytest.raises(UserError, match="there is no adapter"):
        await router.control(UNLOAD_ADAPTER, lora_name="extra")


async def test_common_adapters_are_recomputed_only_when_the_adapters_of_an_engine_change() -> None:
    router, (_, second) = await with_adapters(adapter("own"))
    before = router.adapters
    assert router.adapters is before

    await router.control(LOAD_ADAPTER, adapter=adapter("new").named)
    both = router.adapters
    assert set(both) == {"own", "new"} and router.adapters is both

    await second.control(UNLOAD_ADAPTER, lora_name="own")
    assert set(router.adapters) == {"new"}
    second._lose(Failure("killed", is_external=True))
    assert set(router.adapters) == {"own", "new"}


async def test_a_restarted_engine_unloads_its_own_adapters_that_were_unloaded_or_replaced() -> None:
    router, (first, second) = await with_adapters(adapter("a"), adapter("b"))
    for name in ("a", "b"):
        await router.control(UNLOAD_ADAPTER, lora_name=name)
    await router.control(LOAD_ADAPTER, adapter=adapter("b", "/other").named)
    for engine in (first, second):
        engine._lose(Failure("killed", is_external=True))
    assert router.adapters["b"].content == "/other"

    await restarted(first)
    await restarted(second)

    assert first.has == second.has == {"b": adapter("b", "/other")}


def test_four_engines_hit_nearly_as_many_prefixes_as_a_single_engine_with_all_blocks() -> None:
    traffic = Traffic(
        num_conversations=40,
        between_arrivals=2,
        num_turns=(2, 4),
        answer_tokens=(5, 30),
        think_ticks=(10, 60),
    )

    large = simulate(1, 800, traffic, max_num_seqs=128)
    four = simulate(4, 800, traffic)
    in_turn = simulate(4, 800, traffic, router=RoundRobin)

    assert large.hit_rate > 0.6
    assert four.hit_rate >= 0.9 * large.hit_rate > 1.2 * in_turn.hit_rate
    assert four.imbalance < 1.6


# Expert-parallel engines


async def test_coupled_engines_report_the_cause_and_not_its_consequences() -> None:
    router, engines = await started(are_coupled=True)
    queues = [engine.add(request_of(chat(1, 4))) for engine in engines]

    engines[0].says(Failed(0, "RuntimeError: connection closed by peer", may_follow=True))
    assert router.failure is None
    engines[1].fail("engine 1 (process 7) was killed by SIGKILL")

    assert router.failure == engines[0].failure == engines[1].failure
    assert router.failure is not None and router.failure.startswith("engine 1 has ended, and all")
    assert router.failure.endswith("engine 1 (process 7) was killed by SIGKILL")
    assert not router.is_failure_logged
    for queue in queues:
        with pytest.raises(EngineDied, match="engine 1 has ended"):
            await queue.get()


async def test_coupled_engines_report_the_first_reason_if_no_cause_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.client.common_end.CAUSE_GRACE_S", 0.02)
    router, engines = await started(are_coupled=True)

    engines[0].says(Failed(0, "ValueError: a fault", may_follow=True))
    engines[1].says(Failed(1, "RuntimeError: connection closed by peer", may_follow=True))
    engines[0].fail("engine 0 (process 6) exited with code 1")
    await until(lambda: router.failure is not None)

    assert router.failure is not None and router.failure.endswith("experts: ValueError: a fault")
    router.fail("later")
    assert "later" not in str(engines[1].failure)

"""Slots and host memory of adapters, against random requests."""

import random
import time
from typing import Any

import pytest

from config.engine import SchedulerConfig
from config.errors import UserError
from config.lora.info import LoRAInfo
from config.params.lora import LoRAConfig
from config.params.pooling import PoolingFacts, PoolingParams
from config.params.sampling import SamplingParams
from engine.kv_cache.manager import KVCacheManager
from engine.request import ModelLimits, Request
from engine.scheduling import lora_slots
from engine.scheduling.fair_queue import make_waiting_queue
from engine.scheduling.launch_packer import LaunchPacker
from engine.scheduling.lora_slots import (
    MAX_ADAPTERS,
    MAX_PASSES,
    MAX_RETIRED,
    AdapterQueue,
    LoRASlots,
)
from engine.scheduling.pooling_scheduler import PoolingScheduler
from engine.scheduling.scheduler import Scheduler
from engine.stats import StepStats
from engine.transport.messages import AddRequest
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import (
    NO_SLOT,
    AdapterLoaded,
    BucketLimits,
    DropAdapter,
    LoadAdapter,
    StepPlan,
)

LIMITS = ModelLimits(64, 100, frozenset())


def make(max_loras: int = 2, names: str = "abcd", **options: Any) -> LoRASlots:
    slots = LoRASlots(LoRAConfig(enable_lora=True, max_loras=max_loras, **options))
    for name in names:
        slots.register(LoRAInfo(name, f"/{name}", f"hash-{name}", 4, 100))
    return slots


def request(
    key: int, name: str = "", *, tenant: int = 0, max_tokens: int = 16, is_pooling: bool = False
) -> Request:
    adapter = f"hash-{name}" if name else ""
    sampling = SamplingParams(max_tokens=max_tokens)
    message = AddRequest(key, memoryview(bytes(8)), sampling, adapter=adapter, tenant=tenant)
    if is_pooling:
        message.pooling = PoolingParams()
    return Request(message, [], seed=0, priority_key=(0, key), limits=LIMITS, arrived_at=0.0)


def assigned(slots: LoRASlots) -> dict[int, str]:
    """Names of the adapters that the next plan copies to slots, by slot."""
    plan = StepPlan(0, [])
    slots.fill_plan(plan)
    return dict(zip(plan.lora_slots, plan.lora_adapters, strict=True))


def orders(slots: LoRASlots) -> list[tuple[type, str]]:
    """Messages to the workers, each with the adapter to load or drop."""
    messages = slots.take_messages()
    assert all(isinstance(message, LoadAdapter | DropAdapter) for message in messages)
    return [(type(message), message.content) for message in messages]  # type: ignore[union-attr]


def load_all(slots: LoRASlots) -> list[str]:
    """Answer every pending load."""
    loads = [content for kind, content in orders(slots) if kind is LoadAdapter]
    for content in loads:
        slots.on_loaded(AdapterLoaded(content))
    return loads


def test_a_request_waits_until_its_adapter_is_read() -> None:
    slots = make()
    queue = AdapterQueue(slots)
    adapted, plain = request(1, "a"), request(2)
    slots.add_request(adapted)
    queue.add(adapted)
    queue.add(plain)

    before = queue.peek()
    loads = load_all(slots)

    assert before is plain
    assert loads == ["hash-a"]
    assert queue.peek() is adapted
    assert len(queue) == 2


def test_a_slot_is_taken_from_an_idle_adapter() -> None:
    slots = make(max_loras=2, max_cpu_loras=4)
    requests = {name: request(number, name) for number, name in enumerate("abc")}
    for asked in requests.values():
        slots.add_request(asked)
    load_all(slots)

    slots.start(requests["a"])
    slots.start(requests["b"])
    blocked = slots.may_start(requests["c"])
    slots.release(requests["b"])
    assert slots.may_start(requests["c"])
    slots.start(requests["c"])

    assert not blocked
    assert [asked.lora_slot for asked in requests.values()] == [0, 1, 1]
    assert assigned(slots) == {0: "hash-a", 1: "hash-c"}


def test_an_adapter_that_is_used_is_not_dropped_from_host_memory() -> None:
    slots = make(max_loras=1, max_cpu_loras=1)
    asked, two = request(1, "a"), request(2, "b")
    slots.add_request(asked)
    load_all(slots)
    slots.start(asked)
    slots.add_request(two)

    early = orders(slots)
    slots.release(asked)
    slots.finish_request(asked)
    late = orders(slots)

    assert early == []
    assert late == [(DropAdapter, "hash-a"), (LoadAdapter, "hash-b")]
    assert slots.num_evictions == 1


def test_the_adapter_whose_requests_ended_first_is_dropped_first() -> None:
    slots = make(max_loras=1, max_cpu_loras=3)
    requests = [request(number, name) for number, name in enumerate("abc")]
    for asked in requests:
        slots.add_request(asked)
    load_all(slots)
    for asked in (requests[1], requests[0], requests[2]):
        slots.finish_request(asked)
    again = request(3, "b")
    slots.add_request(again)
    slots.finish_request(again)

    slots.add_request(request(4, "d"))

    assert orders(slots) == [(DropAdapter, "hash-a"), (LoadAdapter, "hash-d")]


def test_the_end_of_a_request_takes_no_longer_with_many_waiting_adapters() -> None:
    slots = make(max_loras=4, max_cpu_loras=4, names="")
    for number in range(MAX_ADAPTERS):
        slots.register(LoRAInfo(f"{number}", f"/{number}", f"hash-{number}", 4, 100))
    requests = [request(number, f"{number}") for number in range(1024)]
    before_s = time.thread_time()

    for asked in requests:
        slots.add_request(asked)
    for asked in requests:
        load_all(slots)
        slots.finish_request(asked)
        assert sum(slots.gauges["lora_waiting"].values()) == 1023 - asked.key

    # 0.2 s; minutes if each end visits all adapters for each waiting adapter.
    assert time.thread_time() - before_s < 3
    assert slots.num_loads == 1024


def test_an_old_request_is_not_overtaken_indefinitely() -> None:
    slots = make(max_loras=1, max_cpu_loras=2)
    queue = AdapterQueue(slots)
    running, old = request(0, "a"), request(1, "b")
    for asked in (running, old):
        slots.add_request(asked)
        queue.add(asked)
    load_all(slots)
    queue.remove(running)
    slots.start(running)
    num_passed = 0
    for key in range(2, 4 * MAX_PASSES):
        asked = request(key, "a")
        slots.add_request(asked)
        queue.add(asked)
        if queue.peek() is not asked:
            break
        queue.remove(asked)
        slots.start(asked)
        num_passed += 1

    assert num_passed == MAX_PASSES


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(1, 1), (2, 2), (2, 3)])
def test_busy_adapters_do_not_starve_an_adapter_that_is_not_in_host_memory(
    max_loras: int, max_cpu_loras: int
) -> None:
    slots = make(max_loras, max_cpu_loras=max_cpu_loras)
    queue = AdapterQueue(slots)
    running: list[Request] = []

    def add(key: int, name: str) -> Request:
        asked = request(key, name)
        slots.add_request(asked)
        queue.add(asked)
        return asked

    def start_and_load() -> int:
        """Start the requests that may start, at most one for each adapter in host memory."""
        num_before = len(running)
        while len(running) < max_cpu_loras and (found := queue.peek()) is not None:
            queue.remove(found)
            slots.start(found)
            running.append(found)
        load_all(slots)
        slots.check(set())
        return len(running) - num_before

    busy = "abc"[:max_cpu_loras]
    for key, name in enumerate(busy * 2):
        add(key, name)
    start_and_load()
    victim = add(10, "d")
    num_passes = 0
    for key in range(11, 1000):
        num_started = start_and_load()
        if victim in running:
            break
        num_passes += num_started
        if running:
            ended = running.pop(0)
            slots.release(ended)
            slots.finish_request(ended)
        # At all times, a request of each busy adapter waits.
        add(key, busy[key % max_cpu_loras])

    assert victim in running
    # The requests before the victim, and 32 passes each for the victim and the adapter that waits
    # for a slot.
    assert num_passes <= len(busy) * 2 + MAX_PASSES * (1 + max_cpu_loras - max_loras)


def test_an_adapter_evicted_for_an_overtaken_request_is_loaded_again_for_its_requests() -> None:
    slots = make(max_loras=1, max_cpu_loras=1)
    queue = AdapterQueue(slots)
    running, old = request(0, "a"), request(1, "b")
    later = [request(key, "a") for key in range(2, 4 + MAX_PASSES)]
    for asked in (running, old, *later):
        slots.add_request(asked)
        queue.add(asked)
    load_all(slots)
    started = []
    while (found := queue.peek()) is not None:
        queue.remove(found)
        slots.start(found)
        started.append(found)

    early = orders(slots)
    for asked in started:
        slots.release(asked)
        slots.finish_request(asked)
    assert queue.peek() is None
    late = orders(slots)
    slots.check(set())
    slots.on_loaded(AdapterLoaded("hash-b"))
    assert queue.peek() is old
    queue.remove(old)
    slots.start(old)
    slots.release(old)
    slots.finish_request(old)

    assert started == [running, *later[:MAX_PASSES]]
    assert early == []
    assert late == [(DropAdapter, "hash-a"), (LoadAdapter, "hash-b")]
    assert load_all(slots) == ["hash-a"]
    assert queue.peek() is later[MAX_PASSES]


def test_an_unloaded_adapter_stays_until_its_last_request_ends() -> None:
    slots = make(names="a")
    asked = request(1, "a")
    slots.add_request(asked)
    load_all(slots)
    slots.start(asked)

    num_left = slots.unregister("a")
    served = slots.serves("hash-a")
    drops = orders(slots)
    slots.release(asked)
    slots.finish_request(asked)

    assert (num_left, served, drops) == (1, False, [])
    assert orders(slots) == [(DropAdapter, "hash-a")]
    assert slots.infos == []
    # A beam continues with the adapter.
    assert slots.serves("hash-a", is_continuation=True)


def load_answers(slots: LoRASlots, error: str | None = None) -> list[bool]:
    """Results of `on_loaded` for all pending loads, which all end with `error`."""
    answers = [slots.on_loaded(AdapterLoaded(content, error)) for _, content in orders(slots)]
    slots.check(set())
    return answers


@pytest.mark.parametrize("error", [None, "no such file"])
def test_an_adapter_without_name_and_requests_is_forgotten_when_its_load_ends(
    error: str | None,
) -> None:
    slots = make(names="a")
    asked = request(1, "a")
    slots.add_request(asked)
    slots.unregister("a")
    slots.finish_request(asked)

    answers = load_answers(slots, error)

    assert answers == [error is None]
    assert slots._entries == {}
    assert orders(slots) == [(DropAdapter, "hash-a")]


def test_checking_for_an_unloaded_adapter_keeps_no_state() -> None:
    slots = make(names="a")
    slots.unregister("a")

    served = slots.serves("hash-a", is_continuation=True)
    assert slots._entries == {}
    # An accepted continuation loads the adapter again.
    beam = request(1, "a")
    slots.add_request(beam)
    loads = load_all(slots)
    slots.finish_request(beam)

    assert served
    assert loads == ["hash-a"]
    assert slots._entries == {}


@pytest.mark.parametrize("error", [None, "no such file"])
def test_a_request_gets_the_host_memory_of_a_load_whose_requests_were_aborted(
    error: str | None,
) -> None:
    slots = make(max_loras=1, max_cpu_loras=1)
    asked, two = request(1, "a"), request(2, "b")
    slots.add_request(asked)
    slots.add_request(two)
    slots.finish_request(asked)

    load_answers(slots, error)

    assert load_all(slots) == ["hash-b"]


def test_registering_a_loaded_name_and_unregistering_an_unknown_name_are_refused() -> None:
    slots = make(names="a")

    with pytest.raises(UserError, match="a is loaded already, with other files"):
        slots.register(LoRAInfo("a", "/x", "hash-x", 4, 100))
    slots.register(LoRAInfo("a", "/x", "hash-a", 4, 100))
    with pytest.raises(UserError, match="there is no adapter z"):
        slots.unregister("z")


def test_an_adapter_with_two_names_is_read_from_the_files_of_the_name_that_is_left() -> None:
    slots = make(names="")
    slots.register(LoRAInfo("first", "/first", "hash-a", 4, 100))
    slots.register(LoRAInfo("second", "/second", "hash-a", 4, 100))
    slots.unregister("first")
    slots.add_request(request(1, "a"))

    (message,) = slots.take_messages()

    assert isinstance(message, LoadAdapter)
    assert (message.path, message.name) == ("/second", "second")


def test_a_failed_load_is_tried_again_by_the_next_request() -> None:
    slots = make()
    asked = request(1, "a")
    slots.add_request(asked)
    assert orders(slots) == [(LoadAdapter, "hash-a")]

    is_loaded = slots.on_loaded(AdapterLoaded("hash-a", "no such file"))
    # The ranks that have read the adapter drop it.
    assert orders(slots) == [(DropAdapter, "hash-a")]
    slots.finish_request(asked)
    slots.add_request(request(2, "a"))

    assert not is_loaded
    assert load_all(slots) == ["hash-a"]
    assert (slots.num_loads, slots.num_failures) == (1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_all_random_requests_finish(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests with aborts, failing loads, and names that are added and removed."""
    rng = random.Random(seed)
    monkeypatch.setattr(lora_slots, "MAX_PASSES", rng.choice([1, 4, MAX_PASSES]))
    max_loras = rng.randint(1, 3)
    slots = make(max_loras, max_cpu_loras=rng.randint(max_loras, 4))
    queue = AdapterQueue(slots)
    waiting: list[Request] = []
    running: list[Request] = []
    in_slot: dict[int, str] = {}
    loads: list[str] = []
    left, ended, key = 60, 0, 0

    def end(requests: list[Request]) -> int:
        for asked in requests:
            if asked in running:
                running.remove(asked)
                if asked.adapter:
                    slots.release(asked)
            else:
                waiting.remove(asked)
                queue.remove(asked)
            if asked.adapter:
                slots.finish_request(asked)
        return len(requests)

    for _ in range(2000):
        if left and rng.random() < 0.4:
            key += 1
            asked = request(key, rng.choice(["", *"abcd"]))
            is_continuation = rng.random() < 0.2
            if not asked.adapter or slots.serves(asked.adapter, is_continuation=is_continuation):
                left -= 1
                if asked.adapter:
                    slots.add_request(asked)
                queue.add(asked)
                waiting.append(asked)
        if rng.random() < 0.1:
            name = rng.choice("abcd")
            if name in {info.name for info in slots.infos}:
                slots.unregister(name)
            else:
                slots.register(LoRAInfo(name, f"/{name}", f"hash-{name}", 4, 100))
        loads += [content for kind, content in orders(slots) if kind is LoadAdapter]
        if rng.random() < 0.5:
            answered, loads = loads, []
            for content in answered:
                error = "no such file" if rng.random() < 0.1 else None
                if not slots.on_loaded(AdapterLoaded(content, error)):
                    both = [*waiting, *running]
                    ended += end([asked for asked in both if asked.adapter == content])
        ended += end([asked for asked in waiting if rng.random() < 0.02])
        while len(running) < 5 and (found := queue.peek()) is not None:
            queue.remove(found)
            waiting.remove(found)
            slots.start(found)
            in_slot |= assigned(slots)
            assert (found.lora_slot == NO_SLOT) == (not found.adapter)
            assert not found.adapter or in_slot[found.lora_slot] == found.adapter
            running.append(found)
        ended += end([asked for asked in running if rng.random() < 0.3])
        slots.check(set())
        assert len({asked.adapter for asked in running if asked.adapter}) <= max_loras

    assert ended == 60
    assert len(queue) == 0
    assert {asked.info.content for asked in slots._entries.values()} == {
        info.content for info in slots.infos
    }


@pytest.mark.parametrize("fair_share", [False, True])
@pytest.mark.parametrize("is_pooling", [False, True])
@pytest.mark.parametrize("max_cpu_loras", [1, 2])
def test_few_requests_overtake_an_older_request_that_waits_for_host_memory_or_a_slot(
    fair_share: bool, is_pooling: bool, max_cpu_loras: int
) -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, fair_share=fair_share, max_inflight_steps=1
    )
    table = BucketTable([], [], BucketLimits(4, 64, 4, 64, 4, 64, False), exact=True)
    stats = StepStats()
    packer = LaunchPacker(table, max_prefill_batch=4, max_tokens=64, stats=stats)
    slots = make(1, "ab", max_cpu_loras=max_cpu_loras)
    waiting = make_waiting_queue(config, slots)
    scheduler: Scheduler | PoolingScheduler
    if is_pooling:
        facts = PoolingFacts(tasks=("embed",), width=3, token_width=3)
        scheduler = PoolingScheduler(config, waiting, facts, packer, 64, (slots,))
    else:
        kv = KVCacheManager(256, 4, prefix_caching=False)
        scheduler = Scheduler(config, waiting, kv, packer, stats, (slots,))
    running: list[Request] = []

    def add(key: int, name: str, tenant: int) -> Request:
        asked = request(key, name, tenant=tenant, max_tokens=6, is_pooling=is_pooling)
        scheduler.add_request(asked)
        load_all(slots)
        return asked

    def start(step: int) -> list[Request]:
        output = scheduler.schedule(step)
        found = [asked for asked, _ in output.started]
        running.extend(found)
        # A request of adapter a is always running; each request ends some steps after its start.
        while len(running) > 1:
            scheduler.finish_requests([running.pop(0)])
        scheduler.update_from_output(step)
        return found

    add(0, "a", 1)
    start(0)
    old = add(1, "b", 2)
    num_passes = 0
    for step in range(1, 8 * MAX_PASSES):
        add(1 + step, "a", 1)
        found = start(step)
        if old in found:
            break
        num_passes += len(found)
        if not found:
            scheduler.finish_requests(running)
            running.clear()

    assert old in running
    assert num_passes <= MAX_PASSES


def test_the_number_of_names_has_a_limit() -> None:
    slots = make(names="")
    for number in range(MAX_ADAPTERS):
        slots.register(LoRAInfo(f"a{number}", "/x", f"hash-{number}", 4, 100))

    with pytest.raises(UserError, match="4096 adapters are loaded, at most 4096 are allowed"):
        slots.register(LoRAInfo("more", "/x", "hash-more", 4, 100))
    slots.unregister("a0")
    slots.register(LoRAInfo("more", "/x", "hash-more", 4, 100))


def test_continuations_keep_the_adapters_unloaded_last() -> None:
    slots = make(names="a")
    slots.unregister("a")
    for number in range(MAX_RETIRED - 1):
        slots.register(LoRAInfo(f"{number}", f"/{number}", f"hash-{number}", 4, 100))
        slots.unregister(f"{number}")
    slots.register(LoRAInfo("a", "/a", "hash-a", 4, 100))
    slots.unregister("a")

    slots.register(LoRAInfo("b", "/b", "hash-b", 4, 100))
    slots.unregister("b")

    assert slots.serves("hash-a", is_continuation=True)
    assert not slots.serves("hash-0", is_continuation=True)


def test_the_counts_of_an_adapter_that_was_registered_again_include_older_requests() -> None:
    slots = make(names="a")
    older, newer = request(0, "a"), request(1, "b")
    slots.add_request(older)
    load_all(slots)
    slots.start(older)
    slots.unregister("a")
    slots.register(LoRAInfo("a", "/b", "hash-b", 4, 100))

    slots.add_request(newer)
    load_all(slots)

    assert (slots.running, slots.waiting) == ({"a": 1}, {"a": 1})
    slots.start(newer)
    assert (slots.running, slots.waiting) == ({"a": 2}, {})
    slots.release(older)
    assert (slots.running, slots.waiting) == ({"a": 1}, {"a": 1})

"""Slots and host memory of adapters, against random requests."""

import random
from typing import Any

import pytest

from config.errors import UserError
from config.lora.adapter import LoRAInfo
from config.params.lora import LoRAConfig
from config.params.sampling import SamplingParams
from engine.request import ModelLimits, Request
from engine.scheduling.lora_slots import MAX_ADAPTERS, MAX_PASSES, AdapterQueue, LoRASlots
from engine.transport.messages import AddRequest
from hpu.protocol import NO_SLOT, AdapterLoaded

LIMITS = ModelLimits(64, 100, frozenset())


def make(max_loras: int = 2, names: str = "abcd", **options: Any) -> LoRASlots:
    slots = LoRASlots(LoRAConfig(enable_lora=True, max_loras=max_loras, **options))
    for name in names:
        slots.register(LoRAInfo(name, f"/{name}", f"hash-{name}", 4, 100))
    return slots


def request(key: int, name: str = "") -> Request:
    message = AddRequest(
        key, memoryview(bytes(8)), SamplingParams(), adapter=f"hash-{name}" if name else ""
    )
    return Request(message, [], seed=0, priority_key=(0, key), limits=LIMITS, arrived_at=0.0)


def load_all(slots: LoRASlots) -> list[str]:
    """Answer what the workers are told to read."""
    loads = [load.content for load in slots.take_loads()]
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


def test_a_slot_is_taken_from_the_least_recently_used_idle_adapter() -> None:
    slots = make(max_loras=2, max_cpu_loras=4)
    requests = {name: request(number, name) for number, name in enumerate("abc")}
    for one in requests.values():
        slots.add_request(one)
    load_all(slots)

    first, second = slots.start(requests["a"]), slots.start(requests["b"])
    blocked = slots.may_start(requests["c"])
    slots.release(requests["b"])
    third = slots.start(requests["c"]) if slots.may_start(requests["c"]) else NO_SLOT

    assert not blocked
    assert (first, second, third) == (0, 1, 1)
    assert slots.take_assigned() == ([0, 1], ["hash-a", "hash-c"])


def test_an_adapter_that_is_used_is_not_dropped_from_host_memory() -> None:
    slots = make(max_loras=1, max_cpu_loras=1)
    one, two = request(1, "a"), request(2, "b")
    slots.add_request(one)
    load_all(slots)
    slots.start(one)
    slots.add_request(two)

    early = slots.take_loads()
    slots.release(one)
    slots.finish_request(one)
    late = [load.content for load in slots.take_loads()]

    assert early == []
    assert late == ["hash-b"]
    assert [drop.content for drop in slots.take_drops()] == ["hash-a"]
    assert slots.num_evictions == 1


def test_an_old_request_is_not_passed_for_ever() -> None:
    slots = make(max_loras=1, max_cpu_loras=2)
    queue = AdapterQueue(slots)
    running, old = request(0, "a"), request(1, "b")
    for one in (running, old):
        slots.add_request(one)
        queue.add(one)
    load_all(slots)
    queue.remove(running)
    slots.start(running)
    num_passed = 0
    for key in range(2, 4 * MAX_PASSES):
        one = request(key, "a")
        slots.add_request(one)
        queue.add(one)
        if queue.peek() is not one:
            break
        queue.remove(one)
        slots.start(one)
        num_passed += 1

    assert num_passed == MAX_PASSES


def test_an_unloaded_adapter_stays_until_its_last_request_ends() -> None:
    slots = make(names="a")
    one = request(1, "a")
    slots.add_request(one)
    load_all(slots)
    slots.start(one)

    num_left = slots.unregister("a")
    served = slots.serves("hash-a")
    drops = slots.take_drops()
    slots.release(one)
    slots.finish_request(one)

    assert (num_left, served, drops) == (1, False, [])
    assert [drop.content for drop in slots.take_drops()] == ["hash-a"]
    assert slots.infos == []
    # A beam goes on with it.
    assert slots.serves("hash-a", is_continuation=True)


def test_names() -> None:
    slots = make(names="a")

    with pytest.raises(UserError, match="a is loaded already"):
        slots.register(LoRAInfo("a", "/x", "hash-x", 4, 100))
    with pytest.raises(UserError, match="there is no adapter z"):
        slots.unregister("z")


def test_a_failed_load_is_tried_again_by_the_next_request() -> None:
    slots = make()
    one = request(1, "a")
    slots.add_request(one)
    (load,) = slots.take_loads()

    is_loaded = slots.on_loaded(AdapterLoaded(load.content, "no such file"))
    # Of ranks that have read it.
    assert [drop.content for drop in slots.take_drops()] == ["hash-a"]
    slots.finish_request(one)
    slots.add_request(request(2, "a"))

    assert not is_loaded
    assert load_all(slots) == ["hash-a"]
    assert (slots.num_loads, slots.num_failures) == (1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_all_run(seed: int) -> None:
    rng = random.Random(seed)
    max_loras = rng.randint(1, 3)
    slots = make(max_loras, max_cpu_loras=rng.randint(max_loras, 4))
    queue = AdapterQueue(slots)
    running: list[Request] = []
    in_slot: dict[int, str] = {}
    left, started, key = 60, 0, 0
    for _ in range(2000):
        if left and rng.random() < 0.4:
            key += 1
            left -= 1
            one = request(key, rng.choice(["", *"abcd"]))
            if one.adapter:
                slots.add_request(one)
            queue.add(one)
        if rng.random() < 0.5:
            load_all(slots)
        slots.take_drops()
        while len(running) < 5 and (found := queue.peek()) is not None:
            queue.remove(found)
            slot = slots.start(found)
            in_slot |= dict(zip(*slots.take_assigned(), strict=True))
            assert (slot == NO_SLOT) == (not found.adapter)
            assert not found.adapter or in_slot[slot] == found.adapter
            running.append(found)
            started += 1
        for one in [one for one in running if rng.random() < 0.3]:
            running.remove(one)
            if one.adapter:
                slots.release(one)
                slots.finish_request(one)
        slots.check()
        assert len({one.adapter for one in running if one.adapter}) <= max_loras

    assert started == 60
    assert len(queue) == 0


def test_the_number_of_names_has_a_limit() -> None:
    slots = make(names="")
    for number in range(MAX_ADAPTERS):
        slots.register(LoRAInfo(f"a{number}", "/x", f"hash-{number}", 4, 100))

    with pytest.raises(UserError, match="4096 adapters are served, at most 4096 may be"):
        slots.register(LoRAInfo("more", "/x", "hash-more", 4, 100))
    slots.unregister("a0")
    slots.register(LoRAInfo("more", "/x", "hash-more", 4, 100))

"""Slots are shared fairly among clients, and waiting work is limited."""

import asyncio
import random
from collections import Counter

import pytest
from waits import WAIT_S

from config.errors import Overloaded
from server.http.fair_slots import FairSlots


class Workers:
    """Jobs that hold a slot until they are released."""

    def __init__(self, slots: FairSlots) -> None:
        self.slots = slots
        self.order: list[str] = []
        self.over: dict[str, list[asyncio.Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, client: str, count: int = 1, num_bytes: int = 0) -> None:
        for _ in range(count):
            self.tasks.append(asyncio.ensure_future(self._work(client, num_bytes)))
            await asyncio.sleep(0)

    async def end(self, client: str) -> None:
        """End the longest-running job of `client`."""
        self.over[client].pop(0).set()
        for _ in range(4):
            await asyncio.sleep(0)

    async def _work(self, client: str, num_bytes: int) -> None:
        async with self.slots.hold(client, num_bytes):
            self.order.append(client)
            over = asyncio.Event()
            events = self.over.setdefault(client, [])
            events.append(over)
            try:
                await over.wait()
            finally:
                if over in events:
                    events.remove(over)

    async def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError | Overloaded | None) for end in ends)


def slots(**limits: int) -> FairSlots:
    named = {"total": 3, "per_client": 2, "max_waiting": 8, **limits}
    return FairSlots("images", **named)


async def test_a_client_has_limited_slots_and_leaves_slots_to_other_clients() -> None:
    workers = Workers(slots())

    await workers.start("flood", 6)
    await workers.start("other")

    assert workers.order == ["flood", "flood", "other"]
    await workers.cancel()


async def test_a_free_slot_is_given_to_the_client_with_the_fewest_slots() -> None:
    workers = Workers(slots(max_waiting=20))
    await workers.start("flood", 8)
    await workers.start("second", 4)
    await workers.start("third", 2)

    await workers.end("flood")
    await workers.end("second")

    # The third client had no slot; then the second, without a slot, precedes the flood, which holds
    # a slot.
    assert workers.order == ["flood", "flood", "second", "third", "second"]
    await workers.cancel()


async def test_clients_with_equally_many_slots_take_turns() -> None:
    workers = Workers(slots(total=1))
    await workers.start("a", 3)
    await workers.start("b", 2)

    for client in ("a", "a", "b", "a"):
        await workers.end(client)

    # The first slots were taken before another client arrived.
    assert workers.order == ["a", "a", "b", "a", "b"]
    await workers.cancel()


async def test_cancelling_all_work_at_once_leaks_no_slot() -> None:
    workers = Workers(slots(total=2, per_client=1))
    await workers.start("gone", 5)

    await workers.cancel()

    await workers.start("gone")
    assert workers.order == ["gone", "gone"]
    await workers.cancel()


async def test_work_that_is_cancelled_leaves_the_queue_and_its_slot() -> None:
    workers = Workers(slots(total=1, max_waiting=2))
    await workers.start("a", 3)

    workers.tasks[1].cancel()
    workers.tasks[0].cancel()
    await asyncio.gather(*workers.tasks[:2], return_exceptions=True)
    await workers.start("b", 2)

    assert workers.order == ["a", "a"]
    await workers.end("a")
    assert workers.order == ["a", "a", "b"]
    await workers.cancel()


async def test_a_client_that_fills_the_queue_does_not_exclude_other_clients() -> None:
    workers = Workers(slots(total=1, per_client=1))
    await workers.start("flood", 9)

    with pytest.raises(Overloaded, match=r"8 images of this client wait and 1 would be added, at"):
        await asyncio.wait_for(workers._work("flood", 0), WAIT_S)
    await workers.start("other", 4)
    with pytest.raises(Overloaded, match=r"4 images of this client wait .* at most 4 are"):
        await asyncio.wait_for(workers._work("other", 0), WAIT_S)

    await workers.cancel()


async def test_waiting_bytes_are_limited() -> None:
    workers = Workers(slots(max_bytes=100))
    await workers.start("a", 3, num_bytes=30)

    with pytest.raises(
        Overloaded, match="90 bytes of images of this client wait or run and 30 would be"
    ):
        await asyncio.wait_for(workers._work("a", 30), WAIT_S)
    await workers.start("b", 1, num_bytes=30)

    assert workers.order == ["a", "a", "b"]
    await workers.cancel()


async def test_no_slot_is_lost_or_given_twice_in_random_schedules() -> None:
    luck = random.Random(5)
    shared = slots(max_waiting=1000)
    running: Counter[str] = Counter()

    async def work(client: str) -> None:
        async with shared.hold(client):
            running[client] += 1
            assert running[client] <= 2 and running.total() <= 3
            try:
                await asyncio.sleep(luck.random() / 1000)
            finally:
                running[client] -= 1

    tasks = [asyncio.ensure_future(work(luck.choice("abcd"))) for _ in range(300)]
    for task in tasks:
        if luck.random() < 0.3:
            await asyncio.sleep(luck.random() / 2000)
            task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(end) for end in ended} <= {type(None), asyncio.CancelledError}
    assert shared._num_free == 3 and shared._num_waiting == 0 and not shared._clients

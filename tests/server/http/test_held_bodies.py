"""Memory of decoded bodies: clients share it."""

import asyncio
import contextlib
import time

import pytest

from config.errors import Overloaded
from server.http import held_bodies
from server.http.held_bodies import HeldBodies, HeldBody


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_client_that_fills_the_memory_does_not_lock_out_another_client() -> None:
    bodies = HeldBodies()
    full = await bodies.hold(1_000, 1_000, "a")

    held = await asyncio.wait_for(bodies.hold(500, 1_000, "b"), 1)

    assert bodies.num_bytes == 1_500
    full.free()
    held.free()
    assert bodies.num_bytes == 0


async def test_shares_of_many_clients_hold_at_most_twice_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_bodies, "MAX_WAIT_S", 0.01)
    bodies = HeldBodies()
    held = []

    for number in range(1, 60):
        with contextlib.suppress(Overloaded):
            held.append(await bodies.hold(1_000 // number, 1_000, f"client {number}"))

    assert 1_500 < bodies.num_bytes <= 2_000


async def test_a_client_waits_beyond_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bodies, "MAX_WAIT_S", 0.05)
    bodies = HeldBodies()
    held = [await bodies.hold(1_000, 1_000, "a"), await bodies.hold(300, 1_000, "b")]

    with pytest.raises(Overloaded, match="1300 bytes and this body takes 300, at most 1000"):
        await bodies.hold(300, 1_000, "b")

    assert bodies.num_bytes == sum(body.num_bytes for body in held)


async def test_a_body_waits_only_for_bodies_that_leave_no_room_for_it() -> None:
    bodies = HeldBodies()
    first = await bodies.hold(1_000, 1_000, "a")
    waiting = [asyncio.ensure_future(bodies.hold(size, 1_000, "a")) for size in (900, 200)]
    await settle()
    assert not any(body.done() for body in waiting)

    first.free(left=800)
    await settle()
    assert [body.done() for body in waiting] == [False, True]

    first.free()
    waiting[1].result().free()
    await settle()
    assert waiting[0].done()
    assert bodies.num_bytes == 900


async def test_a_body_above_the_limit_waits_until_there_is_no_other_body() -> None:
    bodies = HeldBodies()
    first = await bodies.hold(10, 1_000)
    large = asyncio.ensure_future(bodies.hold(5_000, 1_000))
    await settle()
    assert not large.done()

    first.free()
    await settle()
    assert large.result().num_bytes == bodies.num_bytes == 5_000


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_a_cancelled_wait_leaves_no_bytes(is_admitted: bool) -> None:
    bodies = HeldBodies()
    first = await bodies.hold(1_000, 1_000)
    waiting: asyncio.Future[HeldBody] = asyncio.ensure_future(bodies.hold(500, 1_000))
    await settle()
    first.free()
    if is_admitted:
        await asyncio.sleep(0)

    waiting.cancel()
    await asyncio.wait([waiting])

    assert waiting.cancelled()
    await settle()
    assert bodies.num_bytes == 0


async def test_a_wait_that_ends_when_memory_is_freed_loses_no_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_bodies, "MAX_WAIT_S", 0.05)
    bodies = HeldBodies()
    first = await bodies.hold(1_000, 1_000)
    waiting: asyncio.Future[HeldBody] = asyncio.ensure_future(bodies.hold(1_000, 1_000))
    await settle()

    # The timeout and the admission run in the same iteration of the event loop.
    time.sleep(0.06)  # noqa: ASYNC251 - it must block
    first.free()
    await asyncio.wait([waiting])

    if waiting.exception() is None:
        waiting.result().free()
    assert bodies.num_bytes == 0


async def test_bodies_freed_at_once_offer_their_memory_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = HeldBodies()
    held = [await bodies.hold(10, 1_000) for _ in range(100)]
    waiting = [asyncio.ensure_future(bodies.hold(10, 1_000)) for _ in range(500)]
    await settle()
    num_offers = 0
    take = HeldBodies._take

    def counted(bodies: HeldBodies, body: tuple[str, int, int], num_clients: int) -> bool:
        nonlocal num_offers
        num_offers += 1
        return take(bodies, body, num_clients)

    monkeypatch.setattr(HeldBodies, "_take", counted)

    for body in held:
        body.free()
    await settle()

    assert [body.done() for body in waiting] == [True] * 100 + [False] * 400
    assert num_offers == 500
    for body in waiting:
        body.cancel()
    await asyncio.wait(waiting)


async def test_the_waiting_bodies_of_a_client_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bodies, "MAX_WAITING", 2)
    bodies = HeldBodies()
    first = await bodies.hold(1_000, 1_000, "a")
    waiting = [asyncio.ensure_future(bodies.hold(600, 1_000, client)) for client in "aab"]
    await settle()

    with pytest.raises(Overloaded, match="2 bodies of this client wait for memory, at most 2"):
        await bodies.hold(600, 1_000, "a")

    first.free()
    await settle()
    assert [body.done() for body in waiting] == [True, False, False]
    waiting[0].result().free()
    for body in waiting[1:]:
        body.cancel()
    await asyncio.wait(waiting)
    await settle()
    assert bodies.num_bytes == 0

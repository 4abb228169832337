"""Turns of the event loop: a few callers in each, in order."""

import asyncio

from server.http.pacing import MOST_A_TURN, Turns


async def test_a_few_go_on_in_each_turn_in_the_order_in_which_they_came() -> None:
    turns, gone_on, seen = Turns(), [], []

    async def call(number: int) -> None:
        await turns.take()
        gone_on.append(number)

    calls = [asyncio.ensure_future(call(number)) for number in range(3 * MOST_A_TURN + 1)]
    await asyncio.sleep(0)
    calls[MOST_A_TURN].cancel()
    while not all(one.done() for one in calls):
        seen.append(len(gone_on))
        await asyncio.sleep(0)

    assert gone_on == [n for n in range(3 * MOST_A_TURN + 1) if n != MOST_A_TURN]
    steps = [
        after - before for before, after in zip([0, *seen], [*seen, len(gone_on)], strict=True)
    ]
    assert max(steps) == MOST_A_TURN


async def test_who_comes_in_a_later_turn_finds_room_at_once() -> None:
    turns = Turns()

    for _ in range(3):
        for _ in range(MOST_A_TURN):
            assert next(turns.take().__await__(), "goes on") == "goes on"
        await asyncio.sleep(0)

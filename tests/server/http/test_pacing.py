"""A few callers proceed in each iteration of the event loop, in order."""

import asyncio

from server.http.pacing import MAX_PER_ITERATION, LoopPacer


async def test_a_few_proceed_in_each_iteration_in_order_of_arrival() -> None:
    pacer, gone_on, seen = LoopPacer(), [], []

    async def call(number: int) -> None:
        await pacer.wait()
        gone_on.append(number)

    calls = [asyncio.ensure_future(call(number)) for number in range(3 * MAX_PER_ITERATION + 1)]
    await asyncio.sleep(0)
    calls[MAX_PER_ITERATION].cancel()
    while not all(one.done() for one in calls):
        seen.append(len(gone_on))
        await asyncio.sleep(0)

    assert gone_on == [n for n in range(3 * MAX_PER_ITERATION + 1) if n != MAX_PER_ITERATION]
    steps = [
        after - before for before, after in zip([0, *seen], [*seen, len(gone_on)], strict=True)
    ]
    assert max(steps) == MAX_PER_ITERATION


async def test_a_later_iteration_has_room_at_once() -> None:
    pacer = LoopPacer()

    for _ in range(3):
        for _ in range(MAX_PER_ITERATION):
            assert next(pacer.wait().__await__(), "goes on") == "goes on"
        await asyncio.sleep(0)

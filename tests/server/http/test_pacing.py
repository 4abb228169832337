"""A few callers proceed in each iteration of the event loop, in order."""

import asyncio

from server.http.pacing import MAX_PER_ITERATION, LoopPacer


async def test_a_few_proceed_in_each_iteration_in_order_of_arrival() -> None:
    pacer, gone_on, seen = LoopPacer(), [], []

    async def call(number: int) -> None:
        await pacer.wait("a")
        gone_on.append(number)

    calls = [asyncio.ensure_future(call(number)) for number in range(3 * MAX_PER_ITERATION + 1)]
    await asyncio.sleep(0)
    calls[MAX_PER_ITERATION].cancel()
    while not all(call.done() for call in calls):
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
            assert next(pacer.wait("a").__await__(), "goes on") == "goes on"
        await asyncio.sleep(0)


async def test_clients_take_turns() -> None:
    pacer, gone_on = LoopPacer(), []

    async def call(client: str) -> None:
        await pacer.wait(client)
        gone_on.append(client)

    calls = [asyncio.ensure_future(call("flood")) for _ in range(200)]
    await asyncio.sleep(0)
    calls += [asyncio.ensure_future(call(client)) for client in "ab"]
    await asyncio.gather(*calls)

    assert max(gone_on.index("a"), gone_on.index("b")) <= 2 * MAX_PER_ITERATION + 2
    assert not pacer._waiting

"""A few callers proceed, and a few connections are closed, per iteration of the event loop, in
order."""

import asyncio
import itertools
import socket
from typing import Any, cast

import uvloop
from uvicorn.server import ServerState

from config.server import ServerConfig
from server.http.pacing import (
    MAX_CLOSINGS_PER_ITERATION,
    MAX_PER_ITERATION,
    ClosingPacer,
    LoopPacer,
)
from server.http.protocol import HttpConfig, HttpProtocol


async def test_a_limited_number_of_calls_proceeds_in_each_iteration_in_order_of_arrival() -> None:
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


async def test_a_pacer_admits_its_maximum_again_in_each_iteration() -> None:
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


async def test_calls_of_an_iteration_stop_at_the_maximum_weight() -> None:
    pacer, gone_on = LoopPacer(10), []

    async def call(number: int) -> None:
        await pacer.wait("a", 4)
        gone_on.append(number)

    calls = [asyncio.ensure_future(call(number)) for number in range(9)]
    seen = [0]
    while not all(call.done() for call in calls):
        await asyncio.sleep(0)
        seen.append(len(gone_on))

    assert gone_on == [*range(9)]
    assert max(after - before for before, after in itertools.pairwise(seen)) == 3


class Closed:
    """A transport that appends its number to `closed` when it is closed."""

    def __init__(self, number: int, closed: list[int]) -> None:
        self._number = number
        self._closed = closed

    def close(self) -> None:
        self._closed.append(self._number)


async def test_a_limited_number_of_connections_is_closed_in_each_iteration_in_order() -> None:
    pacer, closed, seen = ClosingPacer(), list[int](), list[int]()
    transports = [Closed(number, closed) for number in range(3 * MAX_CLOSINGS_PER_ITERATION)]

    at_once = [pacer.may_close(cast(Any, transport)) for transport in transports]
    while len(closed) < 2 * MAX_CLOSINGS_PER_ITERATION:
        await asyncio.sleep(0)
        seen.append(len(closed))

    assert at_once == [True] * MAX_CLOSINGS_PER_ITERATION + [False] * 2 * MAX_CLOSINGS_PER_ITERATION
    assert closed == [*range(MAX_CLOSINGS_PER_ITERATION, 3 * MAX_CLOSINGS_PER_ITERATION)]
    steps = [after - before for before, after in zip([0, *seen[:-1]], seen, strict=True)]
    assert max(steps) == MAX_CLOSINGS_PER_ITERATION
    await asyncio.sleep(0)
    assert pacer.may_close(cast(Any, transports[0]))


def test_other_tasks_run_while_many_connections_are_closed() -> None:
    count = 4 * MAX_CLOSINGS_PER_ITERATION

    async def run() -> tuple[int, int]:
        """(connections closed, most connections closed in an iteration)."""
        config = HttpConfig(lambda: None, ServerConfig(), 2 * count)  # type: ignore[arg-type]
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()
        accepted = asyncio.Semaphore(0)

        def protocol() -> HttpProtocol:
            accepted.release()
            return HttpProtocol(config, state, {})

        server = await loop.create_server(protocol, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        clients = []
        for _ in range(count):
            clients.append(socket.create_connection(address))
            await accepted.acquire()
        for client in clients:
            client.close()
        most, num_left = 0, count
        while num_left:
            await asyncio.sleep(0)
            most = max(most, num_left - len(state.connections))
            num_left = len(state.connections)
        server.close()
        return count - num_left, most

    num_closed, most = uvloop.run(asyncio.wait_for(run(), 60))

    assert num_closed == count
    # An iteration closes connections whose turn it is, and connections that end in it.
    assert most <= 2 * MAX_CLOSINGS_PER_ITERATION

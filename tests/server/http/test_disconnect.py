"""Disconnecting clients, simulated by events."""

import asyncio

import pytest
from starlette.types import Message
from waits import until

from server.http.disconnect import WATCH_DELAY_S, CancelOnDisconnect
from server.http.errors import ClientGone


class Connection:
    """A connection whose body was already read."""

    def __init__(self) -> None:
        self.num_receives = 0
        self.end = asyncio.Event()

    async def receive(self) -> Message:
        self.num_receives += 1
        await self.end.wait()
        return {"type": "http.disconnect"}


async def test_work_is_cancelled_when_its_client_has_disconnected() -> None:
    connection = Connection()
    connection.end.set()
    has_ended = False

    with pytest.raises(ClientGone), CancelOnDisconnect(connection.receive):
        try:
            await asyncio.sleep(10)
        finally:
            has_ended = True

    assert has_ended
    assert await asyncio.wait_for(asyncio.sleep(0, "goes on"), 1) == "goes on"


async def test_only_long_work_is_watched_for_disconnects() -> None:
    connection = Connection()

    with CancelOnDisconnect(connection.receive):
        await asyncio.sleep(0)
    await asyncio.sleep(WATCH_DELAY_S * 1.2)
    receives_of_short = connection.num_receives
    with CancelOnDisconnect(connection.receive):
        await until(lambda: connection.num_receives > 0)
        await asyncio.sleep(WATCH_DELAY_S)
    connection.end.set()
    await asyncio.sleep(0.01)

    assert (receives_of_short, connection.num_receives) == (0, 1)


async def test_a_cancellation_from_elsewhere_is_not_swallowed() -> None:
    connection = Connection()

    async def work() -> None:
        with CancelOnDisconnect(connection.receive):
            await asyncio.sleep(10)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(WATCH_DELAY_S * 1.2)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_disconnect_as_the_work_ends_affects_nothing_after_it() -> None:
    for ends_first in ("connection", "work"):
        connection, work = Connection(), asyncio.Event()
        first, second = (
            (connection.end, work) if ends_first == "connection" else (work, connection.end)
        )

        def end(first: asyncio.Event = first, second: asyncio.Event = second) -> None:
            first.set()
            second.set()

        asyncio.get_running_loop().call_later(WATCH_DELAY_S * 1.2, end)
        with CancelOnDisconnect(connection.receive):
            await work.wait()

        for _ in range(5):
            await asyncio.sleep(0)

"""An event loop on its own thread: synchronous calls, Ctrl-C, and shutdown."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from waits import WAIT_S

from config.errors import EngineDied
from server.offline.event_loop import BackgroundLoop


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    made = BackgroundLoop("test-loop")
    yield made
    made.close()


def test_the_loop_returns_the_result_of_the_call(background: BackgroundLoop) -> None:
    async def add(left: int, right: int) -> int:
        await asyncio.sleep(0)
        return left + right

    assert background.run(add(1, 2)) == 3


def test_the_loop_raises_the_error_of_the_call(background: BackgroundLoop) -> None:
    async def fail() -> None:
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        background.run(fail())


async def test_calls_work_inside_a_running_loop(background: BackgroundLoop) -> None:
    async def answer() -> int:
        return 42

    assert background.run(answer()) == 42


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_cancels_the_call_and_waits_until_it_has_cleaned_up(
    background: BackgroundLoop,
) -> None:
    cleaned: list[float] = []
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])

    async def endless() -> None:
        timer.start()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(time.monotonic())

    with pytest.raises(KeyboardInterrupt):
        background.run(endless())

    timer.join()
    assert len(cleaned) == 1


def test_closing_cancels_running_calls_and_ends_the_thread() -> None:
    background = BackgroundLoop("short-lived")
    begun = threading.Event()
    results: list[str] = []

    async def endless() -> None:
        begun.set()
        await asyncio.sleep(60)

    def wait() -> None:
        try:
            background.run(endless())
        except EngineDied as error:
            results.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    begun.wait(WAIT_S)
    background.close()
    background.close()
    waiter.join(WAIT_S)

    assert results == ["it was closed"]
    assert "short-lived" not in [thread.name for thread in threading.enumerate()]


def test_calls_after_closing_are_refused() -> None:
    background = BackgroundLoop("gone")
    background.close()

    async def answer() -> int:
        return 42

    with pytest.raises(EngineDied):
        background.run(answer())

"""An asyncio loop on a thread of its own, for callers without one. Knows nothing of LLMs."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from config.errors import EngineDied

STOP_TIMEOUT_S = 30.0
"""How long a cancelled call may take to clean up after itself."""

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines for blocking callers, also for those inside a running loop (a notebook)."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, or an interpreter that ends would wait for it before anybody could close it.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._is_closed = False

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller stands on the loop's own thread, and so must not wait for it."""
        return threading.current_thread() is self._thread

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Wait for `call`. Ctrl-C cancels it, waits until it has cleaned up, and is raised."""
        if self._is_closed:
            call.close()
            raise EngineDied("it was closed")
        ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_told(call, ended), self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise EngineDied("it was closed") from error
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(STOP_TIMEOUT_S)
            raise

    def close(self) -> None:
        """Cancel what still runs, stop the loop and its thread. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        self._loop.close()


async def _told(call: Coroutine[Any, Any, Result], ended: threading.Event) -> Result:
    try:
        return await call
    finally:
        ended.set()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


async def run_in_order(
    call: Callable[[int], Coroutine[Any, Any, None]], places: Iterable[int], workers: int
) -> None:
    """Run `call` over `places` in order, `workers` at once. The first error cancels the others."""
    left: Iterator[int] = iter(places)

    async def work() -> None:
        for place in left:
            await call(place)

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # Waited for, so that every request is out of the engine when the caller hears of it.
        await asyncio.gather(*tasks, return_exceptions=True)

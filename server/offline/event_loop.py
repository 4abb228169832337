"""asyncio event loop on its own thread, for synchronous callers."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from config.errors import EngineDied

STOP_TIMEOUT_S = 30.0
"""Time limit for the cleanup of cancelled calls, and for the end of the thread."""

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines for synchronous callers, even if the caller is inside a running loop (a
    notebook)."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # Daemon thread, because the interpreter joins other threads at exit before `close` can be
        # called.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._is_closed = False

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is on the loop's thread, where it must not wait for the loop."""
        return threading.current_thread() is self._thread

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Run `call` and return its result. Ctrl-C cancels the call, and is raised after its
        cleanup or after STOP_TIMEOUT_S. Raises EngineDied after `close`."""
        if self._is_closed:
            call.close()
            raise EngineDied("it was closed")
        ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_signal_end(call, ended), self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise EngineDied("it was closed") from error
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(STOP_TIMEOUT_S)
            raise

    def close(self) -> None:
        """Cancel all calls, and stop the loop and its thread. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        self._loop.close()


async def _signal_end(call: Coroutine[Any, Any, Result], ended: threading.Event) -> Result:
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
    call: Callable[[int], Coroutine[Any, Any, None]], indices: Iterable[int], num_workers: int
) -> None:
    """Run `call` for all `indices`, started in order, at most `num_workers` at a time. The first
    error cancels the other calls."""
    remaining: Iterator[int] = iter(indices)

    async def work() -> None:
        for index in remaining:
            await call(index)

    tasks = [asyncio.create_task(work()) for _ in range(num_workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # Wait, so that no request is left in the engine when the exception reaches the caller.
        await asyncio.gather(*tasks, return_exceptions=True)

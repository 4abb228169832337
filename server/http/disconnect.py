"""Cancels the work for a client that disconnects."""

import asyncio
import sys
from types import TracebackType

from starlette.types import Receive

from server.http.errors import ClientGone

WATCH_DELAY_S = 0.1
"""Delay before the watcher starts. Faster responses run without a watcher, which costs several per
cent of a short request's time."""


class CancelOnDisconnect:
    """Context manager that cancels the task that entered it when the client disconnects, and raises
    ClientGone instead of CancelledError. Enter it after the request body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watcher: asyncio.Future[None] | None = None
        self._is_disconnected = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_DELAY_S, self._watch)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._is_disconnected and isinstance(error, asyncio.CancelledError):
            if sys.version_info >= (3, 11) and task is not None:
                task.uncancel()
            raise ClientGone from None

    def _watch(self) -> None:
        self._watcher = asyncio.ensure_future(_wait_for_disconnect(self._receive))
        self._watcher.add_done_callback(self._cancel)

    def _cancel(self, watcher: "asyncio.Future[None]") -> None:
        # The callback may run after the work has ended, in the same iteration of the event loop.
        if self._task is None or watcher.cancelled():
            return
        self._is_disconnected = True
        self._task.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

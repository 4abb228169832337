"""Clients that hang up while they are answered. Knows no answer."""

import asyncio
import sys
from types import TracebackType

from starlette.types import Receive

from server.http.errors import ClientGone

PATIENCE_S = 0.1
"""What is answered sooner is not watched: a watcher costs a short request several per cent."""


class UntilGone:
    """While it is entered, a client that hangs up cancels the task that entered it, and ClientGone
    is raised in the place of that. The body must have been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watcher: asyncio.Future[None] | None = None
        self._is_gone = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._watch)

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
        if self._is_gone and isinstance(error, asyncio.CancelledError):
            if sys.version_info >= (3, 11) and task is not None:
                task.uncancel()
            raise ClientGone from None

    def _watch(self) -> None:
        self._watcher = asyncio.ensure_future(_hang_up(self._receive))
        self._watcher.add_done_callback(self._cancel)

    def _cancel(self, watcher: "asyncio.Future[None]") -> None:
        # Told in the turn of the loop in which the work came to its end.
        if self._task is None or watcher.cancelled():
            return
        self._is_gone = True
        self._task.cancel()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

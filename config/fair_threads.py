"""FairThreads: a thread pool that shares its threads fairly among clients."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any, ParamSpec, TypeVar, cast

from config.error_frames import clear_frames
from config.errors import Overloaded

P = ParamSpec("P")
R = TypeVar("R")

current_client: ContextVar[str | None] = ContextVar("current_client", default=None)
"""The client of the request that this task handles: the SHA-256 of its API key, or its address.
None outside a request."""


@contextmanager
def client_of_task(name: str) -> Iterator[None]:
    """Set `current_client` to `name` in the block, also for tasks that the block starts."""
    token = current_client.set(name)
    try:
        yield
    finally:
        current_client.reset(token)


class FairThreads(ThreadPoolExecutor):
    """A thread pool that limits each client to `per_client` calls that run or are in the pool's
    queue; further calls of the client wait outside the queue. So a new client waits only for a few
    calls of each other client. Calls outside a request are not limited. A cancelled call is removed
    at once if it waits outside the queue; in the queue it keeps its place but does not run.

    When `max_calls` is reached, a client may still submit calls up to its share, the limit divided
    by the number of clients with calls, so a client that fills the queue does not lock out other
    clients.
    """

    def __init__(
        self,
        threads: int,
        thread_name_prefix: str,
        *,
        per_client: int = 1,
        max_calls: float = math.inf,
        nouns: str = "calls",
    ) -> None:
        """`max_calls`: maximum number of calls that wait or run; a client below its share may
        exceed it. `nouns`: word for the calls in error messages."""
        super().__init__(threads, thread_name_prefix=thread_name_prefix)
        self._per_client = per_client
        self._max_calls = max_calls
        self._nouns = nouns
        self._clients: dict[str, _Client] = {}
        """Clients with calls that wait or run."""
        self._clients_lock = Lock()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Submit a call like ThreadPoolExecutor. Raises Overloaded if the client may not submit
        another call."""
        name = current_client.get()
        call = _Call(partial(fn, *args, **kwargs))
        future = cast("Future[R]", call.future)
        if name is None:
            self._queue(call, call.run)
            return future
        with self._clients_lock:
            self._check_room(name)
            client = self._clients.setdefault(name, _Client())
            has_to_wait = client.num_submitted == self._per_client
            if has_to_wait:
                client.waiting[future] = call
            else:
                client.num_submitted += 1
        if has_to_wait:
            future.add_done_callback(partial(self._forget_cancelled, client))
            return future
        self._enqueue(name, client, call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut the pool down like ThreadPoolExecutor. Calls that wait outside the queue are always
        cancelled."""
        with self._clients_lock:
            waiting = [
                call for client in self._clients.values() for call in client.waiting.values()
            ]
            for client in self._clients.values():
                client.waiting.clear()
        for call in waiting:
            call.cancel()
        super().shutdown(wait=wait, cancel_futures=cancel_futures)

    def _check_room(self, name: str) -> None:
        if self._max_calls == math.inf:
            return
        own = (self._clients.get(name) or _Client()).num_calls
        num_clients = len(self._clients) + (name not in self._clients)
        share = max(1, self._max_calls // num_clients)
        if own < share:
            return
        if sum(client.num_calls for client in self._clients.values()) >= self._max_calls:
            raise Overloaded(
                f"{own} {self._nouns} of this client wait or run, at most {share:g} are allowed"
            )

    def _forget_cancelled(self, client: "_Client", future: "Future[Any]") -> None:
        if future.cancelled():
            with self._clients_lock:
                client.waiting.pop(future, None)

    def _enqueue(self, name: str, client: "_Client", call: "_Call") -> None:
        try:
            self._queue(call, self._run, name, client, call)
        except RuntimeError:
            self._take_next(name, client)
            raise

    def _queue(self, call: "_Call", run: Callable[..., None], *args: object) -> None:
        try:
            running = super().submit(run, *args)
        except RuntimeError:
            call.cancel()
            raise
        running.add_done_callback(lambda done: done.cancelled() and call.cancel())

    def _run(self, name: str, client: "_Client", call: "_Call") -> None:
        call.run()
        following = self._take_next(name, client)
        if following is not None:
            self._enqueue(name, client, following)

    def _take_next(self, name: str, client: "_Client") -> "_Call | None":
        """Remove and return the next waiting call of a client after a call of the client has ended;
        None if no call waits."""
        with self._clients_lock:
            if client.waiting:
                return client.waiting.popitem(last=False)[1]
            client.num_submitted -= 1
            if not client.num_submitted:
                del self._clients[name]
            return None


class _Client:
    """The calls of a client."""

    __slots__ = ("num_submitted", "waiting")

    def __init__(self) -> None:
        self.num_submitted = 0
        """Calls in the pool's queue or running."""
        self.waiting: OrderedDict[object, _Call] = OrderedDict()
        """Calls that wait outside the pool's queue, by future."""

    @property
    def num_calls(self) -> int:
        return self.num_submitted + len(self.waiting)


class _Call:
    """A call and its future. Drops its references to both when the call starts: an exception may
    keep frames alive that refer to the `_Call`."""

    __slots__ = ("_function", "future")

    def __init__(self, function: Callable[[], object]) -> None:
        self.future: Future[object] = Future()
        self._function = function

    def cancel(self) -> bool:
        return self.future.cancel()

    def run(self) -> None:
        future, function = self.future, self._function
        self.future, self._function = Future(), _nothing
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            # A reference cycle of traceback, frames and future would keep the memory of a request
            # alive.
            clear_frames(error)
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        finally:
            del future, function


def _nothing() -> None:
    """Placeholder function of a call that has started."""

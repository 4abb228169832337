"""Clients of a thread pool take turns, and no call is lost."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from waits import WAIT_S

from config.errors import Overloaded
from config.fair_threads import FairThreads, current_client


def submit(
    threads: FairThreads, client: str | None, call: Callable[..., Any], *args: Any
) -> "Future[Any]":
    context = contextvars.copy_context()
    context.run(current_client.set, client)
    return context.run(threads.submit, call, *args)


def test_a_new_client_waits_for_one_call_of_each_other_client() -> None:
    gate, order = threading.Event(), list[str]()
    with FairThreads(1, "test") as threads:
        first = submit(threads, "busy", gate.wait)
        calls = [submit(threads, "busy", order.append, f"busy {i}") for i in range(3)]
        calls += [submit(threads, "other", order.append, f"other {i}") for i in range(2)]
        gate.set()
        for call in [first, *calls]:
            call.result(WAIT_S)

    # "other 0" was in the pool's queue while the busy client's first call ran; "busy 0" entered the
    # queue after that call.
    assert order == ["other 0", "busy 0", "other 1", "busy 1", "busy 2"]


def test_a_client_runs_at_most_its_limit_of_concurrent_calls() -> None:
    gate = threading.Event()
    running = [threading.Event() for _ in range(3)]

    def call(i: int) -> bool:
        running[i].set()
        return gate.wait(WAIT_S)

    with FairThreads(4, "test", per_client=2) as threads:
        calls = [submit(threads, "busy", call, i) for i in range(3)]
        assert running[0].wait(WAIT_S) and running[1].wait(WAIT_S)
        assert submit(threads, "other", int, "7").result(WAIT_S) == 7
        assert submit(threads, None, int, "8").result(WAIT_S) == 8
        assert not running[2].is_set()
        gate.set()
        assert all(each.result(WAIT_S) for each in calls)


def test_the_next_call_runs_after_errors_and_cancelled_calls() -> None:
    gate = threading.Event()
    with FairThreads(1, "test") as threads:
        submit(threads, "busy", gate.wait)
        dropped = submit(threads, "busy", int, "1")
        wrong = submit(threads, "busy", int, "x")
        last = submit(threads, "busy", int, "2")
        assert dropped.cancel()
        gate.set()

        with pytest.raises(ValueError, match="invalid literal"):
            wrong.result(WAIT_S)
        assert last.result(WAIT_S) == 2


def test_shutdown_cancels_all_waiting_calls() -> None:
    gate = threading.Event()
    threads = FairThreads(1, "test")
    running = submit(threads, "busy", gate.wait)
    others = [submit(threads, name, int, "1") for name in ("busy", "busy", "other", "other")]

    threads.shutdown(wait=False, cancel_futures=True)
    gate.set()

    assert running.result(WAIT_S)
    for other in others:
        with pytest.raises(CancelledError):
            other.result(WAIT_S)
    with pytest.raises(RuntimeError):
        submit(threads, "late", int, "1")
    with pytest.raises(RuntimeError):
        submit(threads, "late", int, "1")


def test_clients_of_an_event_loop_take_turns() -> None:
    gate, order = threading.Event(), list[str]()

    async def request(client: str, count: int) -> None:
        current_client.set(client)
        await asyncio.gather(
            *(asyncio.to_thread(order.append, f"{client} {i}") for i in range(count))
        )

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(FairThreads(1, "requests"))
        blocker = loop.run_in_executor(None, gate.wait)
        tasks = [loop.create_task(request("a", 3)), loop.create_task(request("b", 1))]
        await asyncio.sleep(0.05)
        gate.set()
        await asyncio.gather(blocker, *tasks)

    asyncio.run(main())

    assert order == ["a 0", "b 0", "a 1", "a 2"]


def test_a_client_that_fills_the_queue_does_not_exclude_another_client() -> None:
    gate = threading.Event()
    with FairThreads(1, "test", max_calls=4, nouns="texts") as threads:
        calls = [submit(threads, "busy", gate.wait, WAIT_S) for _ in range(4)]
        with pytest.raises(Overloaded, match="4 texts of this client wait or run, at most 4 are"):
            submit(threads, "busy", gate.wait, WAIT_S)
        calls += [submit(threads, "other", int, "1") for _ in range(2)]
        with pytest.raises(Overloaded, match="2 texts of this client wait or run, at most 2 are"):
            submit(threads, "other", int, "1")
        assert submit(threads, None, int, "1") is not None
        gate.set()
        assert [call.result(WAIT_S) for call in calls] == [True] * 4 + [1, 1]


def test_a_cancelled_call_leaves_the_queue() -> None:
    gate = threading.Event()
    with FairThreads(1, "test", max_calls=3) as threads:
        submit(threads, "busy", gate.wait, WAIT_S)
        for _ in range(3):
            waiting = [submit(threads, "busy", int, "1") for _ in range(2)]
            assert all(call.cancel() for call in waiting)
        last = submit(threads, "busy", int, "2")
        gate.set()
        assert last.result(WAIT_S) == 2

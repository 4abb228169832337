"""Clients of a thread pool take turns, and no call is lost."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from http_rig import in_memory

from server.http import body
from server.http.fair_threads import FairThreads, current_client


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
            call.result(timeout=10)

    # The queue had the other client's call before the first call of the busy client ended.
    assert order == ["other 0", "busy 0", "other 1", "busy 1", "busy 2"]


def test_a_client_runs_no_more_calls_at_once_than_it_may() -> None:
    gate = threading.Event()
    running = [threading.Event() for _ in range(3)]

    def call(i: int) -> bool:
        running[i].set()
        return gate.wait(10)

    with FairThreads(4, "test", per_client=2) as threads:
        calls = [submit(threads, "busy", call, i) for i in range(3)]
        assert running[0].wait(10) and running[1].wait(10)
        assert submit(threads, "other", int, "7").result(timeout=10) == 7
        assert submit(threads, None, int, "8").result(timeout=10) == 8
        assert not running[2].is_set()
        gate.set()
        assert all(each.result(timeout=10) for each in calls)


def test_errors_and_cancelled_calls_let_the_next_call_run() -> None:
    gate = threading.Event()
    with FairThreads(1, "test") as threads:
        submit(threads, "busy", gate.wait)
        dropped = submit(threads, "busy", int, "1")
        wrong = submit(threads, "busy", int, "x")
        last = submit(threads, "busy", int, "2")
        assert dropped.cancel()
        gate.set()

        with pytest.raises(ValueError, match="invalid literal"):
            wrong.result(timeout=10)
        assert last.result(timeout=10) == 2


def test_shutdown_cancels_calls_in_the_queue_and_outside_of_it() -> None:
    gate = threading.Event()
    threads = FairThreads(1, "test")
    running = submit(threads, "busy", gate.wait)
    others = [submit(threads, name, int, "1") for name in ("busy", "busy", "other", "other")]

    threads.shutdown(wait=False, cancel_futures=True)
    gate.set()

    assert running.result(timeout=10)
    for other in others:
        with pytest.raises(CancelledError):
            other.result(timeout=10)
    with pytest.raises(RuntimeError):
        submit(threads, "late", int, "1")
    with pytest.raises(RuntimeError):
        submit(threads, "late", int, "1")


def test_an_event_loop_runs_its_calls_in_turns() -> None:
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


async def test_the_client_of_a_request_is_its_key_or_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients: list[str | None] = []
    validate = body.validate_fields

    def noted(kind: Any, fields: dict[str, Any]) -> Any:
        clients.append(current_client.get())
        return validate(kind, fields)

    monkeypatch.setattr(body, "validate_fields", noted)
    # The body is validated on a thread.
    request = {"prompt": "x", "max_tokens": 1, "stop_token_ids": [3] * body.MANY_BYTES}
    async with in_memory(api_keys=("a", "b")) as rig:
        for key in "aba":
            headers = {"Authorization": f"Bearer {key}"}
            answer = await rig.http.post("/v1/completions", json=request, headers=headers)
            assert answer.status_code == 200, answer.text
    async with in_memory() as rig:
        await rig.http.post("/v1/completions", json=request)

    first, second, third, address = clients
    assert first == third != second
    assert address == "127.0.0.1"
    assert current_client.get() is None

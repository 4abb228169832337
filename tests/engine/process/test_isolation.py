"""engine/process/isolation.py: a call that crashes, hangs or grows fails alone and soon."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from live import alive, children_of
from msgspec import structs
from waits import WAIT_S, wait_for

from config.errors import EngineDied, Overloaded, UserError
from engine.process import isolation
from engine.process.isolation import (
    CallBroken,
    CallCancelled,
    CallInterrupted,
    CallKilled,
    Cancellation,
    ForkServer,
    Limits,
    failures_of_requests,
)

LIMITS = Limits(cpu_s=60.0, wall_s=60.0, memory_bytes=128 * 2**20, stack_bytes=2**20)
LITTLE_CPU = structs.replace(LIMITS, cpu_s=0.1)
LITTLE_TIME = structs.replace(LIMITS, wall_s=1.2)
"""Only calls that must exceed a limit have a small limit."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer("tests.support.isolated_calls", b"state, ", LIMITS)
    made.start()
    yield made
    made.close()


def test_a_call_runs_on_the_prepared_state_in_its_own_process(server: ForkServer) -> None:
    payload = os.urandom(3 * 2**20)

    echoed = server.call(b"echo " + payload)
    first, second = (server.call(b"pids").split() for _ in range(2))

    assert echoed == b"state, " + payload
    assert first[0] == second[0] and first[1] != second[1]


@pytest.mark.parametrize(
    ("payload", "limits", "reason", "kind"),
    [
        (b"crash", LIMITS, "was killed by SIGSEGV", CallKilled),
        (b"exit", LIMITS, "exited with code 5", CallKilled),
        (b"spin", LITTLE_CPU, "longer than 0.1 s of processor time", CallKilled),
        (b"allocate 500000000", LIMITS, "more than 128 MiB", CallKilled),
        (b"sleep", LITTLE_TIME, "longer than 1.2 s", CallInterrupted),
        (b"kill", LIMITS, "was killed by SIGKILL", CallInterrupted),
        (b"stop", LITTLE_TIME, "longer than 1.2 s", CallInterrupted),
    ],
)
def test_a_crash_a_hang_or_memory_growth_fails_only_its_call(
    server: ForkServer, payload: bytes, limits: Limits, reason: str, kind: type[Exception]
) -> None:
    prepared_in = server.call(b"pids").split()[0]
    start = time.monotonic()

    with pytest.raises(CallKilled, match=reason) as raised:
        server.call(payload, limits)

    assert type(raised.value) is kind
    assert time.monotonic() - start < 30
    assert server.call(b"pids").split()[0] == prepared_in


def test_exceptions_are_reported_and_memory_within_the_limit_is_available(
    server: ForkServer,
) -> None:
    with pytest.raises(CallBroken, match="ValueError: other"):
        server.call(b"other")

    assert server.call(b"allocate 50000000") == b"50000000"


def settle(process: psutil.Process) -> None:
    """Wait until the last call's process was reaped, which happens after its answer."""
    wait_for(lambda: not process.children())
    time.sleep(0.05)


def test_parallel_calls_leave_no_process_and_no_descriptor(server: ForkServer) -> None:
    process = psutil.Process(server.pid)
    server.call(b"echo")
    settle(process)
    before = process.num_fds()
    payloads = [b"sleep", *[b"echo %d" % n for n in range(20)], b"crash"]

    def run(payload: bytes) -> bytes | None:
        try:
            return server.call(payload, LITTLE_TIME if payload == b"sleep" else LIMITS)
        except CallKilled:
            return None

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(run, payloads))

    assert results == [None, *[b"state, %d" % n for n in range(20)], None]
    settle(process)
    assert process.children() == [] and process.num_fds() == before


def test_a_fork_server_that_is_killed_is_started_again() -> None:
    server = ForkServer("tests.support.isolated_calls", b"", LIMITS)
    server.call(b"echo")
    first = server.pid
    assert first is not None

    os.kill(first, signal.SIGKILL)
    echoed = server.call(b"echo again")

    assert echoed == b"again" and server.pid != first
    server.close()


def test_a_stopped_fork_server_is_replaced_and_its_processes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "STUCK_S", 1.0)
    server = ForkServer("tests.support.isolated_calls", b"", LIMITS)
    server.call(b"echo")
    assert server.pid is not None
    stopped = psutil.Process(server.pid)

    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(server.call, b"sleep", LITTLE_TIME)
        while not (forks := children_of(stopped.pid)):
            time.sleep(0.01)
        stopped.suspend()
        echoed = list(threads.map(server.call, [b"echo 1", b"echo 2"]))
        with pytest.raises(CallInterrupted):
            running.result()

    assert echoed == [b"1", b"2"] and server.pid != stopped.pid
    assert not stopped.is_running() and not any(map(alive, forks))
    server.close()


def test_a_fork_server_that_is_stopped_while_it_prepares_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "STUCK_S", 1.0)
    server = ForkServer("tests.support.isolated_calls", b"", LIMITS)
    server.start()
    assert server.pid is not None
    stopped = psutil.Process(server.pid)
    stopped.suspend()

    assert server.call(b"echo again") == b"again"
    assert server.pid != stopped.pid
    server.close()


def test_starting_does_not_wait_for_a_process_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "python_command", lambda *_: ["sleep", "60"])
    server = ForkServer("tests.support.isolated_calls", bytes(4 * 2**20), LIMITS)

    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(server.start)
        try:
            started.result(WAIT_S)
        finally:
            if server.pid is not None:
                is_running = psutil.pid_exists(server.pid)
                os.kill(server.pid, signal.SIGKILL)

    assert is_running
    server.close()


def test_the_preparation_of_a_fork_server_has_a_longer_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "STUCK_S", 1.0)
    server = ForkServer("tests.support.isolated_calls", b"spin 2", LIMITS)
    server.start()
    pid = server.pid

    assert server.call(b"pids").split()[0] == b"%d" % (pid or 0)
    server.close()


def test_a_fork_server_that_cannot_prepare_interrupts_the_call() -> None:
    server = ForkServer("tests.support.isolated_calls", b"fail", LIMITS)

    with pytest.raises(CallInterrupted, match="cannot be started"):
        server.call(b"echo")
    server.close()


def test_closing_ends_calls_that_run_and_every_process() -> None:
    server = ForkServer("tests.support.isolated_calls", b"", LIMITS)
    server.call(b"echo")
    assert server.pid is not None
    pid = server.pid

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.call, b"sleep")
        while not (forks := children_of(pid)):
            time.sleep(0.01)
        server.close()
        with pytest.raises(EngineDied, match="was closed"):
            running.result(WAIT_S)

    wait_for(lambda: not any(map(alive, [pid, *forks])))


def test_a_call_may_have_its_own_limits(server: ForkServer) -> None:
    little_memory = structs.replace(LIMITS, memory_bytes=32 * 2**20)

    with pytest.raises(CallKilled, match=r"longer than 0\.1 s of processor time"):
        server.call(b"spin", LITTLE_CPU)
    with pytest.raises(CallKilled, match="more than 32 MiB"):
        server.call(b"allocate 50000000", little_memory)
    assert server.call(b"allocate 50000000") == b"50000000"


def test_a_cancelled_call_ends_with_its_process() -> None:
    server = ForkServer("tests.support.isolated_calls", b"", LIMITS)
    server.call(b"echo")
    assert server.pid is not None
    settle(psutil.Process(server.pid))
    cancellation = Cancellation()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.call, b"spin", cancellation=cancellation)
        while not children_of(server.pid):
            time.sleep(0.01)
        cancellation.cancel()
        with pytest.raises(CallCancelled):
            running.result(WAIT_S)

    settle(psutil.Process(server.pid))
    assert children_of(server.pid) == []
    with pytest.raises(CallCancelled):
        server.call(b"echo", cancellation=cancellation)
    assert server.call(b"echo again") == b"again"
    server.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CallInterrupted("its time ended"), Overloaded("reading was interrupted: its time ended")),
        (CallKilled("it crashed"), UserError("a word is refused: it crashed", param="word")),
        (CallBroken("it raised"), UserError("a word is refused: it raised", param="word")),
    ],
)
def test_a_call_that_fails_refuses_its_request(
    error: Exception, expected: UserError | Overloaded
) -> None:
    with (
        pytest.raises(type(expected)) as raised,
        failures_of_requests("reading", "a word is refused", param="word"),
    ):
        raise error

    assert str(raised.value) == str(expected)
    assert getattr(raised.value, "param", None) == getattr(expected, "param", None)

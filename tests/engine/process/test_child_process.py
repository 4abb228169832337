"""engine/process/child_process.py: exit despite busy threads, and messages to a child."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waits import WAIT_S, wait_for

from engine.process import child_process
from engine.process.child_process import PARENT_DIED, ChildProcess, ProcessEnd

ROOT = Path(__file__).parents[3]
EXIT_SCRIPT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from engine.process.child_process import bound_exit

ThreadPoolExecutor(1).submit(time.sleep, float(sys.argv[1]))
print("flushed", end="")
bound_exit(7, 0.2)
sys.exit(3)
"""
CHILD_SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import msgspec
from engine.process.child_process import exit_with_parent, read_orders

log = open(read_orders(str), "w", buffering=1)

def write(payload):
    print(msgspec.msgpack.decode(payload), file=log)

exit_with_parent(lambda: print("the parent died", file=log), write)
print("started", file=log)
time.sleep(60)
"""


def _ended(seconds: str) -> tuple[int, str, float]:
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT, seconds],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, time.monotonic() - started_s


def test_a_busy_thread_delays_the_exit_for_a_limited_time() -> None:
    code, output, took_s = _ended("50")

    assert (code, output) == (7, "flushed")
    assert took_s < 40


def test_an_exit_without_busy_threads_keeps_its_exit_code_and_output() -> None:
    code, output, _ = _ended("0")

    assert (code, output) == (3, "flushed")


class Child:
    """A child that writes its messages to `log`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.has_ended = threading.Event()
        self.process = ChildProcess(
            "the child",
            [sys.executable, "-c", CHILD_SCRIPT, str(ROOT)],
            str(log),
            on_exit=self._ended,
            stop_signal=signal.SIGTERM,
        )

    def _ended(self, end: ProcessEnd) -> None:
        self.has_ended.set()

    def wait_for(self, line: str) -> None:
        end_s = time.monotonic() + 60
        while not self.log.exists() or line not in self.log.read_text().splitlines():
            assert time.monotonic() < end_s
            time.sleep(0.02)


def test_messages_arrive_in_order_from_several_threads(tmp_path: Path) -> None:
    child = Child(tmp_path / "log")

    def send(name: str) -> None:
        for at in range(100):
            child.process.send([name, at])

    senders = [threading.Thread(target=send, args=(name,)) for name in "ab"]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    child.process.send("last")
    child.wait_for("last")
    lines = child.log.read_text().splitlines()
    child.process.close(5)

    for name in "ab":
        received = [line for line in lines if line.startswith(f"['{name}'")]
        assert received == [str([name, at]) for at in range(100)]


def test_a_child_that_hangs_is_killed_when_its_pipe_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    child = Child(tmp_path / "log")
    child.wait_for("started")
    os.kill(child.process.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    while not child.has_ended.is_set() and time.monotonic() < started_s + WAIT_S:
        child.process.send("x" * 1000)

    assert child.process.poll() == -signal.SIGKILL
    assert "the child does not read its messages and is killed" in caplog.text
    child.process.close()


def test_a_child_that_stays_stopped_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "STOPPED_S", 0.2)
    child = Child(tmp_path / "log")
    child.wait_for("started")

    os.kill(child.process.pid, signal.SIGSTOP)

    assert child.has_ended.wait(WAIT_S)
    assert child.process.poll() == -signal.SIGKILL
    assert "the child was stopped by a signal for 0.2 s and is killed" in caplog.text
    child.process.close()


def test_a_child_that_is_continued_in_time_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "STOPPED_S", 2.0)
    child = Child(tmp_path / "log")
    child.wait_for("started")
    for _ in range(2):
        os.kill(child.process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        os.kill(child.process.pid, signal.SIGCONT)

    assert not child.has_ended.wait(4.0)
    child.process.send("after")
    child.wait_for("after")
    child.process.close(5)


def test_a_child_that_is_continued_after_the_timer_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal has stopped and continues the parent, too: the parent's timer ends at once."""
    monkeypatch.setattr(child_process, "STOPPED_S", 0.01)
    monkeypatch.setattr(child_process, "CONTINUED_S", 3.0)
    child = Child(tmp_path / "log")
    child.wait_for("started")

    os.kill(child.process.pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(child.process.pid, signal.SIGCONT)

    assert not child.has_ended.wait(5.0)
    child.process.close(5)


def test_a_stopped_child_is_closed_at_once(tmp_path: Path) -> None:
    child = Child(tmp_path / "log")
    child.wait_for("started")
    os.kill(child.process.pid, signal.SIGSTOP)
    # A SIGTERM before the stop would end the child.
    wait_for(lambda: child_process._is_stopped(child.process.pid))

    child.process.close(0)

    assert child.process.poll() == -signal.SIGKILL
    kill = child.process._kill_stopped
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    wait_for(lambda: not any(it.is_alive() for it in timers if it.function == kill))


def test_a_message_to_a_child_that_has_ended_is_lost(tmp_path: Path) -> None:
    child = Child(tmp_path / "log")
    child.wait_for("started")
    os.kill(child.process.pid, signal.SIGKILL)
    assert child.has_ended.wait(WAIT_S)
    child.process.send("too late")
    child.process.close()
    child.process.send("closed")


def test_a_child_ends_with_its_parent_after_messages(tmp_path: Path) -> None:
    child = Child(tmp_path / "log")
    child.process.send("first")
    child.wait_for("first")
    child.process._stdin.close()

    assert child.has_ended.wait(WAIT_S)
    assert child.process.poll() == PARENT_DIED
    assert child.log.read_text().splitlines()[-1] == "the parent died"
    child.process.close()

"""A real `gaudiserve serve` in a separate process, and inspection of what it leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from ports import free_port
from waits import WAIT_S

ROOT = Path(__file__).parents[2]
START_S = 240.0
"""Time limit of a start, which imports torch and may convert a checkpoint."""


def children_of(pid: int) -> list[int]:
    """All living descendants, from /proc."""
    found: list[int] = []
    for child in _direct_children(pid):
        found += [child, *children_of(child)]
    return found


def _direct_children(pid: int) -> list[int]:
    result: list[int] = []
    # The process or one of its threads may end in the meantime.
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                result += [int(p) for p in task.read_text().split()]
    return result


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of process `pid`."""
    # User and system time may be counted in whole ticks of 10 ms, and work that a timer starts runs
    # at the end of a tick: 10 short wake-ups per second may seem to take any part of 0.1 s.
    exact = [*Path(f"/proc/{pid}/task").glob("*/schedstat")]
    if exact:
        return sum(int(file.read_text().split()[0]) for file in exact) / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command_of(pid: int) -> str:
    """Command line of a process; empty if it has ended."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode(errors="replace")


def workers_of(pid: int) -> list[int]:
    """Engines, workers and their test doubles (counting_worker.py) among the living descendants.
    Helpers that isolate third-party code may start at any time."""
    kinds = ("gaudiserve: engine", "gaudiserve: worker", "counting_worker")
    return [child for child in children_of(pid) if any(kind in command_of(child) for kind in kinds)]


def own_workers() -> list[int]:
    """Workers of the engines in this process, in rank order, without workers of other tests'
    servers."""
    children = _direct_children(os.getpid())
    return sorted(child for child in children if "gaudiserve: worker" in command_of(child))


class LiveServer:
    """A daemon whose output goes to `log`."""

    def __init__(
        self,
        model: str,
        log: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        python: str = sys.executable,
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        # Above the test's folder, whose name may be too long for a socket path. The name is random,
        # because the system may return a port twice.
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="run-", dir=log.parent.parent))
        environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.runtime_dir),
            "TMPDIR": str(self.runtime_dir),
            **(env or {}),
        }
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [python, "-m", "gaudiserve", "serve", model, f"--port={self.port}", *flags],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self, timeout_s: float = START_S) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server exited: {self.text()}")
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/ready").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s: {self.text()}")

    def ask(self, path: str, body: object = None) -> httpx.Response:
        """GET, or POST with a body, over a new connection: any of the API servers may receive
        it."""
        method = "GET" if body is None else "POST"
        # Unverified, because reading the machine's certificates takes longer than the answer.
        with httpx.Client(base_url=self.url, timeout=WAIT_S, verify=False) as http:
            return http.request(method, path, json=body)

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-8000:]

    def wait_exit(self, timeout_s: float = WAIT_S) -> int:
        return self.process.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def find(self, words: str) -> int:
        """The pid of the descendant whose command line contains `words`."""
        return next(pid for pid in children_of(self.pid) if words in command_of(pid))

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(WAIT_S)

    def leftovers(self) -> list[Path]:
        """Files the daemon left in its runtime folder."""
        return [p for p in self.runtime_dir.rglob("*") if not p.is_dir()]


@contextlib.contextmanager
def running(
    model: str,
    log: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    python: str = sys.executable,
    ready_s: float = START_S,
) -> Iterator[LiveServer]:
    """A ready server, stopped at the end."""
    server = LiveServer(model, log, *flags, env=env, python=python)
    try:
        server.wait_ready(ready_s)
        yield server
    finally:
        server.close()

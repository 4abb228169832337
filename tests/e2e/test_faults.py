"""Killed processes, signals and client disconnects, with a whole server."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from delays import least
from live import LiveServer, alive, children_of, cpu_seconds, running, workers_of
from waits import WAIT_S, wait_for

LONG = {"model": "tiny", "prompt": "go", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
"""A request that is still running when its server is killed on a busy machine."""
FLAGS = (
    "--served-model-name=tiny",
    "--dtype=float32",
    "--no-resume",
    '--hf-overrides={"max_position_embeddings": 65536}',
)


@pytest.fixture(params=[pytest.param("uni", marks=pytest.mark.slow), "mp"])
def fresh(tiny_model: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with running(tiny_model, tmp_path / "log", *FLAGS, f"--executor={request.param}") as live:
        yield live


@pytest.fixture(scope="module")
def kept(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that no test ends."""
    with running(tiny_model, tmp_path_factory.mktemp("kept") / "log", *FLAGS) as live:
        yield live


class Stream(threading.Thread):
    """Reads one stream to its end and stores its events."""

    def __init__(self, server: LiveServer, body: dict[str, object]):
        super().__init__(daemon=True)
        self.url = f"{server.url}/v1/completions"
        self.body = body
        self.events: list[str] = []
        self.status = 0
        self.begun = threading.Event()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=60) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line:
                        self.events.append(line)
                        self.begun.set()
        except httpx.TransportError as error:
            self.events.append(f"transport: {error!r}")
        self.begun.set()


def _metric(server: LiveServer, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def _errors(server: LiveServer) -> list[str]:
    return [line for line in server.text().splitlines() if " ERROR " in line]


def test_a_killed_engine_fails_open_requests_and_ends_the_server(fresh: LiveServer) -> None:
    streams = [Stream(fresh, LONG) for _ in range(3)]
    waiting = Stream(fresh, {**LONG, "stream": False})
    for stream in (*streams, waiting):
        stream.start()
    for stream in streams:
        assert stream.begun.wait(WAIT_S)
    family = children_of(fresh.pid)
    assert family

    os.kill(fresh.find("gaudiserve: engine"), signal.SIGKILL)

    for stream in (*streams, waiting):
        stream.join(WAIT_S)
        assert not stream.is_alive()
    for stream in streams:
        assert "error" in json.loads(stream.events[-2].removeprefix("data: "))
        assert stream.events[-1] == "data: [DONE]"
    assert waiting.status in (500, 503)
    assert fresh.wait_exit() != 0
    wait_for(lambda: not any(alive(pid) for pid in family))
    assert fresh.leftovers() == []
    assert len(_errors(fresh)) == 1
    assert "was killed by SIGKILL" in _errors(fresh)[0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_failure_of_the_engine_is_logged_once(
    tiny_model: str, tmp_path: Path, count: int
) -> None:
    flags = ("--num-gpu-blocks-override=2", f"--api-server-count={count}")
    live = LiveServer(tiny_model, tmp_path / "log", *FLAGS, *flags)
    try:
        code = live.wait_exit(60)
    finally:
        live.close()

    assert code == 2
    # A single API server prints the reason as its last line and logs nothing.
    (error,) = live.text().splitlines()[-1:] if count == 1 else _errors(live)
    assert "lower --max-model-len to 64 or less, or raise --num-gpu-blocks-override" in error
    assert live.text().count("one full context of") == 1
    assert len(_errors(live)) == count - 1
    assert error.startswith("gaudiserve: the KV cache holds") or count > 1


def test_a_killed_worker_ends_the_server(tiny_model: str, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path / "log", *FLAGS, "--executor=mp") as live:
        family = children_of(live.pid)
        assert len(family) >= 2
        worker = workers_of(live.find("gaudiserve: engine"))[-1]
        stream = Stream(live, LONG)
        stream.start()
        assert stream.begun.wait(WAIT_S)

        os.kill(worker, signal.SIGKILL)

        stream.join(WAIT_S)
        assert not stream.is_alive()
        assert "error" in stream.events[-2]
        assert live.wait_exit() != 0
        wait_for(lambda: not any(alive(pid) for pid in family))
        assert live.leftovers() == []
        assert len(_errors(live)) == 1
        # Three times: in the error, in the access log of the request, and as the reason in the last
        # line.
        assert live.text().count("was killed by SIGKILL") == 3
        assert live.text().rstrip().endswith("was killed by SIGKILL")


def test_a_killed_api_server_leaves_no_orphans(fresh: LiveServer) -> None:
    family = children_of(fresh.pid)
    assert family

    fresh.signal(signal.SIGKILL)

    wait_for(lambda: not any(alive(pid) for pid in family))


def test_sigterm_to_all_processes_drains_and_exits_zero(fresh: LiveServer) -> None:
    stream = Stream(fresh, {**LONG, "max_tokens": 300})
    stream.start()
    assert stream.begun.wait(WAIT_S)

    # Service managers send the signal to every process of a service.
    for pid in (*children_of(fresh.pid), fresh.pid):
        os.kill(pid, signal.SIGTERM)

    stream.join(WAIT_S)
    assert stream.events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in stream.events[-2].replace(" ", "")
    assert fresh.wait_exit() == 0
    assert fresh.leftovers() == []


def test_sigterm_aborts_requests_that_outlast_the_timeout(tiny_model: str, tmp_path: Path) -> None:
    with running(
        tiny_model, tmp_path / "log", *FLAGS, "--shutdown-timeout=0.2", "--max-num-seqs=2"
    ) as live:
        stream = Stream(live, LONG)
        stream.start()
        assert stream.begun.wait(WAIT_S)

        live.signal(signal.SIGTERM)

        stream.join(WAIT_S)
        assert live.wait_exit() == 0
        assert "error" in stream.events[-2]
        assert stream.events[-1] == "data: [DONE]"


def test_a_second_sigint_stops_at_once(fresh: LiveServer) -> None:
    stream, waiting = Stream(fresh, LONG), Stream(fresh, {**LONG, "stream": False})
    stream.start()
    waiting.start()
    assert stream.begun.wait(WAIT_S)
    family = children_of(fresh.pid)

    fresh.signal(signal.SIGINT)
    wait_for(lambda: fresh.ask("/ready").status_code == 503)
    begun = time.monotonic()
    fresh.signal(signal.SIGINT)
    fresh.wait_exit()

    assert "2 requests cancelled" in fresh.text()
    assert fresh.text().splitlines()[-1].endswith("Stopped at once")
    # A drain would take 30 s.
    assert time.monotonic() - begun < 25
    wait_for(lambda: not any(alive(pid) for pid in family))
    stream.join(WAIT_S)
    waiting.join(WAIT_S)
    assert "The server is shutting down." in stream.events[-2]
    assert (waiting.status, waiting.events[0][:9]) == (503, '{"error":')


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_all_sequences_of_the_request(kept: LiveServer, stream: bool) -> None:
    body = {**LONG, "n": 3, "stream": stream, "temperature": 1}
    aborted = _metric(kept, 'vllm:request_success_total{engine="0",finished_reason="abort"')
    content = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"

    def abort_s() -> float:
        with socket.create_connection(("127.0.0.1", kept.port), timeout=WAIT_S) as connection:
            connection.sendall((head + content).encode())
            wait_for(lambda: _metric(kept, "vllm:num_requests_running") == 3)
        begun_s = time.monotonic()
        wait_for(lambda: _metric(kept, "vllm:num_requests_running") == 0)
        return time.monotonic() - begun_s

    assert least(abort_s, 1.5) < 1.5

    assert _metric(kept, "vllm:kv_cache_usage_perc") == 0
    after = _metric(kept, 'vllm:request_success_total{engine="0",finished_reason="abort"')
    assert after > aborted


def test_an_idle_server_uses_little_cpu_time(tiny_model: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        # Start the servers in parallel, since most of the test is waiting.
        daemons = [
            stack.enter_context(
                contextlib.closing(
                    LiveServer(tiny_model, tmp_path / executor, *FLAGS, f"--executor={executor}")
                )
            )
            for executor in ("uni", "mp")
        ]
        for daemon in daemons:
            daemon.wait_ready()
        families = [[daemon.pid, *children_of(daemon.pid)] for daemon in daemons]
        time.sleep(0.5)

        def most_used() -> float:
            """The share of a core that the busier server used for 4 s."""
            before = [sum(map(cpu_seconds, family)) for family in families]
            time.sleep(4)
            after = [sum(map(cpu_seconds, family)) for family in families]
            return max(late - early for late, early in zip(after, before, strict=True)) / 4

        # The same work takes longer beside other processes, possibly during a whole window.
        assert least(most_used, 0.02) < 0.02

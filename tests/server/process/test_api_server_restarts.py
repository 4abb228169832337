"""One of several API servers dies: the others continue, the engine aborts its requests, and a new
API server takes its place on the port."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx
import pytest
from live import LiveServer, alive, children_of, command_of, running
from tiny_models import make_tiny
from waits import wait_for

NUM_STREAMS = 12
NUM_TOKENS = 1200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return str(make_tiny("llama", folder, max_position_embeddings=4096))


@pytest.fixture
def daemon(model: str, tmp_path: Path) -> Iterator[LiveServer]:
    flags = ("--served-model-name=tiny", "--dtype=float32", "--api-server-count=2")
    with running(model, tmp_path / "log", *flags, "--max-api-server-restarts=2") as live:
        wait_for(lambda: all(live.ask("/ready").status_code == 200 for _ in range(12)))
        yield live


def metric(live: LiveServer, name: str) -> float:
    lines = live.ask("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def api_servers(live: LiveServer) -> list[int]:
    """Process ids of the API servers, oldest first."""
    found = [pid for pid in children_of(live.pid) if "gaudiserve: API server" in command_of(pid)]
    return sorted(found)


class Stream(Thread):
    """Reads a long stream. `text` is None if the connection broke."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__(daemon=True)
        self.live = live
        self.text: str | None = ""
        self.num_tokens = 0
        self.start()

    def run(self) -> None:
        body = {"prompt": "go", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "stream_options": {"include_usage": True}}
        try:
            url = f"{self.live.url}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        self.text = (self.text or "") + "".join(
                            choice["text"] for choice in event["choices"]
                        )
                        usage = event.get("usage") or {}
                        self.num_tokens = usage.get("completion_tokens", self.num_tokens)
        except httpx.TransportError:
            self.text = None


def test_the_death_of_an_api_server_does_not_affect_the_streams_of_another(
    daemon: LiveServer,
) -> None:
    alone = Stream(daemon)
    alone.join(60)
    victim, survivor = api_servers(daemon)
    streams = [Stream(daemon) for _ in range(NUM_STREAMS)]
    wait_for(lambda: all(stream.text for stream in streams))
    before = metric(daemon, "vllm:prompt_tokens_total")

    os.kill(victim, signal.SIGKILL)

    for stream in streams:
        stream.join(60)
    broken = [stream for stream in streams if stream.text is None]
    whole = [stream for stream in streams if stream.text is not None]
    # The kernel assigns each connection to one of the servers.
    assert broken and whole
    assert {(stream.text, stream.num_tokens) for stream in whole} == {(alone.text, NUM_TOKENS)}
    # The engine has aborted the requests of the dead server; when idle, it checks that no block is
    # lost.
    wait_for(lambda: metric(daemon, "vllm:num_requests_running") == 0)
    assert metric(daemon, "vllm:kv_cache_usage_perc") == 0
    assert f"{len(broken)} requests of it are aborted" in daemon.text()
    wait_for(lambda: metric(daemon, "gaudiserve:api_server_restarts_total") == 1)
    successor = next(pid for pid in api_servers(daemon) if pid != survivor)
    assert alive(survivor) and successor != victim
    assert (
        "killed by SIGKILL: it is started again, restart 1 of at most 2 in a row" in daemon.text()
    )
    assert metric(daemon, "vllm:prompt_tokens_total") >= before

    # With the other server stopped, the new server alone serves the port, and reuses no key of its
    # predecessor.
    os.kill(survivor, signal.SIGSTOP)
    try:
        wait_for(lambda: has_answer(daemon))
    finally:
        os.kill(survivor, signal.SIGCONT)
    again = [Stream(daemon) for _ in range(NUM_STREAMS)]
    for stream in again:
        stream.join(60)
    assert {stream.text for stream in again} == {alone.text}
    assert daemon.process.poll() is None


def has_answer(live: LiveServer) -> bool:
    """Whether a connection is answered while the other API server is stopped."""
    body = {"prompt": "hi", "max_tokens": 2}
    try:
        answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=5.0)
    except httpx.TimeoutException:
        return False
    return answer.status_code == 200


def test_an_api_server_that_cannot_read_the_checkpoint_is_started_again_until_it_can(
    model: str, daemon: LiveServer
) -> None:
    file = Path(model, "tokenizer.json")
    whole = file.read_bytes()
    body = {"prompt": "hi", "max_tokens": 2}
    try:
        file.write_bytes(whole[: len(whole) // 2])
        os.kill(api_servers(daemon)[0], signal.SIGKILL)
        # More often than --max-api-server-restarts.
        wait_for(lambda: "restart 3 in a row" in daemon.text())
        assert daemon.ask("/v1/completions", body).status_code == 200
    finally:
        file.write_bytes(whole)

    wait_for(lambda: daemon.text().count("Ready after") == 3)
    assert "tokenizer.json cannot be read" in daemon.text()
    assert daemon.process.poll() is None


def test_an_api_server_that_dies_too_often_ends_the_server(daemon: LiveServer) -> None:
    for number in range(2):
        killed = api_servers(daemon)[-1]
        os.kill(killed, signal.SIGKILL)
        # A request to the dying server would fail.
        wait_for(lambda: killed not in api_servers(daemon))  # noqa: B023 waited for here
        wait_for(lambda: len(api_servers(daemon)) == 2)
        restarts = "gaudiserve:api_server_restarts_total"
        wait_for(lambda: metric(daemon, restarts) == number + 1)  # noqa: B023 waited for here
        wait_for(lambda: daemon.text().count("Ready after") == 3 + number)  # noqa: B023 waited for here
    family = children_of(daemon.pid)

    os.kill(api_servers(daemon)[-1], signal.SIGKILL)

    assert daemon.wait_exit() != 0
    assert not any(alive(pid) for pid in family)
    assert daemon.leftovers() == []

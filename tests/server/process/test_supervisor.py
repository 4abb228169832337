"""Several API servers on one port and one engine: real processes, real signals."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx
import pytest
from live import LiveServer, alive, children_of, command_of, running
from tiny_models import make_tiny
from waits import WAIT_S, wait_for

ROUNDS = 16
TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return str(make_tiny("llama", folder, max_position_embeddings=65536))


@contextmanager
def started(model: str, log: Path) -> Iterator[LiveServer]:
    flags = ("--served-model-name=tiny", "--dtype=float32", "--api-server-count=2", "--no-resume")
    with running(model, log, *flags) as live:
        # /ready is the state of a single API server: wait until all are ready.
        wait_for(lambda: all(live.ask("/ready").status_code == 200 for _ in range(ROUNDS)))
        yield live


@pytest.fixture
def daemon(model: str, tmp_path: Path) -> Iterator[LiveServer]:
    with started(model, tmp_path / "log") as live:
        yield live


@pytest.fixture(scope="module")
def shared(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server for the tests that leave it running."""
    with started(model, tmp_path_factory.mktemp("shared") / "log") as live:
        yield live


def metric(live: LiveServer, name: str) -> float:
    lines = live.ask("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def read_to_the_end(live: LiveServer, endings: list[str]) -> None:
    """Append the last event of a long stream before [DONE], or the error that broke it, to
    `endings`."""
    body = {"prompt": "go", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream(
            "POST", f"{live.url}/v1/completions", json=body, timeout=WAIT_S
        ) as response:
            lines = [line for line in response.iter_lines() if line]
        endings.append(lines[-2])
    except httpx.TransportError as error:
        endings.append(repr(error))


def api_servers(live: LiveServer) -> list[int]:
    return [pid for pid in children_of(live.pid) if "gaudiserve: API server" in command_of(pid)]


def test_each_api_server_shows_the_metrics_of_all_api_servers(shared: LiveServer) -> None:
    before = {name: metric(shared, name) for name in TOKENS}
    body = {"prompt": "hello there", "max_tokens": 5, "ignore_eos": True, "n": 2}

    def gained(name: str) -> float:
        return metric(shared, name) - before[name]

    answers = [shared.ask("/v1/completions", body).json() for _ in range(ROUNDS)]

    prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert len(api_servers(shared)) == 2
    models = [shared.ask("/v1/models").json()["data"][0] for _ in range(ROUNDS)]
    assert len({model["created"] for model in models}) == 1
    # An API server publishes its counts ten times a second.
    wait_for(lambda: gained("vllm:prompt_tokens_total") == prompt)
    wait_for(lambda: metric(shared, "vllm:num_requests_running") == 0)
    for _ in range(ROUNDS // 2):
        assert gained("vllm:prompt_tokens_total") == prompt
        assert gained("vllm:generation_tokens_total") == ROUNDS * 10
        assert metric(shared, "vllm:num_requests_running") == 0
    # The engine's own counters are not summed over the API servers.
    steps = {metric(shared, "vllm:iteration_tokens_total_count") for _ in range(ROUNDS)}
    assert len(steps) == 1 and steps.pop() > 0
    text = shared.ask("/metrics").text
    assert text.count("# TYPE vllm:prompt_tokens_total counter") == 1
    assert "pid=" not in text


def test_a_response_is_found_by_every_api_server(shared: LiveServer) -> None:
    made = shared.ask("/v1/responses", {"input": "hi", "max_output_tokens": 4}).json()

    got = [shared.ask(f"/v1/responses/{made['id']}").json() for _ in range(ROUNDS)]
    body = {"input": "on", "max_output_tokens": 4, "previous_response_id": made["id"]}
    following = [shared.ask("/v1/responses", body) for _ in range(ROUNDS // 2)]

    assert all(entry == made for entry in got)
    assert all(answer.status_code == 200 for answer in following)


def test_sigterm_lets_a_stream_finish_and_ends_all_processes(daemon: LiveServer) -> None:
    family = children_of(daemon.pid)
    body = {"prompt": "go", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{daemon.url}/v1/completions", json=body, timeout=WAIT_S
    ) as response:
        lines = response.iter_lines()
        next(lines)

        daemon.signal(signal.SIGTERM)

        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert daemon.wait_exit() == 0
    assert not any(alive(pid) for pid in family)
    assert daemon.leftovers() == []


@pytest.mark.parametrize("victim", ["API server", "engine"])
def test_the_death_of_an_api_server_or_of_the_engine_ends_all_processes(
    daemon: LiveServer, victim: str
) -> None:
    family = children_of(daemon.pid)
    pid = api_servers(daemon)[1] if victim == "API server" else daemon.find("gaudiserve: engine")
    endings: list[str] = []
    readers = [Thread(target=read_to_the_end, args=(daemon, endings)) for _ in range(ROUNDS)]
    for reader in readers:
        reader.start()
    wait_for(lambda: metric(daemon, "vllm:num_requests_running") == ROUNDS)

    os.kill(pid, signal.SIGKILL)

    assert daemon.wait_exit() != 0
    assert not any(alive(pid) for pid in family)
    for reader in readers:
        reader.join(WAIT_S)
    # Clients of the other API server get an error.
    told = [ending for ending in endings if "server_error" in ending]
    assert len(endings) == ROUNDS
    assert len(told) == ROUNDS if victim == "engine" else told
    assert daemon.leftovers() == []


def test_the_death_of_the_parent_ends_all_processes(daemon: LiveServer) -> None:
    family = children_of(daemon.pid)
    assert len(family) >= 3

    daemon.signal(signal.SIGKILL)

    wait_for(lambda: not any(alive(pid) for pid in family))

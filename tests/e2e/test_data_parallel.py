"""Two engines behind one server: equal tokens, routing, metrics, and engines that are killed."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, alive, children_of, command_of, running
from ports import free_port
from waits import WAIT_S, wait_for

FLAGS = (
    "--served-model-name=tiny",
    "--dtype=float32",
    "-dp",
    "2",
    "--num-threads=1",
    "--no-resume",
    '--hf-overrides={"max_position_embeddings": 16384}',
)
TRACE = "trace.json"
LONG = {"model": "tiny", "max_tokens": 8000, "ignore_eos": True, "stream": True}
"""A request that is still running when its engine is killed, and ends within a minute."""


@pytest.fixture(scope="module")
def live(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server shared by all tests of this file; the last test ends it."""
    log = tmp_path_factory.mktemp("dp") / "log"
    with running(tiny_model, log, *FLAGS, f"--profiler-trace={log.parent / TRACE}") as server:
        yield server


def series(live: LiveServer, name: str) -> dict[str, float]:
    """The samples of a metric by their labels."""
    lines = live.ask("/metrics").text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith(f"{name}{{"))
    return {labels.removeprefix(name): float(value) for labels, value in found}


def of_engine(live: LiveServer, name: str, engine: int) -> float:
    found = series(live, name)
    return sum(value for labels, value in found.items() if f'engine="{engine}"' in labels)


def engines_of(live: LiveServer) -> list[int]:
    return [pid for pid in children_of(live.pid) if "gaudiserve: engine" in command_of(pid)]


def errors(live: LiveServer) -> list[str]:
    return [line for line in live.text().splitlines() if " ERROR " in line]


class Stream(threading.Thread):
    """Reads one long stream to its end."""

    def __init__(self, live: LiveServer, prompt: str) -> None:
        super().__init__(daemon=True)
        self._url = f"{live.url}/v1/completions"
        self._prompt = prompt
        self.events: list[str] = []
        self.has_begun = threading.Event()
        self.ended_s = 0.0

    def run(self) -> None:
        body = {**LONG, "prompt": self._prompt}
        with httpx.stream("POST", self._url, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line)
                    self.has_begun.set()
        self.ended_s = time.monotonic()


def test_each_engine_writes_its_own_trace(live: LiveServer) -> None:
    for name in (TRACE, "trace.engine1.json"):
        assert "traceEvents" in json.loads((live.log.parent / name).read_text())


def test_two_engines_give_the_tokens_of_a_single_engine(
    live: LiveServer, server: LiveServer
) -> None:
    prompts = [f"{word} once upon a time" for word in ("red", "green", "blue", "grey")]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 24, "temperature": 0, "logprobs": 0}

    two, single = (each.ask("/v1/completions", body).json() for each in (live, server))

    tokens = [[choice["logprobs"]["tokens"] for choice in all["choices"]] for all in (two, single)]
    assert tokens[0] == tokens[1]
    assert [of_engine(live, "gaudiserve:routed_requests_total", n) for n in (0, 1)] == [2, 2]
    assert live.ask("/ready").json() == {"status": "ready", "engines": "2 of 2"}
    assert "2 engines" not in live.text(), "the number of threads was given"


def test_a_conversation_stays_with_its_engine(live: LiveServer) -> None:
    chat = "a long story about a lighthouse and the sea, " * 4
    before = series(live, "vllm:prefix_cache_hits_total")

    for turn in range(1, 5):
        answer = live.ask(
            "/v1/completions", {"model": "tiny", "prompt": chat * turn, "max_tokens": 1}
        )
        assert answer.status_code == 200

    after = series(live, "vllm:prefix_cache_hits_total")
    gained = [after[labels] - before[labels] for labels in sorted(after)]
    assert sorted(gained)[0] == 0 and sorted(gained)[1] > 500, gained
    assert series(live, "gaudiserve:engine_up") == {
        f'{{engine="{engine}",model_name="tiny"}}': 1.0 for engine in (0, 1)
    }


def test_a_killed_engine_fails_its_requests_and_the_last_kill_ends_the_server(
    live: LiveServer,
) -> None:
    streams = [Stream(live, prompt) for prompt in ("first", "second")]
    for stream in streams:
        stream.start()
        assert stream.has_begun.wait(WAIT_S)
    first, second = engines_of(live)
    family = children_of(live.pid)

    os.kill(first, signal.SIGKILL)

    wait_for(lambda: any(stream.ended_s for stream in streams))
    (lost,) = (stream for stream in streams if stream.ended_s)
    (kept,) = (stream for stream in streams if stream is not lost)
    message = json.loads(lost.events[-2].removeprefix("data: "))["error"]["message"]
    # The report of the supervisor, or on a busy machine the end of the connection, comes first.
    assert "was killed by SIGKILL" in message or "the engine has disconnected" in message
    wait_for(lambda: live.ask("/ready").json() == {"status": "ready", "engines": "1 of 2"})
    assert live.ask("/health").status_code == 200
    assert sorted(series(live, "gaudiserve:engine_up").values()) == [0, 1]
    assert sum(series(live, "vllm:num_requests_running").values()) <= 1
    body = {"model": "tiny", "prompt": "first", "max_tokens": 3}
    assert all(live.ask("/v1/completions", body).status_code == 200 for _ in range(4))
    kept.join(60)
    assert kept.events[-1] == "data: [DONE]" and '"finish_reason":"length"' in kept.events[-2]
    (error,) = errors(live)
    assert "was killed by SIGKILL" in error and "1 of 2 keep running" in error

    os.kill(second, signal.SIGKILL)

    assert live.wait_exit() == 1
    wait_for(lambda: not any(alive(pid) for pid in family))
    assert live.leftovers() == []
    assert len(errors(live)) == 2


@pytest.mark.slow
def test_several_api_servers_share_several_engines(tiny_model: str, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path / "log", *FLAGS, "--api-server-count=2") as live:
        wait_for(lambda: all(live.ask("/ready").status_code == 200 for _ in range(16)))
        story = "the same beginning for all, " * 8
        for turn in range(8):
            body = {"model": "tiny", "prompt": story + str(turn), "max_tokens": 1}
            assert live.ask("/v1/completions", body).status_code == 200

        def routed() -> dict[str, float]:
            return series(live, "gaudiserve:routed_requests_total")

        # The API server's metrics include the counts of the other API server after a short delay.
        wait_for(lambda: sum(routed().values()) == 8)
        # Each API server knows the location of the prefix, whichever API server sent it first.
        reasons = routed()
        prefix = [value for labels, value in reasons.items() if 'reason="prefix"' in labels]
        assert sorted(prefix) == [0, 7], reasons
        first, second = engines_of(live)

        os.kill(first, signal.SIGKILL)

        def is_known() -> bool:
            return all(live.ask("/ready").json()["engines"] == "1 of 2" for _ in range(8))

        wait_for(is_known)
        wait_for(lambda: errors(live))
        assert live.ask("/v1/completions", body).status_code == 200
        (error,) = errors(live)
        assert "was killed by SIGKILL, 1 of 2 engines keep running" in error
        family = children_of(live.pid)
        os.kill(second, signal.SIGKILL)
        assert live.wait_exit() == 1
        wait_for(lambda: not any(alive(pid) for pid in family))
        assert live.leftovers() == []


@pytest.mark.slow
def test_an_engine_of_another_host_serves_and_ends_with_its_server(
    tiny_model: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    flags = ("-dpl", "1", "-dpa", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))
    token = {"GAUDISERVE_DATA_PARALLEL_TOKEN": "0123456789abcdef"}
    wrong = {"GAUDISERVE_DATA_PARALLEL_TOKEN": "fedcba9876543210"}
    with contextlib.ExitStack() as stack:

        def started(log: Path, *more: str, env: dict[str, str]) -> LiveServer:
            made = LiveServer(tiny_model, log, *FLAGS, *flags, *more, env=env)
            return stack.enter_context(contextlib.closing(made))

        live = started(first / "log", env=token)
        wait_for(lambda: "Waiting for engines 1 to 1" in live.text())
        refused = started(second / "wrong", "--data-parallel-rank=1", env=wrong)
        assert refused.wait_exit() == 2
        assert "refused the token: all hosts need the same token" in refused.text()
        remote = started(second / "log", "--data-parallel-rank=1", env=token)
        live.wait_ready()
        body = {"model": "tiny", "prompt": ["a", "b", "c", "d"], "max_tokens": 3}
        assert live.ask("/v1/completions", body).status_code == 200
        assert [of_engine(live, "gaudiserve:routed_requests_total", n) for n in (0, 1)] == [2, 2]

        os.kill(engines_of(remote)[0], signal.SIGKILL)

        wait_for(lambda: live.ask("/ready").json() == {"status": "ready", "engines": "1 of 2"})
        assert remote.wait_exit() == 1
        assert live.ask("/v1/completions", body).status_code == 200
        # The log follows at the next check of the engines.
        ended = "Engine 1 has ended, 1 of 2 keep running: the engine has disconnected"
        wait_for(lambda: ended in live.text())


def test_other_engines_continue_the_requests_of_a_crashed_engine(
    tiny_model: str, tmp_path: Path
) -> None:
    flags = [flag for flag in FLAGS if flag != "--no-resume"]
    with running(tiny_model, tmp_path / "log", *flags) as live:
        asks = [{"model": "tiny", "prompt": f"{i}", "max_tokens": 300, "seed": i} for i in range(4)]
        asks = [{**body, "ignore_eos": True, "stream": True} for body in asks]
        with ThreadPoolExecutor(len(asks)) as threads:
            expected = list(threads.map(lambda body: text_of(live, body), asks))
            answering = threads.map(lambda body: text_of(live, body), asks)
            wait_for(lambda: sum(series(live, "vllm:num_requests_running").values()) == 4)
            os.kill(engines_of(live)[0], signal.SIGKILL)
            wait_for(lambda: live.ask("/ready").json().get("engines") == "1 of 2")
            found = list(answering)

        assert found == expected
        assert sum(series(live, "gaudiserve:resumed_requests_total").values()) > 0
        wait_for(lambda: live.ask("/ready").json().get("engines") == "2 of 2")
        assert live.ask("/health").status_code == 200


def text_of(live: LiveServer, body: dict[str, Any]) -> str:
    lines = live.http.post("/v1/completions", json=body).text.splitlines()
    assert "data: [DONE]" in lines[-2:], lines[-3:]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])

"""More requests than a server can compute: deadlines, fair shares, priorities and --max-ttft."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from live import LiveServer, running
from tiny_models import make_tiny
from waits import WAIT_S, wait_for

FLOOD, NEWCOMER = "key-of-the-flood", "key-of-the-newcomer"
NUM_FLOOD = 400
FLAGS = ("--served-model-name=tiny", "--dtype=float32", "--max-num-seqs=4")
FLOODING: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return str(make_tiny("llama", folder, max_position_embeddings=4096))


@pytest.fixture(scope="module")
def fair(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = (f"--api-key={FLOOD}", f"--api-key={NEWCOMER}")
    flags = (*FLAGS, *keys, "--fair-share", "--scheduling-policy=priority")
    with running(model, tmp_path_factory.mktemp("fair") / "log", *flags) as live:
        yield live


@pytest.fixture(scope="module")
def bounded(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = (*FLAGS, "--max-ttft=0.2", "--data-parallel-size=2", "--api-server-count=2")
    with running(model, tmp_path_factory.mktemp("bounded") / "log", *flags) as live:
        end_s = time.monotonic() + WAIT_S
        while not all(live.ask("/ready").status_code == 200 for _ in range(12)):
            assert time.monotonic() < end_s
        yield live


def metric(live: LiveServer, name: str) -> float:
    lines = live.ask("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def ask(live: LiveServer, key: str = "", **fields: Any) -> httpx.Response:
    body = {"prompt": "hello there", **FLOODING, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # Skip reading the machine's certificates: with many threads that takes a second.
    url = f"{live.url}/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60, verify=False)


class Flood:
    """A request with hundreds of prompts, aborted at exit."""

    def __init__(self, live: LiveServer, key: str, **fields: Any) -> None:
        self._http = httpx.Client(base_url=live.url, timeout=60)
        self._body = {"prompt": ["hello there"] * NUM_FLOOD, **FLOODING, **fields}
        self._headers = {"Authorization": f"Bearer {key}"}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._has_closed = threading.Event()

    def _run(self) -> None:
        body = {**self._body, "stream": True}
        with self._http.stream(
            "POST", "/v1/completions", json=body, headers=self._headers
        ) as response:
            for _ in response.iter_lines():
                if self._has_closed.is_set():
                    return

    def __enter__(self) -> "Flood":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_closed.set()
        self._thread.join(WAIT_S)
        self._http.close()


def idle(live: LiveServer) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return all(metric(live, name) == 0 for name in names)


def test_a_key_with_hundreds_of_requests_does_not_starve_another_key(fair: LiveServer) -> None:
    with Flood(fair, FLOOD):
        wait_for(lambda: metric(fair, "vllm:num_requests_waiting") > NUM_FLOOD / 2)
        own = ask(fair, FLOOD, timeout=1.0)

        answers = [ask(fair, NEWCOMER, max_tokens=8) for _ in range(5)]

        # All requests of the second key are answered while most of the flood still waits.
        assert [answer.status_code for answer in answers] == [200] * 5
        assert metric(fair, "vllm:num_requests_waiting") > NUM_FLOOD / 10
        assert metric(fair, "gaudiserve:waiting_tenants") == 1
        # A further request of the flood's key waits behind the flood.
        assert own.status_code == 504
    wait_for(lambda: idle(fair))
    assert metric(fair, "vllm:kv_cache_usage_perc") == 0
    assert metric(fair, "gaudiserve:tenant_tokens_total") > 5 * 8


def test_timeouts_end_waiting_and_running_requests(fair: LiveServer) -> None:
    states = ('state="waiting"', 'state="running"')
    name = "gaudiserve:request_timeouts_total"

    def counted(state: str) -> float:
        lines = fair.ask("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name) and state in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    before = [counted(state) for state in states]
    running_ones = {"max_tokens": 4000, "timeout": 5.0}
    with ThreadPoolExecutor(24) as pool:
        first = [pool.submit(ask, fair, FLOOD, **running_ones) for _ in range(4)]
        wait_for(lambda: metric(fair, "vllm:num_requests_running") == 4)
        later = [pool.submit(ask, fair, FLOOD, timeout=0.3) for _ in range(20)]

        answers = [entry.result() for entry in later]
        assert {answer.status_code for answer in answers} == {504}
        assert {answer.json()["error"]["code"] for answer in answers} == {"timeout"}
        assert {entry.result().status_code for entry in first} == {504}

    wait_for(lambda: idle(fair))
    assert metric(fair, "vllm:kv_cache_usage_perc") == 0
    assert [counted(state) - was for state, was in zip(states, before, strict=True)] == [20, 4]
    assert ask(fair, FLOOD, timeout=30).status_code == 200


def test_a_request_with_a_smaller_priority_value_overtakes_the_flood(fair: LiveServer) -> None:
    counts = 'gaudiserve:priority_queue_seconds_count{engine="0",model_name="tiny",priority="first"'
    before = metric(fair, counts)
    with Flood(fair, FLOOD, priority=5):
        wait_for(lambda: metric(fair, "vllm:num_requests_waiting") > NUM_FLOOD / 2)

        answer = ask(fair, FLOOD, priority=-1, max_tokens=8)

        assert answer.status_code == 200
        assert metric(fair, "vllm:num_requests_waiting") > NUM_FLOOD / 4
    assert metric(fair, counts) == before + 1
    wait_for(lambda: idle(fair))


def test_a_request_that_would_wait_too_long_is_refused_at_once(bounded: LiveServer) -> None:
    # The server has no measurements yet, and no request waits.
    assert ask(bounded).status_code == 200
    refused: list[httpx.Response] = []
    answered: list[httpx.Response] = []
    with ThreadPoolExecutor(80) as pool:
        for answer in pool.map(lambda _: ask(bounded, max_tokens=150), range(200)):
            (refused if answer.status_code == 503 else answered).append(answer)

    assert answered and refused
    assert {answer.status_code for answer in answered} == {200}
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert "(--max-ttft)" in answer.json()["error"]["message"]
    rejections = 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="max_ttft"}'
    assert metric(bounded, rejections) == len(refused)
    assert metric(bounded, "gaudiserve:prefill_tokens_per_second") > 0
    # Once no request waits, requests are accepted again.
    wait_for(lambda: idle(bounded))
    assert ask(bounded).status_code == 200

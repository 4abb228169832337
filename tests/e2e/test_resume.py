"""Streams survive the crash of their engine: clients receive the same text as without the crash."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, running, workers_of
from twins import content_of, differences, requests_of_every_kind

FLAGS = (
    *("--served-model-name=tiny", "--dtype=float32", "--max-engine-restarts=1000"),
    "--keep-alive=0.2",
)
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def live(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with running(tiny_model, tmp_path_factory.mktemp("resume") / "log", *FLAGS) as server:
        yield server


async def answers_of(live: LiveServer, asks: list[tuple[str, dict[str, Any]]]) -> list[bytes]:
    """Answers to `asks`, which are sent concurrently."""
    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(base_url=live.url, timeout=300, limits=limits) as http:

        async def ask(path: str, body: dict[str, Any]) -> bytes:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.content

        return await asyncio.gather(*(ask(path, body) for path, body in asks))


def engine_of(live: LiveServer) -> int:
    return live.find("gaudiserve: engine")


def values(live: LiveServer, *names: str) -> float:
    lines = live.ask("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def restarts(live: LiveServer) -> float:
    return values(live, "gaudiserve:engine_restarts_total")


def has_more_restarts(live: LiveServer, before: float) -> bool:
    return restarts(live) > before


async def until(check: Any, timeout_s: float = 60) -> None:
    end_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(check):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)


async def answers_with_kills(
    live: LiveServer, asks: list[Any], moments: list[float]
) -> list[bytes]:
    """Answers to `asks`, while the engine is killed once for each of `moments`: that many seconds
    after it became ready."""
    answering = asyncio.ensure_future(answers_of(live, asks))
    for moment_s in moments:
        await until(lambda: live.ask("/ready").status_code == 200)
        await asyncio.sleep(moment_s)
        if answering.done():
            break
        before = restarts(live)
        os.kill(engine_of(live), signal.SIGKILL)
        # Wait for the restart, so that the next loop sees the new engine.
        await until(partial(has_more_restarts, live, before))
    return await answering


async def test_every_kind_of_stream_continues_after_an_engine_kill(live: LiveServer) -> None:
    asks = requests_of_every_kind(1, 400)
    expected = [content_of(raw) for raw in await answers_of(live, asks)]
    before = values(live, "gaudiserve:resumed_requests_total")

    found = await answers_with_kills(live, asks, [0.3, 0.3])

    for raw, content in zip(found, expected, strict=True):
        assert differences(content_of(raw), content) == []
    assert values(live, "gaudiserve:resumed_requests_total") - before > 6
    assert restarts(live) == 2
    await until(lambda: values(live, *IDLE) == 0)
    line = r"The engine is ready again after [\d.]+ s and resumes (\d+) requests?: .*by SIGKILL"
    counts = re.findall(line, live.text())
    assert len(counts) == 2 and int(counts[0]) > 6, live.text()
    assert values(live, "gaudiserve:engine_pause_seconds_count") == 2
    # Sent during the pauses, which are longer than any wait for a token.
    assert sum(raw.count(b": keep-alive") for raw in found) > 6


async def test_a_background_response_continues_after_an_engine_kill(live: LiveServer) -> None:
    body = {"input": "far away", "max_output_tokens": 400, "temperature": 0}

    def response(name: str) -> dict[str, Any]:
        found: dict[str, Any] = live.ask(f"/v1/responses/{name}").json()
        return found

    async def ended(name: str) -> list[Any]:
        await until(lambda: response(name)["status"] not in ("queued", "in_progress"))
        return [part["text"] for item in response(name)["output"] for part in item["content"]]

    twin = live.ask("/v1/responses", {**body, "background": True}).json()
    expected = await ended(twin["id"])
    before = restarts(live)

    name = live.ask("/v1/responses", {**body, "background": True}).json()["id"]
    await until(lambda: response(name)["output"])
    assert response(name)["status"] == "in_progress"
    os.kill(engine_of(live), signal.SIGKILL)

    assert await ended(name) == expected and len(expected[0]) > 100
    assert restarts(live) == before + 1
    usage = (response(name)["usage"], response(twin["id"])["usage"])
    assert usage[0]["output_tokens"] == usage[1]["output_tokens"]


async def test_a_stored_response_is_complete_after_an_engine_kill(live: LiveServer) -> None:
    body = {"input": "kept", "max_output_tokens": 300, "temperature": 0, "stream": True}
    asks = [("/v1/responses", {**body, "store": True})]
    (expected,) = await answers_of(live, asks)

    (found,) = await answers_with_kills(live, asks, [0.3])

    assert differences(content_of(found), content_of(expected)) == []
    names = [re.findall(rb'"(resp_\w+)"', raw)[0].decode() for raw in (expected, found)]
    twin, kept = (live.ask(f"/v1/responses/{name}").json() for name in names)
    assert kept["status"] in ("completed", "incomplete") and len(kept["output"]) == 1
    assert kept["output"][0]["content"] == twin["output"][0]["content"]
    assert kept["usage"]["output_tokens"] == twin["usage"]["output_tokens"] == 300
    # The resumed response can be continued.
    more = {"input": "more", "previous_response_id": kept["id"], "max_output_tokens": 3}
    assert live.ask("/v1/responses", more).status_code == 200


async def test_requests_wait_and_readiness_fails_during_an_engine_restart(live: LiveServer) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
    expected = live.ask("/v1/completions", body).json()["choices"]

    os.kill(engine_of(live), signal.SIGKILL)

    await until(lambda: live.ask("/ready").status_code == 503)
    assert live.ask("/live").status_code == 200
    ready = live.ask("/ready")
    assert "being restarted" in ready.json()["error"]["message"] and ready.headers["retry-after"]
    assert live.ask("/v1/completions", body).json()["choices"] == expected
    assert live.ask("/ready").status_code == 200


@pytest.mark.slow
async def test_a_hung_engine_is_killed_and_its_requests_continue(
    tiny_model: str, tmp_path: Path
) -> None:
    with running(tiny_model, tmp_path / "log", *FLAGS, "--engine-timeout=5") as live:
        asks = requests_of_every_kind(2, 300)[:3]
        expected = [content_of(raw) for raw in await answers_of(live, asks)]
        engine = engine_of(live)
        await asyncio.sleep(5.2)  # An engine that is idle for longer is not treated as hung.
        assert engine_of(live) == engine

        os.kill(engine, signal.SIGSTOP)
        found = await answers_of(live, asks)

        for raw, content in zip(found, expected, strict=True):
            assert differences(content_of(raw), content) == []
        assert "has sent nothing for 5 s" in live.text() and engine_of(live) != engine


def test_a_server_without_restarts_left_ends(tiny_model: str, tmp_path: Path) -> None:
    flags = (*FLAGS[:2], "--max-engine-restarts=1", "--executor=mp", "--api-server-count=2")
    with running(tiny_model, tmp_path / "log", *flags) as live:
        os.kill(workers_of(engine_of(live))[-1], signal.SIGKILL)
        deadline_s = time.monotonic() + 60
        while "is ready again after" not in live.text():
            assert time.monotonic() < deadline_s, live.text()
            time.sleep(0.05)

        os.kill(engine_of(live), signal.SIGKILL)

        assert live.wait_exit() == 1
        assert live.leftovers() == []

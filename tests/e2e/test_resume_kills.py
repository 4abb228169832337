"""A hundred kills of engines and workers, at random moments, under streams of every kind: each
stream gets the same answer as without kills.

NUM_KILLS and SEED divide the run into parts.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, alive, children_of, command_of, running, workers_of
from twins import content_of, differences, requests_of_every_kind

NUM_KILLS = int(os.environ.get("NUM_KILLS", "100"))
SEED = int(os.environ.get("SEED", "0"))
NUM_STREAMS = 32
NUM_TOKENS = 32
MAX_PAUSE_S = 6.0
"""Maximum time between an engine's return and the next kill."""
EARLY = 0.25
"""Fraction of kills before the engine is back, or before its first token."""
ANSWER_TIMEOUT_S = 300
READY_TIMEOUT_S = 60
GROWTH_BYTES = 32 << 20
"""Allowed growth of the server's memory from its first round to its last."""
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
FLAGS = (
    *("--dtype=float32", "--max-model-len=1024", "--max-num-seqs=64", "--executor=mp"),
    *("--max-engine-restarts=1000000", "--engine-restart-wait=0"),
)


@dataclass
class Tally:
    """What was killed, and when."""

    num_engines: int = 0
    num_workers: int = 0
    num_early: int = 0

    @property
    def num_kills(self) -> int:
        return self.num_engines + self.num_workers


def the_requests() -> list[tuple[str, dict[str, Any]]]:
    """The same requests in each round and run: a sampled token close to the border of two tokens
    stays the same."""
    asks = [ask for seed in range(4) for ask in requests_of_every_kind(seed, NUM_TOKENS)]
    return asks[:NUM_STREAMS]


async def answers_of(live: LiveServer, asks: list[tuple[str, dict[str, Any]]]) -> list[bytes]:
    """Answers to concurrent requests."""
    limits = httpx.Limits(max_connections=len(asks))
    client = httpx.AsyncClient(base_url=live.url, timeout=ANSWER_TIMEOUT_S, limits=limits)
    async with client as http:

        async def ask(path: str, body: dict[str, Any]) -> bytes:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.content

        return await asyncio.gather(*(ask(path, body) for path, body in asks))


def values(live: LiveServer, *names: str) -> float:
    lines = live.ask("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def engines_of(live: LiveServer) -> list[int]:
    return [pid for pid in children_of(live.pid) if "gaudiserve: engine" in command_of(pid)]


def is_ready(live: LiveServer) -> bool:
    return live.ask("/ready").status_code == 200


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def until(check: Any, answering: "asyncio.Future[Any]") -> None:
    """Wait for `check`, or until all requests are answered."""
    end_s = time.monotonic() + READY_TIMEOUT_S
    while not answering.done() and not await asyncio.to_thread(check):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)


async def kill_one(live: LiveServer, rng: random.Random, tally: Tally) -> None:
    """Kill an engine or a worker, and wait until its engine has ended."""
    engine = rng.choice(engines_of(live))
    workers = workers_of(engine)
    victim = rng.choice([engine, workers[-1]]) if workers else engine
    os.kill(victim, signal.SIGKILL)
    tally.num_engines += victim == engine
    tally.num_workers += victim != engine
    # An engine ends with its worker. Wait, so that the next engine is not mistaken for it.
    end_s = time.monotonic() + READY_TIMEOUT_S
    while alive(engine):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    while not engines_of(live):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def kill_until_answered(
    live: LiveServer, rng: random.Random, answering: "asyncio.Future[Any]", tally: Tally
) -> None:
    """Kill the engine at random moments, at most NUM_KILLS times. After an early kill, wait for a
    token before the next kill: a request that is the only suspect in three kills in a row fails."""
    was_early = False
    while tally.num_kills < NUM_KILLS:
        if is_early := not was_early and rng.random() < EARLY:
            await asyncio.sleep(rng.uniform(0, 3))
        else:
            before = await asyncio.to_thread(values, live, "vllm:generation_tokens_total")
            await until(lambda: is_ready(live), answering)
            await until(
                lambda: values(live, "vllm:generation_tokens_total") > before,  # noqa: B023
                answering,
            )
            await asyncio.sleep(rng.uniform(0, MAX_PAUSE_S))
        if answering.done():
            return
        await kill_one(live, rng, tally)
        tally.num_early += is_early
        was_early = is_early


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engines", [1, 2])
async def test_kills_at_random_moments_lose_and_repeat_no_token(
    tmp_path: Path, engines: int
) -> None:
    rng, tally, asks = random.Random(SEED), Tally(), the_requests()
    sizes: list[tuple[int, int]] = []
    flags = (*FLAGS, f"--data-parallel-size={engines}")
    with running("demo", tmp_path / "log", *flags) as live:
        expected = [content_of(raw) for raw in await answers_of(live, asks)]
        begun_s = time.monotonic()
        while tally.num_kills < NUM_KILLS:
            answering = asyncio.ensure_future(answers_of(live, asks))
            await kill_until_answered(live, rng, answering, tally)
            for raw, content in zip(await answering, expected, strict=True):
                assert differences(content_of(raw), content) == []
            done = asyncio.get_running_loop().create_future()
            await until(lambda: is_ready(live) and len(engines_of(live)) == engines, done)
            await until(lambda: values(live, *IDLE) == 0, done)
            sizes.append((resident_bytes(live.pid), num_files(live.pid)))
            print(f"{time.monotonic() - begun_s:.0f} s: {tally}, {sizes[-1]}")

        assert values(live, "gaudiserve:poison_requests_total") == 0
        assert tally.num_engines and tally.num_workers
        (first_bytes, first_files), (last_bytes, last_files) = sizes[0], sizes[-1]
        assert last_bytes - first_bytes < GROWTH_BYTES, sizes
        assert last_files <= first_files + 2, sizes


@pytest.mark.slow
async def test_streams_pause_for_less_than_a_second_when_one_of_two_engines_is_killed(
    tmp_path: Path,
) -> None:
    """The model runs in bfloat16, the demo model's default. The pause is the time that the other
    engine takes to compute the contexts."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with running("demo", tmp_path / "log", "--data-parallel-size=2") as live:
        async with httpx.AsyncClient(base_url=live.url, timeout=ANSWER_TIMEOUT_S) as http:

            async def times_of_chunks() -> list[float]:
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    lines = [
                        (time.monotonic(), line)
                        async for line in answer.aiter_lines()
                        if line.startswith("data:")
                    ]
                assert lines[-1][1] == "data: [DONE]"
                return [time_s for time_s, _ in lines]

            streams = [asyncio.ensure_future(times_of_chunks()) for _ in range(8)]
            await asyncio.sleep(1.5)
            assert not any(stream.done() for stream in streams)
            os.kill(engines_of(live)[0], signal.SIGKILL)
            times = await asyncio.gather(*streams)

        pauses_s = [max(b - a for a, b in itertools.pairwise(time)) for time in times]
        print(f"pauses: {sorted(pauses_s)}")
        assert values(live, "gaudiserve:resumed_requests_total") > 0
        assert max(pauses_s) < 1

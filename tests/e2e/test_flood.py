"""Ten thousand concurrent requests with one API key, beside a few requests with another key."""

import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, children_of, running
from tiny_models import make_tiny

FLOOD, NEWCOMER = "key-of-the-flood", "key-of-the-newcomer"
NUM_FLOOD = int(os.environ.get("NUM_FLOOD", "10000"))
NUM_CONNECTING = 500
"""Connections opened at once: fewer than the kernel queues for a server that has not accepted
them."""
NUM_NEW = 20
NEW_TOKENS, FLOOD_TOKENS = 8, 16
PROMPT_S = 2.0
"""Time limit of each answer to the second key, on two cores shared with the client of the flood."""
BURST_S = 15.0
"""Time in which an API server reads the requests of a flood, interleaved with later requests."""
BYTES_PER_REQUEST = 64 << 10
"""Memory of all server processes for each waiting request."""
GROWTH_BYTES = 32 << 20
"""Allowed memory growth between two floods."""
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
TENANTS = ("gaudiserve:waiting_tenants",)
KEYS = (f"--api-key={FLOOD}", f"--api-key={NEWCOMER}")
FLAGS = (
    *("--served-model-name=tiny", "--dtype=float32", "--max-num-seqs=8", "--fair-share"),
    *KEYS,
)


@dataclass
class Flooded:
    """Answers to a flood."""

    codes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def taken(self) -> list[float]:
        """Seconds of the requests that were answered."""
        return [s for s, code in zip(self.seconds, self.codes, strict=True) if code == 200]

    def refused(self) -> list[float]:
        return [s for s, code in zip(self.seconds, self.codes, strict=True) if code != 200]


def request_of(live: LiveServer) -> bytes:
    body = json.dumps(
        {
            "prompt": "hello there",
            "max_tokens": FLOOD_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
    )
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\nConnection: close\r\n"
        f"Authorization: Bearer {FLOOD}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def flood(live: LiveServer, found: Flooded) -> None:
    """Send NUM_FLOOD requests, each over its own connection; all accepted requests are open at
    once."""
    raw, connecting = request_of(live), asyncio.Semaphore(NUM_CONNECTING)

    async def ask() -> None:
        async with connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
            begun_s = time.monotonic()
            writer.write(raw)
            await writer.drain()
        answer = await reader.read()
        found.seconds.append(time.monotonic() - begun_s)
        found.codes.append(int(answer.split(b" ", 2)[1]))
        found.bodies.append(answer)
        writer.close()

    await asyncio.gather(*(ask() for _ in range(NUM_FLOOD)))


def ask(live: LiveServer, key: str, **fields: Any) -> tuple[int, float]:
    """(status, seconds) of a request with `key`."""
    body = {"prompt": "hello there", "max_tokens": NEW_TOKENS, "ignore_eos": True, **fields}
    begun_s = time.monotonic()
    answer = httpx.post(
        f"{live.url}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
        verify=False,
    )
    return answer.status_code, time.monotonic() - begun_s


def values(live: LiveServer, *names: str) -> float:
    lines = live.ask("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def resident_bytes(live: LiveServer) -> int:
    """Resident bytes of all processes of the server."""
    pages = 0
    for pid in (live.pid, *children_of(live.pid)):
        pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def until(check: Any, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(check):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)


async def during_a_flood(live: LiveServer, num_waiting: int) -> tuple[Flooded, list[float], int]:
    """(answers to the flood, seconds of the second key's answers, memory of the server while the
    flood waited)."""
    found = Flooded()
    flooding = asyncio.ensure_future(flood(live, found))
    await until(lambda: values(live, IDLE[1]) >= num_waiting, 120)
    memory = resident_bytes(live)
    own, _ = await asyncio.to_thread(ask, live, FLOOD, timeout=1.0)
    seconds = []
    for _ in range(NUM_NEW):
        code, taken_s = await asyncio.to_thread(ask, live, NEWCOMER)
        assert code == 200
        seconds.append(taken_s)
        await asyncio.sleep(0.1)
    still_waiting = values(live, IDLE[1])
    await flooding
    # A further request of the flood's key waited behind the flood; the second key's requests were
    # answered before it.
    assert own in (504, 503) and still_waiting > num_waiting / 10
    await until(lambda: values(live, *IDLE, *TENANTS) == 0, 30)
    return found, seconds, memory


def report(what: str, found: Flooded, seconds: list[float], memory: int) -> None:
    taken, refused = found.taken(), found.refused()
    print(
        f"{what}: newcomer median {statistics.median(seconds):.3f} s, most {max(seconds):.3f} s; "
        f"flood: {len(taken)} answered, median {statistics.median(taken):.1f} s; "
        f"{len(refused)} refused, most {max(refused, default=0):.2f} s; {memory >> 20} MiB"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ten_thousand_waiting_requests_of_a_key_do_not_delay_another_key(
    model: str, tmp_path: Path
) -> None:
    flags = (*FLAGS, f"--max-queued-requests={NUM_FLOOD}")
    with running(model, tmp_path / "log", *flags) as live:
        assert ask(live, FLOOD)[0] == 200
        sizes = [resident_bytes(live)]
        for _ in range(2):
            found, seconds, memory = await during_a_flood(live, NUM_FLOOD // 2)
            sizes.append(resident_bytes(live))
            report("all taken", found, seconds, memory - sizes[0])

            assert set(found.codes) == {200} and len(found.codes) == NUM_FLOOD
            counts = {len(json.loads(x.split(b"\r\n\r\n", 1)[1])["choices"]) for x in found.bodies}
            assert counts == {1}
            assert max(seconds) < PROMPT_S < statistics.median(found.seconds)
            assert memory - sizes[0] < NUM_FLOOD * BYTES_PER_REQUEST
        print([size >> 20 for size in sizes])
        assert sizes[2] - sizes[1] < GROWTH_BYTES, sizes
        tokens = values(live, "vllm:generation_tokens_total")
        assert tokens >= 2 * NUM_FLOOD * FLOOD_TOKENS + 2 * NUM_NEW * NEW_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_full_queue_refuses_requests_within_15_s_and_serves_another_key(
    model: str, tmp_path: Path
) -> None:
    num_queued = NUM_FLOOD // 10
    flags = (*FLAGS, f"--max-queued-requests={num_queued}")
    with running(model, tmp_path / "log", *flags) as live:
        assert ask(live, FLOOD)[0] == 200
        before = resident_bytes(live)

        found, seconds, memory = await during_a_flood(live, num_queued * 9 // 10)

        report("bounded", found, seconds, memory - before)
        assert set(found.codes) == {200, 503} and len(found.codes) == NUM_FLOOD
        assert len(found.taken()) >= num_queued
        assert all(b"retry-after: " in x.lower() for x in found.bodies if b" 503 " in x[:16])
        assert statistics.median(seconds) < PROMPT_S and max(seconds) < BURST_S
        assert max(found.refused()) < BURST_S
        assert memory - before < NUM_FLOOD * BYTES_PER_REQUEST

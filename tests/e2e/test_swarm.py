"""Two hundred clients of every kind, including clients that disconnect, leave no leaks."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from live import LiveServer, children_of, running
from swarm import Swarm
from waits import WAIT_S

NUM_CLIENTS = 200
SHORT_S = 2.0
LONG_S = float(os.environ.get("SWARM_SECONDS", "300"))
GROWTH_BYTES = 12 * 2**20
"""Allowed memory growth between samples in the second half: noise of the heap size."""
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
)
PROBE = {"prompt": "The same as ever", "max_tokens": 24, "temperature": 0}


@pytest.fixture
def server(tiny_model: str, tmp_path: Path) -> Iterator[LiveServer]:
    # Fewer blocks than the batch may need, so that running requests are preempted.
    flags = ("--served-model-name=tiny", "--dtype=float32", "--num-gpu-blocks-override=160")
    more = ("--max-num-seqs=64", "--tool-call-parser=hermes", "--responses-store-max-count=50")
    with running(tiny_model, tmp_path / "log", *flags, *more) as live:
        yield live


def gauges(server: LiveServer) -> dict[str, float]:
    lines = server.http.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(GAUGES))
    return {name: float(value) for name, value in pairs}


def wait_until_idle(server: LiveServer) -> None:
    end = time.monotonic() + WAIT_S
    while any(gauges(server).values()):
        assert time.monotonic() < end, gauges(server)
        time.sleep(0.05)


def memory_of(server: LiveServer) -> int:
    """Private memory of the server's processes, in bytes."""
    pids = [server.pid, *children_of(server.pid)]
    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)


def probe_text(server: LiveServer) -> str:
    answer = server.http.post("/v1/completions", json=PROBE).json()
    text: str = answer["choices"][0]["text"]
    return text


async def test_every_gauge_is_zero_after_many_clients_have_disconnected(server: LiveServer) -> None:
    before = probe_text(server)
    swarm = Swarm(("127.0.0.1", server.port), NUM_CLIENTS)

    await swarm.run(SHORT_S)

    assert not swarm.faults, swarm.faults[:3]
    assert swarm.num_left > 0 and set(swarm.answered) == {200, 400}
    wait_until_idle(server)
    assert probe_text(server) == before


@pytest.mark.slow
@pytest.mark.timeout(LONG_S + 200)
async def test_memory_stays_flat_under_many_clients(server: LiveServer) -> None:
    before = probe_text(server)
    parts = 6
    swarm = Swarm(("127.0.0.1", server.port), NUM_CLIENTS)
    sizes: list[int] = []

    for part in range(parts):
        swarm.seed = part * NUM_CLIENTS
        await swarm.run(LONG_S / parts)
        wait_until_idle(server)
        sizes.append(memory_of(server))

    assert not swarm.faults, swarm.faults[:3]
    assert sum(swarm.answered.values()) > 10 * LONG_S
    assert probe_text(server) == before
    # Measured while idle, in the second half, when caches are full.
    assert max(sizes[parts // 2 :]) - sizes[parts // 2 - 1] < GROWTH_BYTES, sizes

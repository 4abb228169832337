"""Hostile requests for minutes: the server survives and serves another client at the same time.

Run by `make test-fuzz`; `--fuzz-seconds` and `--fuzz-seed` set duration and seed. A failure is
reported with its seed.
"""

import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import write_adapter
from gguf_adapters import as_gguf
from hostile import MAX_ANSWER_S, Hostile, Outcome, Target, attack, encoded, image_chat
from live import LiveServer, running
from tiny_models import make_tiny
from tiny_vision import make_tiny_vision
from watch import Family, SecondClient

pytestmark = pytest.mark.fuzz

NUM_CLIENTS = 3
MAX_GROWTH_BYTES = 64 * 2**20
WARM_UP_SHARE = 0.2
"""Fraction of the attack before memory is first measured: libraries and caches keep the memory of
their first use."""
NUM_CACHED_GRAMMARS = 320
MAX_OTHER_S = 0.2
"""Response-time limit for another client; one of a thousand answers may wait for a core that the
attackers use."""
SETTLE_S = 20.0
KEY = "correct-key"


@pytest.mark.timeout(0)
@pytest.mark.parametrize("takes_images", [False, True], ids=["text", "pictures"])
def test_hostile_requests_leave_the_server_unchanged(
    tmp_path: Path, pytestconfig: pytest.Config, takes_images: bool
) -> None:
    seconds: float = pytestconfig.getoption("--fuzz-seconds") / 2
    first_seed: int = pytestconfig.getoption("--fuzz-seed")
    base = make_tiny("llama", tmp_path / "tiny", max_position_embeddings=2048)
    model = base
    if takes_images:
        model = make_tiny_vision("llava", tmp_path / "vision", max_position_embeddings=2048)
    adapter = write_adapter(tmp_path / "adapters" / "good", base)
    gguf = as_gguf(tmp_path / "good.gguf", adapter, base)
    flags = [
        *("--dtype=float32", "--trust-request-chat-template", f"--api-key={KEY}"),
        *("--enable-lora", "--allow-runtime-lora-updating", f"--lora-dir={adapter.parent}"),
    ]
    with running(str(model), tmp_path / "log", *flags) as server:
        family = Family(server.pid)
        target = Target(server.url, server.port, KEY, takes_images, adapter, gguf)
        warm_up(server, first_seed, takes_images)
        attacked(server, target, first_seed - 10**6, WARM_UP_SHARE * seconds)
        forget_grammars(server)
        time.sleep(SETTLE_S)
        before = (family.resident_bytes(), family.num_descriptors())

        with SecondClient(server.url) as other:
            outcomes = attacked(server, target, first_seed, seconds)
        faults = [fault for outcome in outcomes for fault in outcome.faults]
        statuses = sum((outcome.statuses for outcome in outcomes), Counter[str]())
        print("slowest:", max(outcome.slowest for outcome in outcomes))
        print(
            f"{dict(statuses)}; /health: median {other.percentile_s(0.5) * 1e3:.1f} ms, "
            f"99 % {other.percentile_s(0.99) * 1e3:.1f} ms, most {max(other.latencies_s):.2f} s"
        )

        assert faults == []
        assert server.process.poll() is None, server.text()
        assert other.failures == []
        forget_grammars(server)
        assert after_settling(family, before)
        assert other.percentile_s(0.99) < 0.1
        assert other.percentile_s(0.999) < MAX_OTHER_S
        assert status_of(server, "/v1/completions", {"prompt": "a", "max_tokens": 2}) == 200


def attacked(server: LiveServer, target: Target, first_seed: int, seconds: float) -> list[Outcome]:
    """Outcomes of NUM_CLIENTS attackers that send hostile requests for `seconds`."""
    spawn = multiprocessing.get_context("spawn")
    stop, reports = spawn.Event(), spawn.Queue()
    attackers = [
        spawn.Process(
            target=attack, args=(target, first_seed + 10**7 * n, stop, reports), daemon=True
        )
        for n in range(NUM_CLIENTS)
    ]
    for attacker in attackers:
        attacker.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None and reports.empty():
        time.sleep(0.5)
    stop.set()
    return [reports.get(timeout=2 * MAX_ANSWER_S) for _ in attackers]


def warm_up(server: LiveServer, seed: int, takes_images: bool) -> None:
    """Send a request of each kind, so that lazy initialization is done."""
    if takes_images:
        for i in range(10):
            status_of(server, *image_chat(seed - 1 - i))
    sent_kinds: set[str] = set()
    for i in range(200):
        route, body = Hostile(seed - 1 - i).chat()
        kind = route + "".join(sorted(body))
        if kind not in sent_kinds and len(sent_kinds) < 25:
            sent_kinds.add(kind)
            status_of(server, route, body)


def forget_grammars(server: LiveServer) -> None:
    """Replace the cached grammars, which may take 512 MiB, with small grammars."""
    for i in range(NUM_CACHED_GRAMMARS):
        constraint = {"structured_outputs": {"choice": [str(i)]}}
        body = {"prompt": "a", "max_tokens": 1, **constraint}
        assert status_of(server, "/v1/completions", body) == 200


def status_of(server: LiveServer, route: str, body: dict[str, Any]) -> int:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=30, verify=False, headers=headers) as http:
        return http.post(route, content=encoded(body)).status_code


def after_settling(family: Family, before: tuple[int, int]) -> bool:
    """Wait until memory and descriptors are back to their initial values."""
    end = time.monotonic() + SETTLE_S
    while True:
        growth = family.resident_bytes() - before[0]
        descriptors = family.num_descriptors() - before[1]
        if growth < MAX_GROWTH_BYTES and descriptors < 20:
            print(f"{growth / 2**20:+.0f} MiB, {descriptors:+d} descriptors")
            return True
        assert time.monotonic() < end, f"{growth / 2**20:+.0f} MiB, {descriptors:+d} descriptors"
        time.sleep(0.5)

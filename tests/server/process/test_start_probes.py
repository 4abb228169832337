"""StartProbes: answers for an API server whose event loop is blocked."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from live import LiveServer, children_of, command_of
from tiny_models import make_tiny
from tokenizers import Tokenizer
from waits import WAIT_S, wait_for

from server.process.start_probes import (
    LARGE_BYTES,
    ProbeAnswers,
    StartProbes,
    TlsFiles,
    has_large_tokenizer,
)

LIVE = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"status":"ok"}'
STARTING = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-length: 4\r\n\r\nwait"
PATHS = (b"/live", b"/gaudi/live")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=WAIT_S, verify=False) as client:
        yield client


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_a_blocked_server_has_its_probes_answered(
    listener: socket.socket, http: httpx.Client
) -> None:
    url = f"http://127.0.0.1:{port_of(listener)}"

    probes = StartProbes(listener, ProbeAnswers(PATHS, LIVE, STARTING))
    try:
        probes.wait_ready()
        health = http.get(f"{url}/health")
        live = [http.get(f"{url}{path}") for path in ("/live", "/gaudi/live?verbose=1")]
        head = http.head(f"{url}/live")
        post = http.post(f"{url}/live", content=b"x" * 10_000)
    finally:
        probes.close()

    assert (health.status_code, health.headers["retry-after"]) == (503, "5")
    assert [answer.json() for answer in live] == [{"status": "ok"}] * 2
    assert (head.status_code, head.content) == (200, b"")
    assert post.text == "wait"


def test_slow_and_silent_clients_delay_no_probe(
    listener: socket.socket, http: httpx.Client
) -> None:
    address = ("127.0.0.1", port_of(listener))
    silent = [socket.create_connection(address) for _ in range(20)]
    silent[0].sendall(b"GET /live HTTP/1.1\r\n" + b"x" * 100_000)

    probes = StartProbes(listener, ProbeAnswers(PATHS, LIVE, STARTING))
    try:
        answer = http.get(f"http://127.0.0.1:{address[1]}/live")
    finally:
        probes.close()
        for sock in silent:
            sock.close()

    assert answer.status_code == 200


def test_probes_over_tls_get_the_server_s_certificate(
    listener: socket.socket, tmp_path: Path
) -> None:
    authority = trustme.CA()
    issued, certificate, key = authority.issue_cert("127.0.0.1"), tmp_path / "c", tmp_path / "k"
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    tls = TlsFiles(str(certificate), str(key), "", "")

    probes = StartProbes(listener, ProbeAnswers(PATHS, LIVE, STARTING, tls))
    try:
        url = f"https://127.0.0.1:{port_of(listener)}/live"
        answer = httpx.get(url, verify=trusting, timeout=WAIT_S)
    finally:
        probes.close()

    assert answer.json() == {"status": "ok"}


@pytest.mark.parametrize(("size", "is_large"), [(LARGE_BYTES - 1, False), (LARGE_BYTES, True)])
def test_a_tokenizer_is_large_from_the_limit_on(tmp_path: Path, size: int, is_large: bool) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(size)

    assert has_large_tokenizer(str(tmp_path)) is is_large


def enlarge(tokenizer: Path, num_tokens: int) -> None:
    """Add `num_tokens` tokens without merges to a tokenizer.json."""
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    first = max([*vocabulary.values(), *(token["id"] for token in content["added_tokens"])]) + 1
    vocabulary |= {f"unused-token-number-{i}": i for i in range(first, first + num_tokens)}
    tokenizer.write_text(json.dumps(content))


def helpers_of(live: LiveServer) -> list[int]:
    """Processes that answer probes for the server."""
    return [pid for pid in children_of(live.pid) if "start probes" in command_of(pid)]


@pytest.mark.slow
def test_probes_are_answered_while_the_tokenizer_is_parsed(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny")
    tokenizer = model / "tokenizer.json"
    enlarge(tokenizer, 400_000)
    start_s = time.monotonic()
    Tokenizer.from_file(str(tokenizer))
    parse_s = time.monotonic() - start_s
    waits: list[float] = []
    statuses: set[int] = set()
    has_ended = threading.Event()

    def probe(live: LiveServer) -> None:
        with httpx.Client(base_url=live.url, timeout=60, verify=False) as http:
            while not has_ended.is_set():
                start_s = time.monotonic()
                try:
                    answer = http.get("/health", headers={"connection": "close"})
                except httpx.ConnectError:
                    continue  # The port is not open yet.
                waits.append(time.monotonic() - start_s)
                statuses.add(answer.status_code)
                time.sleep(0.02)

    live = LiveServer(str(model), tmp_path / "log", "--dtype=float32")
    thread = threading.Thread(target=probe, args=(live,))
    thread.start()
    try:
        wait_for(lambda: helpers_of(live))
        waits.clear()
        wait_for(lambda: not helpers_of(live))
    finally:
        has_ended.set()
        thread.join()
        live.http.close()
        live.process.terminate()
        live.process.wait(60)
    print(f"parsed in {parse_s:.2f} s, longest answer {max(waits):.2f} s of {len(waits)}")
    assert statuses == {503}
    assert max(waits) < parse_s / 3

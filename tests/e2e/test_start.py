"""A server answers 503 and can be stopped while its checkpoint is converted; its first lines."""

import contextlib
import fcntl
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest
from live import LiveServer, children_of, running
from tiny_gguf import write_gguf
from tiny_models import make_tiny
from waits import WAIT_S, wait_for

from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.version import VERSION
from hpu.native.library import kernel_folder

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def lock(source: Path, tmp_path: Path) -> Iterator[IO[str]]:
    """The conversion lock of `source`, acquired, so that the server waits for the conversion."""
    folder = resolve(EngineConfig(str(source), cache_dir=str(tmp_path / "cache")), progress=False)
    shutil.rmtree(folder)
    with open(f"{folder}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextlib.contextmanager
def starting(source: Path, tmp_path: Path, *flags: str) -> Iterator[LiveServer]:
    """A server that waits for the conversion."""
    # Link the compiled kernels: compiling them takes longer than the rest of the test.
    (tmp_path / "cache" / "kernels").symlink_to(kernel_folder(None))
    common_flags = (
        "--served-model-name=tiny",
        "--shutdown-timeout=20",
        f"--cache-dir={tmp_path / 'cache'}",
    )
    live = LiveServer(str(source), tmp_path / "log", *common_flags, *flags)
    try:
        end_s = time.monotonic() + WAIT_S
        while not is_converting(live):
            assert time.monotonic() < end_s and live.process.poll() is None, live.text()
            time.sleep(0.05)
        yield live
    finally:
        live.close()


def is_converting(live: LiveServer) -> bool:
    """Request /ready several times, so that every API server reports that it waits for the
    conversion."""
    try:
        return all("converts" in live.ask("/ready").text for _ in range(12))
    except httpx.ConnectError:
        return False


@pytest.mark.parametrize("api_servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_port_answers_before_the_checkpoint_is_converted(
    source: Path, lock: IO[str], tmp_path: Path, api_servers: int
) -> None:
    with starting(source, tmp_path, f"--api-server-count={api_servers}") as live:
        health, ready, models = (live.ask(path) for path in ("/health", "/ready", "/v1/models"))
        alive = live.ask("/live")
        chat = live.ask("/v1/chat/completions", CHAT)

        assert alive.status_code == 200
        assert ready.json()["error"]["message"] == (
            "The server is starting: waiting for another process that converts the same file."
        )
        assert health.json() == ready.json()
        for refused in (health, ready, models, chat):
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["type"] == "server_error"
        assert "accepts no requests yet" in chat.json()["error"]["message"]
        fcntl.flock(lock, fcntl.LOCK_UN)
        live.wait_ready(60)


def test_a_bad_checkpoint_fails_the_start_with_one_line_and_status_1(
    source: Path, lock: IO[str], tmp_path: Path
) -> None:
    with starting(source, tmp_path) as live:
        source.write_bytes(b"no such thing")

        fcntl.flock(lock, fcntl.LOCK_UN)

        assert live.wait_exit() == 1
        (line,) = [line for line in live.text().splitlines() if "gaudiserve: " in line]
        assert "tiny.gguf" in line
        assert "Traceback" not in live.text()
        assert live.leftovers() == []


@pytest.mark.parametrize("api_servers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_waits_for_its_checkpoint(
    source: Path, lock: IO[str], tmp_path: Path, number: signal.Signals, api_servers: int
) -> None:
    with starting(source, tmp_path, f"--api-server-count={api_servers}") as live:
        assert len(children_of(live.pid)) == (api_servers if api_servers > 1 else 0)

        live.signal(number)

        assert live.wait_exit() == 0
        assert live.leftovers() == []
        assert ("Ctrl-C again stops at once" in live.text()) == (number == signal.SIGINT)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize(
    ("flags", "host", "is_warned"),
    [
        ((), "127.0.0.1", False),
        (("--host=0.0.0.0", "--api-key=k"), "localhost", False),
        (("--host=0.0.0.0", "--api-server-count=2"), "localhost", True),
    ],
)
def test_the_first_lines_have_working_urls_and_warn_of_an_open_server(
    flags: tuple[str, ...], host: str, is_warned: bool, tiny: str, tmp_path: Path
) -> None:
    with running(tiny, tmp_path / "log", "--max-model-len=64", *flags) as live:
        text = live.text()
        (line, *_) = [line for line in text.splitlines() if " Ready after " in line]
        urls = re.findall(r"http://[^\s,;]+", line)
        key = {"Authorization": "Bearer k"}
        answers = [
            httpx.get(
                url.replace("/v1", "/v1/models"), headers=key, timeout=WAIT_S, trust_env=False
            )
            for url in urls
        ]
        before = len(live.text())
        live.close()
        assert "WARNING" not in live.text()[before:]

    assert [url for url in urls if "://localhost:" in url or "://127.0.0.1:" in url] == [
        f"http://{host}:{live.port}{path}" for path in ("/v1", "/", "/docs")
    ]
    assert [answer.status_code for answer in answers] == [200] * len(urls)
    assert "http://0.0.0.0" not in text
    assert f"gaudiserve {VERSION}, Python " in text.splitlines()[0]
    assert text.count(f"gaudiserve {VERSION}, ") == 1
    warned = [line for line in text.splitlines() if "without an API key" in line]
    assert len(warned) == is_warned
    assert all("WARNING" in line and "--api-key" in line for line in warned)


def test_urls_of_disabled_features_are_not_shown(tiny: str, tmp_path: Path) -> None:
    flags = ("--max-model-len=64", "--no-enable-page", "--disable-fastapi-docs")
    with running(tiny, tmp_path / "log", *flags) as live:
        (line,) = [line for line in live.text().splitlines() if " Ready after " in line]

    assert line.endswith(f"context 64 tokens; API http://127.0.0.1:{live.port}/v1")


@pytest.mark.parametrize("count", [1, 2])
def test_the_start_log_and_the_metrics_show_the_memory_of_each_process(
    tiny: str, tmp_path: Path, count: int
) -> None:
    flags = ("--max-model-len=64", f"--api-server-count={count}")
    with running(tiny, tmp_path / "log", *flags) as live:
        wait_for(lambda: "; resident now: " in live.text())
        (line,) = [line for line in live.text().splitlines() if "; resident now: " in line]
        page = live.ask("/metrics").text

    (cache,) = [line for line in live.text().splitlines() if " KV cache: " in line]
    assert cache.endswith(
        ": 32.0 sequences of 64 tokens at once (default: 2048 tokens for each of 32 sequences, at "
        "most 10% of the free memory, 25% if one full context needs it; "
        "--kv-cache-memory-bytes sets the size)"
    )
    names = {f"API server {index}" for index in range(count)} | {"engine 0"}
    assert re.search(r"Memory of each engine: weights [\d.]+ \w+, KV cache [\d.]+ \w+ when", line)
    assert all(re.search(rf"[\d.]+ [MG]iB in {name}", line) for name in names)
    sizes = dict(re.findall(r'process_resident_memory_bytes\{process="([^"]+)"\} (\S+)', page))
    assert sizes.keys() >= names
    assert all(float(size) > 2**20 for size in sizes.values())


@pytest.mark.parametrize("api_servers", [1, 2])
def test_systemd_is_told_when_the_server_is_ready(
    tiny: str, tmp_path: Path, api_servers: int
) -> None:
    name = f"gaudiserve-{tmp_path}"
    flags = ("--max-model-len=64", f"--api-server-count={api_servers}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.settimeout(WAIT_S)
        with running(tiny, tmp_path / "log", *flags, env={"NOTIFY_SOCKET": f"@{name}"}):
            assert systemd.recv(100) == b"READY=1"

"""schemathesis with the server's OpenAPI schema: no request breaks or hangs the server."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LiveServer, running
from tiny_encoders import make_pooling
from tiny_models import make_tiny

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

SECONDS = 45
HANG_S = 30
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "unsupported_method"),
)


@pytest.fixture(params=["generating", "pooling"])
def every_route(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, tmp_path: Path
) -> Iterator[LiveServer]:
    """A server with the development routes enabled: a generating model, or a pooling model."""
    make = make_tiny if request.param == "generating" else make_pooling
    folder = make("llama" if request.param == "generating" else "bert", tmp_path / "tiny")
    flags = ("--api-key=key", "--enable-dev-endpoints", "--tool-call-parser=hermes")
    python = pytestconfig.getoption("--server-python")
    with running(str(folder), tmp_path / "log", *flags, python=python) as live:
        yield live


def run_schemathesis(server: LiveServer, folder: Path, seconds: int, *words: str) -> None:
    """Run schemathesis for `seconds`; fails if it finds a wrong answer."""
    options = {
        "header": "Authorization: Bearer key",
        "phases": "examples,coverage,fuzzing",
        "checks": ",".join(CHECKS),
        "max-examples": "30",
        "max-time": str(seconds),
        "request-timeout": str(HANG_S),
        "suppress-health-check": "all",
        "seed": "1",
    }
    words = (*words, *(f"--{name}={value}" for name, value in options.items()))
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", *words, "--continue-on-failure",
         f"{server.url}/openapi.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds + 120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    log = server.log.read_text(errors="replace")
    assert "status=5" not in log and "Traceback" not in log


def test_no_request_breaks_or_hangs_the_server(every_route: LiveServer, tmp_path: Path) -> None:
    # A sleeping server would answer 503 to all other requests.
    run_schemathesis(every_route, tmp_path, SECONDS, "--exclude-path=/sleep")
    run_schemathesis(every_route, tmp_path, SECONDS // 5, "--include-path-regex=^/(sleep|wake_up)$")

    woken = every_route.http.post("/wake_up", headers={"x-api-key": "key"})

    assert woken.status_code == 200
    assert every_route.http.get("/ready").status_code == 200

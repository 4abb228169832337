"""Sleep and wake-up of a real server: the examples of docs/sleep.md, and answers during sleep."""

import re
import subprocess
from pathlib import Path

from live import running

PAGE = Path(__file__).parents[2] / "docs" / "sleep.md"
REQUEST = {"model": "demo", "prompt": "One two", "max_tokens": 8, "temperature": 0}


def test_the_examples_put_a_server_to_sleep_and_wake_it_up(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    flags = ("--enable-dev-endpoints", "--api-key=secret", "--served-model-name=demo")
    with running("demo", tmp_path / "log", *flags) as server:
        server.http.headers["authorization"] = "Bearer secret"
        before = server.http.post("/v1/completions", json=REQUEST).json()["choices"]

        printed = [_run(line, server.url) for line in example.splitlines()]

        after = server.http.post("/v1/completions", json=REQUEST).json()["choices"]
        server.http.post("/sleep", params={"level": 2, "mode": "wait"})
        asleep = server.http.post("/v1/completions", json=REQUEST)
        ready = server.http.get("/ready")
        server.http.post("/wake_up").raise_for_status()
        again = server.http.post("/v1/completions", json=REQUEST).json()["choices"]
        assert printed == ["{}", '{"is_sleeping":true}', "{}"]
        assert (asleep.status_code, ready.status_code) == (503, 503)
        assert before == after == again


def _run(line: str, url: str) -> str:
    command = line.replace("http://localhost:8000", url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout

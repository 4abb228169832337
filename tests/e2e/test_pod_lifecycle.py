"""A pod's lifecycle on the real daemon, driven as by the kubelet: probes, preStop, SIGTERM,
SIGKILL. Probes, flags and the pause come from the deployment in deploy/kubernetes, with shorter
times."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, alive, children_of
from manifests import KUBERNETES, documents
from waits import WAIT_S

(DEPLOYMENT,) = documents((KUBERNETES / "base" / "deployment.yaml").read_text(encoding="utf-8"))
(CONTAINER,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
KEY = {"authorization": "Bearer pod-key"}
FLAGS = ("--served-model-name=tiny", "--dtype=float32")


def pod_variables(shutdown_timeout_s: float) -> dict[str, str]:
    """The variables of the container, on a CPU and with another timeout."""
    given = {item["name"]: item["value"] for item in CONTAINER["env"] if "value" in item}
    changed = {
        "GAUDISERVE_DEVICE": "cpu",
        "GAUDISERVE_SHUTDOWN_TIMEOUT": str(shutdown_timeout_s),
        "GAUDISERVE_API_KEY": "pod-key",
    }
    # The folders of the image.
    return {name: given[name] for name in given if name != "XDG_CACHE_HOME"} | changed


def start(model: str, folder: Path, shutdown_timeout_s: float = 60) -> LiveServer:
    return LiveServer(model, folder / "log", *FLAGS, env=pod_variables(shutdown_timeout_s))


def probe(live: LiveServer, kind: str) -> int | None:
    """Status that the kubelet receives; None without an answer."""
    request = CONTAINER[f"{kind}Probe"]
    try:
        with httpx.Client(base_url=live.url, timeout=request["timeoutSeconds"]) as http:
            return http.get(request["httpGet"]["path"]).status_code
    except httpx.TransportError:
        return None


class Streamed(threading.Thread):
    """Reads a stream of `max_tokens` tokens to its end."""

    def __init__(self, live: LiveServer, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{live.url}/v1/completions"
        self._body = {
            "model": "tiny", "prompt": "go", "max_tokens": max_tokens,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        self.begun = threading.Event()
        self.events: list[str] = []
        self.error: httpx.TransportError | None = None

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=KEY, timeout=60
            ) as response:
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except httpx.TransportError as error:
            self.error = error

    @property
    def finish_reason(self) -> Any:
        """The finish reason in the last chunk of a stream, which must have ended with [DONE]."""
        assert self.events[-1] == "[DONE]"
        return json.loads(self.events[-2])["choices"][0]["finish_reason"]


def started(live: LiveServer, max_tokens: int) -> Streamed:
    stream = Streamed(live, max_tokens)
    stream.start()
    assert stream.begun.wait(WAIT_S)
    return stream


def ask(live: LiveServer) -> httpx.Response:
    body = {"model": "tiny", "prompt": "go", "max_tokens": 1}
    return httpx.post(f"{live.url}/v1/completions", json=body, headers=KEY, timeout=WAIT_S)


def test_a_pod_starts_serves_drains_and_ends_within_its_grace_period(
    tiny_model: str, tmp_path: Path
) -> None:
    live = start(tiny_model, tmp_path)
    try:
        # Start-up: the liveness probe succeeds as soon as the port is open, the start-up probe
        # only when requests are answered.
        before: list[tuple[int | None, int | None]] = []
        end = time.monotonic() + 120
        while not before or before[-1][0] != 200:
            assert time.monotonic() < end and live.process.poll() is None, live.text()
            before.append((probe(live, "startup"), probe(live, "liveness")))
        answered = [entry for entry in before if entry[0] is not None]
        assert answered[0] == (503, 200)
        assert {liveness for _, liveness in answered} == {200}
        assert ask(live).status_code == 200
        assert httpx.post(f"{live.url}/v1/completions", json={}).status_code == 401

        # Deletion of the pod: while preStop runs, the server still accepts requests.
        streams = [started(live, 1500) for _ in range(2)]
        word, _ = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
        subprocess.run([word, "0.2"], check=True)
        assert probe(live, "readiness") == 200
        assert ask(live).status_code == 200

        # SIGTERM: new requests are refused, the server stays alive, and the streams continue.
        live.signal(signal.SIGTERM)
        while probe(live, "readiness") == 200:
            assert time.monotonic() < end
        assert probe(live, "readiness") == 503
        assert probe(live, "liveness") == 200
        refused = ask(live)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert all(stream.is_alive() for stream in streams)

        for stream in streams:
            stream.join(60)
            assert stream.finish_reason == "length"
        assert live.wait_exit() == 0
        assert live.leftovers() == []
    finally:
        live.close()


@pytest.mark.slow
def test_a_pod_that_outlasts_its_grace_period_is_killed_and_its_successor_starts(
    tiny_model: str, tmp_path: Path
) -> None:
    """With a timeout longer than the grace period, which the manifests do not allow."""
    live = start(tiny_model, tmp_path, shutdown_timeout_s=60)
    try:
        live.wait_ready()
        stream = started(live, 1900)
        family = [live.pid, *children_of(live.pid)]

        live.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert stream.is_alive()
        # The container runtime kills its first process; here the other processes end by themselves.
        os.kill(live.pid, signal.SIGKILL)

        stream.join(WAIT_S)
        assert stream.error is not None
        assert live.wait_exit() == -signal.SIGKILL
        end = time.monotonic() + WAIT_S
        while any(alive(pid) for pid in family):
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        live.close()

    again = start(tiny_model, tmp_path)
    try:
        again.wait_ready()
        assert ask(again).status_code == 200
    finally:
        again.close()


READ_ONLY = """#!/bin/sh
exec unshare --mount sh -euc '
mount --make-rprivate /; mount --bind / /; mount -o remount,ro,bind /
mount --bind "$0" /mnt; mount -t tmpfs none /tmp
if touch /root/probe 2>/dev/null; then echo "the root is not read-only"; exit 9; fi
exec "$@"' {model} {python} "$@"
"""


@pytest.mark.deploy
@pytest.mark.skipif(
    Path(sys.executable).is_relative_to("/tmp"),
    reason="this environment lies in /tmp, which is another folder in the pod",
)
def test_a_pod_with_a_read_only_root_serves(tiny_model: str, tmp_path: Path) -> None:
    """Run in a mount namespace in which only /tmp is writable; creating it requires root."""
    shell = tmp_path / "python"
    shell.write_text(READ_ONLY.format(model=tiny_model, python=shlex.quote(sys.executable)))
    shell.chmod(0o755)
    folders = {"TMPDIR": "/tmp", "XDG_RUNTIME_DIR": "/tmp", "XDG_CACHE_HOME": "/tmp/cache"}
    environment = {**folders, **pod_variables(10)}

    live = LiveServer("/mnt", tmp_path / "log", *FLAGS, env=environment, python=str(shell))
    try:
        live.wait_ready()
        assert ask(live).status_code == 200
        live.signal(signal.SIGTERM)
        assert live.wait_exit() == 0
    finally:
        live.close()
    assert " ERROR " not in live.text()

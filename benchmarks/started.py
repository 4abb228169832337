"""Starts an OpenAI-compatible server by its command, waits until it answers, and stops it with all
its processes."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

READY_S = 600.0


class NotStarted(SystemExit):
    """The command ended before its server answered, or the server did not answer in time."""


@dataclass(frozen=True)
class Started:
    """A server that has answered a request, `start_s` seconds after its command was run."""

    pid: int
    port: int
    model: str
    """Model name in requests."""
    start_s: float


@contextlib.contextmanager
def started(command: str, model: str | None = None) -> Iterator[Started]:
    """Run a command, with `{port}` replaced by a free port, until its server answers a request for
    `model`, or for the first model that it lists. Raises NotStarted if it does not answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun_s = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            shlex.split(command.replace("{port}", str(port))),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            try:
                name = _wait(process, port, model)
            except NotStarted as error:
                raise NotStarted(f"{error}; its last line: {_last_line(log)}") from None
            yield Started(process.pid, port, name, time.monotonic() - begun_s)
        finally:
            _stop(process)


def _wait(process: "subprocess.Popen[bytes]", port: int, model: str | None) -> str:
    """Wait until the server answers a request, and return the model's name."""
    messages = [{"role": "user", "content": "Hello"}]
    end_s = time.monotonic() + READY_S
    last_error: Exception | None = None
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise NotStarted(f"the server ended with {process.returncode}")
        try:
            name = model or _listed(port)
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps({"model": name, "messages": messages, "max_tokens": 1}).encode(),
                {"content-type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=300).read()
            return name
        except (OSError, KeyError, IndexError, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 400:
                answer = error.read().decode(errors="replace")
                raise NotStarted(f"the server refuses a chat: {answer}") from None
            last_error = error
            time.sleep(0.1)
    raise NotStarted(f"the server did not answer within {READY_S:g} s, at last: {last_error!r}")


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "none")


def _listed(port: int) -> str:
    models = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models"))
    return str(models["data"][0]["id"])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop the process group, including children that outlive the first process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

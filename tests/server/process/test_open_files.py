"""server/process/open_files.py, and a daemon that runs out of descriptors."""

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from live import ROOT, running
from tiny_models import make_tiny
from waits import WAIT_S, wait_for

from server.process.open_files import RESERVED

SCRIPT = """
import logging, resource, sys
from server.process.open_files import max_connections, raise_limit, warn_if_low
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s", stream=sys.stdout)
raise_limit()
warn_if_low(1024, 256)
print(max_connections())
"""


def said(soft: int, hard: int) -> list[str]:
    run = [sys.executable, "-c", SCRIPT, str(soft), str(hard)]
    found = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_the_soft_limit_is_raised_and_a_low_hard_limit_is_logged_with_both_numbers() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)

    low, high = said(256, 512), said(256, enough)

    assert low == [
        "INFO The limit of open files was raised from 256 to 512",
        "WARNING The limit of open files allows 384 connections, but --max-queued-requests 1024 "
        "and --max-num-seqs 256 need 1280: raise it to 1408 (ulimit -n, LimitNOFILE=, "
        "--ulimit nofile=)",
        "384",
    ]
    assert high == [
        f"INFO The limit of open files was raised from 256 to {enough}",
        str(enough - RESERVED),
    ]


def test_a_server_without_free_descriptors_recovers_when_idle_clients_are_closed(
    tmp_path: Path,
) -> None:
    model = str(make_tiny("llama", tmp_path / "tiny", max_position_embeddings=512))
    few = tmp_path / "python"
    few.write_text(f'#!/bin/sh\nulimit -n 256\nexec {sys.executable} "$@"\n')
    few.chmod(0o700)
    flags = ("--served-model-name=tiny", "--dtype=float32", "--request-header-timeout=5")
    with running(model, tmp_path / "log", *flags, python=str(few)) as live, ExitStack() as idle:
        for _ in range(300):
            with suppress(OSError):
                idle.enter_context(
                    socket.create_connection(("127.0.0.1", live.port), timeout=WAIT_S)
                )
        refused = live.ask("/health")
        wait_for(lambda: live.ask("/health").status_code == 200)
        body = {"prompt": "hi", "max_tokens": 2}

        answers = [live.ask("/v1/completions", body).status_code for _ in range(5)]

        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_overloaded")
        assert answers == [200] * 5
        assert "allows 128 connections, but --max-queued-requests 1024" in live.text()
        assert live.text().count("new ones get 503") == 1

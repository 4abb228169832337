"""benchmarks/compare.py with a real server, and with a server that does not start."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_server_that_does_not_start_is_skipped(tiny_model: str, tmp_path: Path) -> None:
    ours = [sys.executable, "-m", "gaudiserve", "serve", tiny_model, "--port={port}"]
    ours += ["--device=cpu", "--dtype=float32", "--max-num-seqs=64"]
    ended = [sys.executable, "-c", "raise ValueError('no card')"]

    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/compare.py",
            f"--server=ours={shlex.join(ours)}",
            f"--server=another={shlex.join(ended)}",
            "--turns",
            "--only=shared",
            "--rounds=1",
            f"--out={tmp_path / 'both'}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 1, done.stderr
    assert (
        "another: the server ended with 1; its last line: ValueError: no card; left out"
        in done.stderr
    )
    (measured,) = json.loads((tmp_path / "both.json").read_text())["servers"]
    (rate,) = measured["output_tokens_s"].values()
    assert rate > 0
    assert f"| 1024 shared + 32/32, 8 streams | {rate:.1f} (1.00) |" in done.stdout
    assert (tmp_path / "both.md").read_text() == done.stdout.removesuffix("\n")

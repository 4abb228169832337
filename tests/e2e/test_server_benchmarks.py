"""Benchmarks that start servers: answers that quote their prompts, and adapters."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(model: str, *flags: str) -> str:
    ours = [sys.executable, "-m", "gaudiserve", "serve", model, "--port={port}", "--device=cpu"]
    return shlex.join([*ours, "--dtype=float32", *flags])


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_quoting_benchmark_compares_servers_with_the_first_server(
    tiny_model: str, tmp_path: Path
) -> None:
    # The braces in a command are kept and not replaced by the port.
    ngram = '--speculative-config={"method":"ngram","num_speculative_tokens":4}'

    printed = run(
        "quoting.py",
        f"--server=without={command(tiny_model)}",
        f"--server=ngram={command(tiny_model, ngram)}",
        "--turns=1",
        "--max-tokens=8",
        f"--out={tmp_path / 'both.json'}",
    )

    servers = json.loads((tmp_path / "both.json").read_text())["servers"]
    assert [server["name"] for server in servers] == ["without", "ngram"]
    (first,), (second,) = (server["rates"] for server in servers)
    assert f"| without | {first:.1f} | {first:.1f} | {first:.1f} | 1.00 | " in printed
    assert (
        f"| ngram | {second:.1f} | {second:.1f} | {second:.1f} | {second / first:.2f} |" in printed
    )
    assert ngram in servers[1]["command"]


@pytest.mark.slow
def test_adapters_are_measured_over_http(tiny_model: str) -> None:
    lora = ("--enable-lora", "--max-loras=2", "--max-lora-rank=4", "--lora-modules", "{modules}")
    # Unquote {modules}, so that each adapter becomes a separate word.
    server = command(tiny_model, *lora).replace("'{modules}'", "{modules}")

    printed = run(
        "adapters.py",
        f"--model={tiny_model}",
        f"--server=ours={server}",
        *("--adapters=2", "--rank=4", "--rounds=1", "--tokens=4", "--streams", "2"),
    )

    rows = [line.split() for line in printed.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["ours", "2", kind] for kind in ("none", "one", "2")]
    assert all(float(row[-2]) > 0 for row in rows)
    assert rows[0][-1] == "1.000"

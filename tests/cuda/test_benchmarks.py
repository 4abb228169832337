"""The GPU benchmarks run on the CPU with a tiny shape."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ("--device=cpu", "--shape=tiny", "--dtype=float32")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_decode_steps_are_measured_against_the_bound() -> None:
    done = run("cuda_decode.py", *TINY, "--rows=2", "--context=40", "--steps=3", "--copy-mib=1")

    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "tiny shape in float32" in lines[0]
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert len(cells) == lines[-2].count("---") == 7
    assert cells[0] == "2" and float(cells[3]) > 0


@pytest.mark.slow
def test_the_comparison_runs_both_sides_without_failures() -> None:
    sides = ("--sides", "gaudiserve", "continuous")

    done = run("cuda_compare.py", *TINY, "--streams=2", "--prompt=8", "--output=4", *sides)

    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1].count("|") == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_benchmark_fails_with_one_sentence() -> None:
    done = run("cuda_decode.py")

    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "'cuda'" in done.stderr

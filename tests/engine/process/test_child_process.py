"""A process ends although a thread does not."""

import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from engine.process.child_process import bound_exit

ThreadPoolExecutor(1).submit(time.sleep, float(sys.argv[1]))
print("flushed", end="")
bound_exit(7, 0.2)
sys.exit(3)
"""


def _ended(seconds: str) -> tuple[int, str, float]:
    started_s = time.monotonic()
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, seconds],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, time.monotonic() - started_s


def test_a_busy_thread_delays_the_exit_for_a_limited_time() -> None:
    code, output, took_s = _ended("50")

    assert (code, output) == (7, "flushed")
    assert took_s < 40


def test_an_exit_without_busy_threads_is_not_changed() -> None:
    code, output, _ = _ended("0")

    assert (code, output) == (3, "flushed")

"""Resident memory of processes by name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from server.metrics.processes import OTHER, ProcessMemory

MIB = 2**20
TITLED = """
import subprocess, sys
from engine.process.child_process import set_title
set_title({title!r})
held = bytearray({held})
inner = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdout=-1)
inner.stdout.readline()
print(flush=True)
input()
inner.kill()
"""


@contextmanager
def child(title: str, held: int = 0) -> Iterator[None]:
    code = TITLED.format(title=title, held=held)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.communicate(b"\n")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.getcwd()}


def test_each_process_of_the_family_has_its_resident_bytes() -> None:
    with child("engine of the test", held=64 * MIB):
        memory = ProcessMemory(os.getpid(), "API server 0")
        sizes = memory.sizes()
        samples = {sample.labels["process"]: sample.value for sample in memory.metric().samples}

    assert sizes.keys() >= {"API server 0", "engine of the test", OTHER}
    assert sizes["API server 0"] > MIB
    assert 64 * MIB < sizes["engine of the test"] < 264 * MIB
    assert sizes[OTHER] > MIB
    assert samples.keys() == sizes.keys()


def test_resident_bytes_of_processes_with_the_same_name_are_added() -> None:
    with child("worker of the test", held=32 * MIB), child("worker of the test", held=32 * MIB):
        sizes = ProcessMemory(os.getpid(), "supervisor").sizes()

    assert sizes["worker of the test"] > 64 * MIB


def test_a_process_that_has_ended_has_no_bytes() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    memory = ProcessMemory(process.pid, "supervisor")
    assert memory.sizes() == {}
    assert not memory.metric().samples

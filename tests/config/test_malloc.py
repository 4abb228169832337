"""config/malloc.py: memory that a thread frees is returned to the system."""

import os
import subprocess
import sys

import pytest

from config.engine import EngineConfig
from config.loading.env import runtime_environment

SCRIPT = """
import ctypes, os, threading
from config.malloc import map_large_blocks, retain_freed_memory, trim_memory

{setting}
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
is_freed, is_over = threading.Event(), threading.Event()

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def use_memory():
    blocks = [library.malloc(2**16) for _ in range(640)]
    for block in blocks:
        ctypes.memset(block, 1, 2**16)
    for block in blocks:
        library.free(block)
    is_freed.set()
    is_over.wait()

before = resident_bytes()
thread = threading.Thread(target=use_memory)
thread.start()
is_freed.wait()
trim_memory()
print(resident_bytes() - before)
is_over.set()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize(
    ("setting", "added"),
    [
        ("retain_freed_memory(2**26)", runtime_environment(EngineConfig(model="m"))),
        ("map_large_blocks()", {}),
    ],
    ids=["engine", "API server"],
)
def test_a_thread_that_freed_40_mib_retains_at_most_1_5_mib(
    setting: str, added: dict[str, str]
) -> None:
    script = SCRIPT.format(setting=setting)

    found = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **added}, stdout=subprocess.PIPE
    )

    assert int(found.stdout) < 3 * 2**19

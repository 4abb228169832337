"""Calls for the tests of engine/process/isolation.py: each payload selects the behavior of a call.

The setup `fail` makes the preparation raise an exception; `spin 1` makes it compute for a second.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    prepared_in = os.getpid()
    if setup == b"fail":
        raise SystemExit(1)
    if setup.startswith(b"spin "):
        end = time.monotonic() + float(setup[5:])
        while time.monotonic() < end:
            pass

    def call(payload: bytes) -> bytes:
        name, _, argument = payload.partition(b" ")
        if name == b"echo":
            return setup + argument
        if name == b"pids":
            return b"%d %d" % (prepared_in, os.getpid())
        if name == b"crash":
            ctypes.string_at(0)
        if name == b"spin":
            while True:
                pass
        if name == b"sleep":
            time.sleep(60)
        if name == b"allocate":
            return b"%d" % len(bytearray(int(argument)))
        if name in (b"kill", b"stop"):
            os.kill(os.getpid(), signal.SIGKILL if name == b"kill" else signal.SIGSTOP)
            # Sleep, because the signal may arrive a little later.
            time.sleep(60)
        if name == b"exit":
            os._exit(5)
        raise ValueError(payload.decode())

    return call

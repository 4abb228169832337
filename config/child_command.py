"""Runs external programs. A program and its process group end with this process, even if this
process is killed with SIGKILL."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Each program runs below a guard process, because PR_SET_PDEATHSIG kills only the direct child, not
# its children, such as the cc1plus that g++ starts.
_GUARD = """
import os, sys
sys.path[:] = [path for path in sys.path if path]
import signal, subprocess, threading
from setproctitle import setproctitle
name, *command = sys.argv[1:]
os.putenv("SPT_NOENV", "1")
setproctitle("gaudiserve: guard of " + name)
os.unsetenv("SPT_NOENV")

def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
status = subprocess.call(command, stdin=subprocess.DEVNULL)
if status < 0:
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextmanager
def running(
    command: Sequence[str],
    *,
    stdout: IO[bytes] | IO[str] | int = subprocess.PIPE,
    stderr: IO[bytes] | IO[str] | int = subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `command` with empty stdin. The process in the block exits with the status of `command`.
    At the end of the block, and when this process ends, `command` and the rest of its process group
    are killed. `environment`: all variables of `command`; None: a copy of this process's
    variables."""
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _GUARD, Path(command[0]).name, *command],
            stdin=theirs,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        with process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        os.close(ours)

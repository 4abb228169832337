"""Reads small files with size limits, and writes files atomically."""

import contextlib
import errno
import os
import secrets
import select
import stat
import time
from pathlib import Path

MAX_PATH_CHARACTERS = 4_096
"""Maximum path length on Linux. Resolving longer paths takes quadratic time."""
PIPE_TIMEOUT_S = 10.0
"""Time limit for reading a pipe. A FIFO without a writer would block forever."""
_PIECE_BYTES = 2**16


def is_present(path: str | Path) -> bool:
    """Whether there is anything at `path`, also a FIFO, a folder or a broken link. A caller that
    tests with `is_file` would silently use the defaults of a missing file for a folder."""
    return os.path.lexists(path)


def read_limited(
    path: str | Path, max_bytes: int, *, takes_pipes: bool = True, timeout_s: float = PIPE_TIMEOUT_S
) -> bytes:
    """All bytes of a file, or of a pipe that is closed within `timeout_s`. Raises OSError, also for
    a folder, for a file larger than `max_bytes`, for a pipe that is not closed in time and, without
    `takes_pipes`, for anything except a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            if status.st_size > max_bytes:
                raise _too_large(path, max_bytes, f"it has {status.st_size} bytes")
            timeout_s = float("inf")
        elif stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, "it is a folder, it must be a file", str(path))
        elif not takes_pipes:
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return _read(descriptor, path, max_bytes, timeout_s)
    finally:
        os.close(descriptor)


def _read(descriptor: int, path: str | Path, max_bytes: int, timeout_s: float) -> bytes:
    deadline_s = time.monotonic() + timeout_s
    data = bytearray()
    while len(data) <= max_bytes:
        if timeout_s != float("inf"):
            # A FIFO without a writer has no event: a read would return the end of the file.
            left_s = max(0.0, deadline_s - time.monotonic())
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(left_s * 1000):
                raise TimeoutError(
                    errno.ETIMEDOUT, f"it did not end within {timeout_s:g} s", str(path)
                )
        piece = os.read(descriptor, min(_PIECE_BYTES, max_bytes + 1 - len(data)))
        if not piece:
            return bytes(data)
        data += piece
    raise _too_large(path, max_bytes, "it has more")


def _too_large(path: str | Path, max_bytes: int, size: str) -> OSError:
    return OSError(errno.EFBIG, f"{size}, at most {max_bytes} are allowed", str(path))


def write_whole(path: str | Path, content: bytes) -> None:
    """Write or replace a file atomically: readers see either the old or the new content. A path
    that is not a regular file, such as /dev/stdout, is written directly. Raises OSError; a regular
    file then keeps its old content."""
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    # Processes in two containers that share the folder may have the same process id.
    partial = Path(f"{path}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise

"""RestartLimit: limits the consecutive restarts of a process and sets the wait before each
restart."""

import os
import struct
import time
import weakref

STABLE_S = 60.0
"""Seconds of being ready after which the count of consecutive restarts is reset."""
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
"""Wait before the second consecutive restart, which doubles with each further restart, and the
default maximum wait; seconds. The first restart is immediate."""

_READY = struct.Struct("=d")
"""Time at which a process was ready, on the monotonic clock, which all processes of a machine
share: the wall clock can be set."""


def mark_ready(ready_fd: int) -> None:
    """Record in `ready_fd`, the RestartLimit.ready_fd of this process, that this process is ready
    now. Only the first call of a process counts."""
    if not os.fstat(ready_fd).st_size:
        os.pwrite(ready_fd, _READY.pack(time.monotonic()), 0)


class RestartLimit:
    """Counts restarts of a process, which calls `mark_ready(ready_fd)` when it is ready."""

    def __init__(self, max_restarts: int, max_wait_s: float = MAX_WAIT_S) -> None:
        """Allow `max_restarts` consecutive restarts, each at most `max_wait_s` after the end."""
        # Memory instead of a file: a cleaner of the directory for temporary files may delete files.
        self.ready_fd = os.memfd_create("ready")
        """Descriptor that the process must inherit, for `mark_ready`."""
        weakref.finalize(self, os.close, self.ready_fd)
        self._max_wait_s = max_wait_s
        self.max_restarts = max_restarts
        self.in_a_row = 0

    def wait_s(self, *, is_limited: bool = True) -> float | None:
        """Count an exit of the process. Returns the wait before its restart in seconds, or None if
        it must not be restarted. `is_limited`: no restart after `max_restarts`."""
        ready = os.pread(self.ready_fd, _READY.size, 0)
        os.ftruncate(self.ready_fd, 0)
        if not ready and not self.in_a_row:
            # A failed first start would fail again.
            return None
        if ready and time.monotonic() - _READY.unpack(ready)[0] > STABLE_S:
            self.in_a_row = 0
        self.in_a_row += 1
        if self.in_a_row > self.max_restarts and is_limited:
            return None
        # The exponent is bounded: floats overflow at 2**1024.
        wait_s = FIRST_WAIT_S * 2.0 ** min(self.in_a_row - 2, 30)
        return 0.0 if self.in_a_row == 1 else min(self._max_wait_s, wait_s)

    def describe(self, wait_s: float) -> str:
        """Text for the log: `it is started again in 0.5 s, restart 2 of at most 5 in a row`."""
        wait = f" in {wait_s:g} s" if wait_s else ""
        limit = f" of at most {self.max_restarts}" if self.in_a_row <= self.max_restarts else ""
        return f"it is started again{wait}, restart {self.in_a_row}{limit} in a row"

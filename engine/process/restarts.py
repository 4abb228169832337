"""RestartLimit: limits the consecutive restarts of a process and sets the wait before each
restart."""

import os
import time
from pathlib import Path

STABLE_S = 60.0
"""Seconds of being ready after which the count of consecutive restarts is reset."""
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
"""Wait before the second consecutive restart, which doubles with each further restart, and the
default maximum wait; seconds. The first restart is immediate."""


def mark_ready(ready_file: Path) -> None:
    """Record in the modification time of `ready_file` that this process is ready now. Uses the
    monotonic clock, which all processes of a machine share: the wall clock can be set."""
    ready_file.touch()
    now_s = time.monotonic()
    os.utime(ready_file, (now_s, now_s))


class RestartLimit:
    """Counts restarts of a process, which calls `mark_ready(ready_file)` each time it is ready."""

    def __init__(self, ready_file: Path, max_restarts: int, max_wait_s: float = MAX_WAIT_S) -> None:
        """Allow `max_restarts` consecutive restarts, each at most `max_wait_s` after the end."""
        self._ready_file = ready_file
        self._max_wait_s = max_wait_s
        self.max_restarts = max_restarts
        self.in_a_row = 0

    def wait_s(self, *, is_misconfigured: bool = False, is_limited: bool = True) -> float | None:
        """Count an exit of the process. Returns the wait before its restart in seconds, or None if
        it must not be restarted. `is_limited`: no restart after `max_restarts`."""
        try:
            life_s = time.monotonic() - self._ready_file.stat().st_mtime
            self._ready_file.unlink()
            if life_s > STABLE_S:
                self.in_a_row = 0
        except OSError:
            # The process was not ready. A failed first start, or an invalid setting, would fail
            # again.
            if not self.in_a_row or is_misconfigured:
                return None
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

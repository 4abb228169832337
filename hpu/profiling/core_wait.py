"""CoreWait: warns about steps that were slow because their threads waited for a CPU core.

The kernel counts for each thread how long it was ready to run without a core. Reading the counts of
all threads takes about a millisecond, so they are read at most once per BASELINE_S, and after a
slow step.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from config.log import LimitedWarning
from hpu.host import ROOT, load_average, usable_cores

logger = logging.getLogger(__name__)

SLOW_STEP_S = 2.0
"""Minimum duration of a step that is examined; seconds."""
BASELINE_S = 1.0
"""Maximum age of the counts before a step; older counts are read again. Seconds."""


class CoreWait:
    """Measures a step. Call `begin` before and `end` after it, on the thread that runs the step."""

    def __init__(
        self, *, root: Path = ROOT, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._root = root
        self._clock = clock
        self._began_s = 0.0
        self._read_s = -float("inf")
        self._delays: dict[str, float] = {}
        self._slow = LimitedWarning(
            logger,
            "A step took %.1f s, of which its threads waited %.1f s for a core: %s (%d such steps "
            "so far)",
            clock=clock,
        )

    def begin(self) -> None:
        """Read the clock, and the counts if they are at least BASELINE_S old."""
        self._began_s = self._clock()
        if self._began_s - self._read_s >= BASELINE_S:
            self._delays, self._read_s = run_delays(self._root), self._began_s

    def end(self) -> None:
        """Warn if the step was slow and a thread waited for a core for more than half of it."""
        now_s = self._clock()
        step_s = now_s - self._began_s
        if step_s < SLOW_STEP_S:
            return
        delays = run_delays(self._root)
        # The threads of a step wait for each other: the longest wait delays the step.
        waited_s = max(
            (delay - self._delays.get(thread, 0.0) for thread, delay in delays.items()), default=0.0
        )
        # The counts may be up to BASELINE_S older than the start of the step.
        waited_s = min(waited_s, step_s)
        self._delays, self._read_s = delays, now_s
        if waited_s > step_s / 2:
            self._slow.add(step_s, waited_s, demand(self._root))


def run_delays(root: Path = ROOT) -> dict[str, float]:
    """Seconds for which each thread of this process was ready to run without a core, by thread id;
    empty if the kernel does not count them."""
    folder = root / "proc/self/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return {}
    delays = {thread: _run_delay(folder / thread / "schedstat") for thread in threads}
    return {thread: delay for thread, delay in delays.items() if delay is not None}


def _run_delay(path: Path) -> float | None:
    """Seconds that a thread waited for a core; None if the thread has ended or the kernel does not
    count them."""
    try:
        # Fields: time on a core, time waiting for a core, number of time slices.
        return int(path.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def demand(root: Path = ROOT) -> str:
    """Number of usable cores and, if known, the load average, as text."""
    cores = usable_cores(root)
    load = load_average(root)
    if load is None:
        return f"{cores} cores may be used"
    return f"the load average is {load:.1f}, and {cores} cores may be used"

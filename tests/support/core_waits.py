"""Waits for a core of the machine, to tell them from waits that the code causes."""

from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")


def core_wait_s() -> float:
    """Seconds in which this thread could run and other threads had the cores; 0 where the kernel
    does not count them."""
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0

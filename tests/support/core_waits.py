"""Time that threads wait for a CPU core, to distinguish it from waits that the code causes."""

from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")


def core_wait_s() -> float:
    """Seconds in which this thread was runnable while other threads used the cores; 0 if the kernel
    does not count them."""
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0

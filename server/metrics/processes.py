"""Resident memory of the server's processes, by name."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

PROC = Path("/proc")
TITLE = "gaudiserve: "
"""Start of the command line of a process with a title (engine.process.child_process.set_title)."""
MAX_AGE_S = 5.0
"""Maximum age of the sizes: a read takes about a millisecond, and pages may be scraped often."""
OTHER = "other"
"""Name of processes without a title, such as a compiler."""


class ProcessMemory:
    """Resident memory of a process, called `root_name`, and of its descendants."""

    def __init__(self, root: int, root_name: str) -> None:
        self._root, self._root_name = root, root_name
        self._sizes: Mapping[str, int] = {}
        self._read_s = -MAX_AGE_S

    def sizes(self) -> Mapping[str, int]:
        """Resident bytes by process name, at most MAX_AGE_S old.

        Bytes of processes with the same name are added. A page that processes share counts for
        each of them. Empty if the system has no /proc.
        """
        now_s = time.monotonic()
        if now_s - self._read_s < MAX_AGE_S:
            return self._sizes
        sizes: Counter[str] = Counter()
        for pid in _family(self._root):
            # The process may have ended.
            with contextlib.suppress(OSError):
                name = self._root_name if pid == self._root else _name(pid)
                sizes[name] += _resident(pid)
        self._sizes, self._read_s = sizes, now_s
        return sizes

    def metric(self) -> Metric:
        """A gauge of `sizes`."""
        family = GaugeMetricFamily(
            "gaudiserve:process_resident_memory_bytes",
            "Resident memory of the server's processes; shared pages count for each process.",
            labels=("process",),
        )
        for name, size in self.sizes().items():
            family.add_metric((name,), size)
        return family


def _family(root: int) -> Iterator[int]:
    yield root
    # Each thread lists the children that it started.
    for children in (PROC / str(root) / "task").glob("*/children"):
        pids: list[str] = []
        with contextlib.suppress(OSError):
            pids = children.read_text().split()
        for pid in pids:
            yield from _family(int(pid))


def _name(pid: int) -> str:
    command = (
        (PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    )
    return command.removeprefix(TITLE).strip() if command.startswith(TITLE) else OTHER


def _resident(pid: int) -> int:
    status = (PROC / str(pid) / "status").read_text()
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    # A process that has ended and was not waited for has no memory.
    return 0

"""Resources of the host: cores, memory, instruction sets. Reads the kernel's files below `root`."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> int:
    """Cores in the process's affinity mask, within its control group's CPU quota; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for folder in _group_folders(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cores = min(cores, math.ceil(quota))
    return max(1, cores)


def load_average(root: Path = ROOT) -> float | None:
    """Mean number of threads that ran or waited for a core or a disk over the last minute; None if
    unknown."""
    try:
        return float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None


def usable_memory(root: Path = ROOT) -> tuple[int, int]:
    """(available, total) bytes: the machine's, within the limits of the process's control groups.

    Page cache that can be dropped counts as available.
    """
    fields = _sizes(root / "proc/meminfo")
    total = fields.get("MemTotal", 0) * 1024
    free = fields.get("MemAvailable", fields.get("MemFree", 0)) * 1024
    if total == 0 and hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total
    for folder in _group_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is None or limit >= total:
            continue
        stat = _sizes(folder / "memory.stat")
        cache = stat.get("inactive_file", stat.get("total_inactive_file", 0))
        total = limit
        free = min(free, max(0, limit - max(0, (used or 0) - cache)))
    return min(free, total), total


def has_fast_bfloat16(root: Path = ROOT) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AMX, AVX512-BF16, or Arm's BF16)."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_flags(root))


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Instruction sets of the CPU by the kernel's names; empty if unknown."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """The process's control-group folders for `controller`, innermost first, version 2 and 1.

    In a container the kernel's path may lie outside the mount; then the mounted root is the group
    of the container.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup"
        if controllers:
            mount = mount / controller
        folder = mount / path.lstrip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _cpu_quota(folder: Path) -> float | None:
    """CPU quota of the control group in cores; None if unlimited."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    limit = _number(folder / "cpu.cfs_quota_us")
    length = _number(folder / "cpu.cfs_period_us")
    return limit / length if limit and limit > 0 and length else None


def _number(path: Path) -> int | None:
    """The integer in a file; None if the file is missing or contains another text, such as
    `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _sizes(path: Path) -> dict[str, int]:
    """Values of the `name number` and `name: number kB` lines of a file, without unit
    conversion."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    sizes = {}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            sizes[words[0]] = int(words[1])
    return sizes

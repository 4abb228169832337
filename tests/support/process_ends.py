"""Waits for processes: a process that a command has started, and its end."""

from pathlib import Path

from waits import wait_for


def pid_in(file: Path) -> int:
    """The process id that a command writes to `file`, as a line."""
    wait_for(lambda: file.is_file() and file.read_text().endswith("\n"))
    return int(file.read_text())


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""Whether this process runs in a container: hints of errors depend on it."""

from pathlib import Path

MARKS = (".dockerenv", "run/.containerenv")
"""Files that container runtimes create at the root."""


def in_container(root: Path = Path("/")) -> bool:
    """Whether a file that container runtimes create exists below `root`."""
    return any((root / mark).exists() for mark in MARKS)

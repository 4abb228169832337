"""Machine: what a preflight may look at, and Finding: what it says. Everything comes through a root
folder, a mapping and three functions, so that a test can lay out any machine."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

OK, WARN, ERROR = "ok", "warn", "error"

COMMAND_TIMEOUT_S = 10.0


class Finding(NamedTuple):
    """One thing looked at: how bad, in plain words, and what to do."""

    level: str
    about: str
    what: str
    do: str = ""


def run_command(argv: Sequence[str]) -> str | None:
    """What a command prints; None when there is none, or it fails or hangs."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, from its metadata: nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_module(name: str) -> bool:
    """Whether a top-level module could be imported; it is not."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        # It is loaded already, by something that left its specification empty.
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, unless a test says otherwise. Reading it touches no device."""

    environment: Mapping[str, str]
    root: Path = Path("/")
    run: Callable[[Sequence[str]], str | None] = run_command
    version: Callable[[str], str | None] = distribution_version
    has_module: Callable[[str], bool] = has_module
    python: tuple[int, int] = sys.version_info[:2]
    pid: int = field(default_factory=os.getpid)
    """Whose own hold on a card is no obstacle."""

    def text(self, path: str) -> str | None:
        """A file below the root, stripped; None when it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    @property
    def in_container(self) -> bool:
        """Whether one of the marks that container runtimes leave is there."""
        return any((self.root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))

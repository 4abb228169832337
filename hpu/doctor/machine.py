"""Machine: source of the data that the checks read. Finding: result of a check."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from config.cache_folder import in_container
from config.child_command import running

OK, WARN, ERROR = "ok", "warn", "error"

COMMAND_TIMEOUT_S = 10.0


class Finding(NamedTuple):
    """Result of a check: its level, subject, description and remedy."""

    level: str
    about: str
    what: str
    do: str = ""


def run_command(argv: Sequence[str]) -> str | None:
    """Output of a command; None if the command does not exist, fails or hangs."""
    try:
        with running(argv) as process:
            output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return output.decode(errors="replace") if process.returncode == 0 else None


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, from its metadata, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_module(name: str) -> bool:
    """Whether a top-level module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        # The module is already loaded, without a specification.
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Access to the machine to check; the defaults are for this machine. Opens no device."""

    environment: Mapping[str, str]
    root: Path = Path("/")
    run: Callable[[Sequence[str]], str | None] = run_command
    version: Callable[[str], str | None] = distribution_version
    has_module: Callable[[str], bool] = has_module
    python: tuple[int, int] = sys.version_info[:2]
    pid: int = field(default_factory=os.getpid)
    """Process id to ignore among the users of a card; by default this process."""

    def text(self, path: str) -> str | None:
        """Contents of a file below the root, stripped; None if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    @property
    def in_container(self) -> bool:
        return in_container(self.root)

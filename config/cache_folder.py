"""Errors for cache folders that cannot be written."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from config.errors import ConfigError, bytes_text

HINT = "name another folder by --cache-dir or XDG_CACHE_HOME, in a container a mounted volume"


@contextlib.contextmanager
def cache_errors(folder: Path, what: str) -> Iterator[None]:
    """Context manager that turns an OSError into a ConfigError, which says that `what` cannot be
    written to `folder`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{what} cannot be written to {folder} ({reason}); {HINT}") from error


def check_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raise ConfigError if the file system of `folder` has less room than `num_bytes`."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ConfigError(
            f"{what} takes {bytes_text(num_bytes)}, {folder} has {bytes_text(free)} left; {HINT}"
        )


def sync(path: Path) -> None:
    """Flush a file's data to disk, so that a later rename cannot reach the disk before the data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

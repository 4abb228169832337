"""Cache folders: checks of their owner, of room, and errors for folders that cannot be written."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from config.errors import ConfigError, bytes_text

HINT = "name another folder by --cache-dir or XDG_CACHE_HOME, in a container a mounted volume"


def cache_path(cache_home: str, name: str) -> Path:
    """The folder `name` of the cache, which may not exist. Raises ConfigError if another user can
    write files into it: the server loads code, weights and tokenizers from there."""
    folder = Path(cache_home) / name
    reason = foreign_writer(folder)
    if reason:
        raise ConfigError(f"the cache folder {folder} {reason}; {HINT}")
    return folder


def foreign_writer(folder: Path) -> str:
    """Why another user can write files into `folder`: it belongs to neither this user nor root, or
    everybody may write into it. Empty if nobody else can, or if it does not exist. Its group is
    trusted, since a Kubernetes volume is writable by a group."""
    try:
        link, found = folder.lstat(), folder.stat()
    except OSError:
        return ""
    # The owner of a link chooses the folder.
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in _own_ids(folder.parent):
        return f"is a link of user {link.st_uid}"
    if found.st_uid not in (0, os.geteuid()) and found.st_uid not in _own_ids(folder):
        return f"belongs to user {found.st_uid}, and this server runs as user {os.geteuid()}"
    if found.st_mode & stat.S_IWOTH:
        return f"can be written by every user (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _own_ids(folder: Path) -> set[int]:
    """User ids of root and of this process on the file system of `folder`. A file server may show
    another id for files of this process."""
    ids = {0, os.geteuid()}
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        ids.add(os.fstat(file.fileno()).st_uid)
    return ids


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

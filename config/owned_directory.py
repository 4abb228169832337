"""Temporary directories that the next start removes if their owner was killed."""

import atexit
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from typing import Any

from config.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = ".gaudiserve.lock"
"""File that the owner of a directory keeps locked. The kernel releases the lock when the owner
dies; a process id could be reused."""


def temporary_folder() -> str:
    """The system's temporary directory. Raises ConfigError if no directory is writable."""
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(
            f"{error.strerror or error}: set TMPDIR to a folder that can be written"
        ) from error


class OwnedDirectory:
    """A private directory of this user that is removed by `close`, at exit, or by the next
    start."""

    def __init__(self, prefix: str, parent: str | os.PathLike[str] | None = None) -> None:
        """Create the directory in `parent` (None: the system's temporary directory), after removing
        this user's directories with the same prefix whose owner is dead. Raises OSError; without
        `parent`, ConfigError."""
        folder = os.fspath(parent) if parent is not None else temporary_folder()
        _remove_stale(folder, prefix)
        try:
            self.path, self._lock = _create(folder, prefix)
        except OSError as error:
            if parent is not None:
                raise
            raise ConfigError(
                f"no temporary directory can be made in {folder} ({error.strerror}); set TMPDIR to "
                "a folder that can be written"
            ) from error
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the directory and its contents; safe to call twice."""
        if self._lock < 0:
            return
        atexit.unregister(self.close)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *_: Any) -> None:
        self.close()


def _create(parent: str, prefix: str) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            # Not inheritable: a child that outlives this process must not hold the lock.
            lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            # Another starting process removed the empty directory as stale.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another starting process locked the file first, and removes the directory as stale.
            os.close(lock)
            continue
        except OSError:
            # On a file system without locks, no process can lock the file and remove the directory.
            return path, lock
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)


def _remove_stale(parent: str, prefix: str) -> None:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                # A directory that cannot be opened, locked or removed may be in use or belong to
                # another user.
                with suppress(OSError):
                    _remove_if_stale(entry.path)


def _remove_if_stale(path: str) -> None:
    """Remove the directory if it belongs to this user and its lock is free. A directory without a
    lock file is removed only if it is empty, as mkdtemp made it: it may have an unknown owner.
    Raises OSError on failure."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        facts = os.fstat(directory)
        if facts.st_uid != os.geteuid():
            return
        if stat.S_IMODE(facts.st_mode) == stat.S_IRWXU and not os.listdir(directory):
            os.rmdir(path)
            return
        # Without O_NONBLOCK, opening a FIFO with this name would block.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(LOCK, flags, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                _empty(directory)
                os.rmdir(path)
                logger.debug("Removed %s, left by a process that was killed", path)
        finally:
            os.close(lock)
    finally:
        os.close(directory)


def _empty(directory: int) -> None:
    """Remove the contents using the descriptor, so that a path replaced meanwhile is not followed.
    The lock is removed last, so that the next start can finish an interrupted removal."""
    for _, folders, files, folder in os.fwalk(".", topdown=False, dir_fd=directory):
        for name in (*files, *folders):
            if name == LOCK:
                continue
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=folder)
    os.unlink(LOCK, dir_fd=directory)

"""Temporary directories that are removed when their owner was killed: at the next start, by whoever
makes another one in the same place."""

import atexit
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

LOCK = ".gaudiserve.lock"
"""The file that the owner of a directory keeps locked. The kernel releases the lock when the owner
dies, in whatever way; a process id could have been given to another process by then."""


class OwnedDirectory:
    """A directory that only this user can enter; gone when closed, at exit, or, if neither
    came about, at the next start."""

    def __init__(self, prefix: str, parent: str | os.PathLike[str] | None = None) -> None:
        """Make it below `parent` (None: the directory for temporary files), after those below it
        with the same prefix that belong to this user and whose owner is dead were removed."""
        place = os.fspath(parent) if parent is not None else tempfile.gettempdir()
        _remove_stale(place, prefix)
        self.path, self._lock = _make(place, prefix)
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the directory and whatever processes that died left in it; safe to call twice."""
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


def _make(parent: str, prefix: str) -> tuple[str, int]:
    """A new directory and the descriptor of its lock, which is held."""
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        # Not inherited: a child that outlives us must not keep the directory.
        lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another start came between the file and its lock, and takes the directory for stale.
            os.close(lock)
            continue
        except OSError:
            # A file system without locks: nobody else can lock the file and remove the directory.
            return path, lock
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)


def _remove_stale(parent: str, prefix: str) -> None:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                # What cannot be opened, locked or removed is not ours, or in use.
                with suppress(OSError):
                    _remove_if_stale(entry.path)


def _remove_if_stale(path: str) -> None:
    """Remove the directory if it is this user's and the lock in it is free. A directory without a
    lock file is left alone: who made it is not known. Raises OSError if that fails."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            return
        # Without O_NONBLOCK a FIFO of that name would be waited for.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(LOCK, flags, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                _empty(directory)
                os.rmdir(path)
                logger.info("Removed %s, left by a process that was killed", path)
        finally:
            os.close(lock)
    finally:
        os.close(directory)


def _empty(directory: int) -> None:
    """Remove what is in it, by descriptor: whoever replaces a path meanwhile gains nothing. The
    lock goes last, so that a removal that is cut short is finished at the next start."""
    for _, folders, files, folder in os.fwalk(".", topdown=False, dir_fd=directory):
        for name in (*files, *folders):
            if name == LOCK:
                continue
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=folder)
    os.unlink(LOCK, dir_fd=directory)

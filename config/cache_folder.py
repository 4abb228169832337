"""Files in cache folders: reading, writing, and checks of ownership and free space."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from config.errors import ConfigError, bytes_text
from config.whole_files import write_whole

HINT = "set --cache-dir or XDG_CACHE_HOME to another folder, in a container to a mounted volume"
CONTAINER_MARKS = (".dockerenv", "run/.containerenv")
"""Files that container runtimes create at the root."""


def in_container(root: Path = Path("/")) -> bool:
    """Whether `root` has a file that container runtimes create."""
    return any((root / mark).exists() for mark in CONTAINER_MARKS)


def cache_path(cache_home: str, name: str) -> Path:
    """Path of the cache folder `name`, which need not exist. Raises ConfigError for a folder that
    `foreign_writer` rejects: the server loads code and weights from cache folders."""
    folder = Path(cache_home) / name
    reason = foreign_writer(folder)
    if reason:
        raise ConfigError(f"the cache folder {folder} {reason}; {HINT}")
    return folder


def foreign_writer(folder: Path) -> str:
    """Reason not to trust `folder`: it, or a symbolic link to it, belongs to neither this user nor
    root, or it is world-writable. Empty otherwise, also if its status cannot be read. The group is
    trusted, since a Kubernetes volume is group-writable."""
    try:
        link, found = folder.lstat(), folder.stat()
    except OSError:
        return ""
    # The owner of a symlink chooses the folder that it points to.
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in _own_ids(folder.parent):
        return f"is a symbolic link of user {link.st_uid}"
    return _foreign_owner(found, folder) or _open_mode(found)


def check_own(path: Path) -> None:
    """Raise ConfigError if the cached file or folder `path`, or an entry below it, belongs to
    neither this user nor root, or can be written by every user. The group is trusted, as in
    `foreign_writer`."""
    for entry in (path, *sorted(path.rglob("*"))):
        with contextlib.suppress(FileNotFoundError):
            if reason := _foreign_file(entry.lstat(), entry):
                raise ConfigError(f"the cached {entry} {reason}: remove it, or {HINT}")


def open_cached(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Descriptor of a cached file. Raises OSError, also for a symlink, a file that is not regular,
    and a file that `check_own` rejects. Does not block on a FIFO without a writer."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    reason = _foreign_file(status, Path(path))
    if not stat.S_ISREG(status.st_mode):
        reason = "is not a regular file"
    if reason:
        os.close(descriptor)
        raise OSError(errno.EACCES, f"it {reason}", str(path))
    return descriptor


def read_cached(path: Path, max_bytes: int) -> bytes:
    """All bytes of a cached file. Raises OSError, also for a file larger than `max_bytes`, for a
    file that `check_own` rejects, and for a folder that `foreign_writer` rejects."""
    _check_folder(path)
    with open(open_cached(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return content


def write_cached(path: Path, content: bytes) -> None:
    """Write or replace a cached file atomically; creates its folder. Raises OSError, also for a
    folder that `foreign_writer` rejects."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(path)
    write_whole(path, content)


def _check_folder(path: Path) -> None:
    if reason := foreign_writer(path.parent):
        raise OSError(errno.EACCES, f"its folder {reason}", str(path))


def _foreign_file(status: os.stat_result, path: Path) -> str:
    if reason := _foreign_owner(status, path.parent):
        return reason
    is_open = not stat.S_ISLNK(status.st_mode) and status.st_mode & stat.S_IWOTH
    # With a umask of 0 files are world-writable; the mode of the folder then keeps other users out.
    return _open_mode(status) if is_open and path.parent.stat().st_mode & stat.S_IXOTH else ""


def _foreign_owner(status: os.stat_result, folder: Path) -> str:
    if status.st_uid in (0, os.geteuid()) or status.st_uid in _own_ids(folder):
        return ""
    return f"belongs to user {status.st_uid}, and this server runs as user {os.geteuid()}"


def _open_mode(status: os.stat_result) -> str:
    if not status.st_mode & stat.S_IWOTH:
        return ""
    return f"can be written by every user (mode {stat.S_IMODE(status.st_mode):o})"


def _own_ids(folder: Path) -> set[int]:
    """User ids of root and of this process on the file system of `folder`. A network file system
    may map this process to another id."""
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
    """Raise ConfigError if the file system of `folder` has less than `num_bytes` free."""
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

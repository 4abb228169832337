"""Large messages between processes of a host: the message is written to a file in shared memory,
and the socket carries a small frame with the file's name."""

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from config.errors import EngineDied

LARGE_BYTES = 32 * 2**20
"""Minimum size of a message that is sent as a file, in bytes. For smaller messages, allocating the
pages of a file costs more than copying through the socket."""
MAX_UNREAD_BYTES = 2**30
"""Maximum size of a sender's unread files, in bytes; further messages are sent through the
socket."""
MARK = b"\xc1"
"""First byte of a frame that contains a file name. No MessagePack message starts with this byte."""
DIRECTORY = "segments"
"""Name of the link to the directory of files, in the directory of the sockets."""
_FILES = Path("/dev/shm")


class _File(NamedTuple):
    peer: bytes
    path: str
    num_bytes: int


def files_parent() -> Path | None:
    """Parent of the directory of files; None on a system without shared memory."""
    return _FILES if _FILES.is_dir() and os.access(_FILES, os.W_OK | os.X_OK) else None


def link_directory(sockets: str, files: str) -> None:
    """Make the sockets in the directory `sockets` use the files directory `files`."""
    os.symlink(files, Path(sockets, DIRECTORY))


class Transfers:
    """Large messages of a socket. This base class sends all messages through the socket."""

    def frame(self, data: bytes, peer: bytes = b"") -> bytes:
        """Frame to send to `peer`."""
        return data

    def take_back(self, frame: bytes) -> None:
        """Free the memory of a frame that was not sent."""

    def forget(self, peer: bytes) -> None:
        """Free the memory of the messages that a disconnected peer has not read."""

    def message(self, frame: bytes) -> bytes | memoryview:
        """Message of a frame. Raises EngineDied if its memory does not exist."""
        return frame


class SharedMemoryTransfers(Transfers):
    """Files of the large messages that a socket sends and receives.

    A reader opens a file and unlinks it at once, so that the kernel frees the memory when the
    message is dropped or the reader dies. Each reader has its own hard link. Unread files are
    removed with the directory, which the launcher owns.
    """

    def __init__(self, directory: Path, num_readers: int = 1) -> None:
        self._directory = directory
        self._num_readers = num_readers
        self._prefix = secrets.token_hex(8)
        self._num_written = 0
        self._unread: list[_File] = []

    def frame(self, data: bytes, peer: bytes = b"") -> bytes:
        """The message itself, or the name of a file if the message is large and there is memory
        for a file."""
        size = len(data)
        if size < LARGE_BYTES:
            return data
        self._unread = [file for file in self._unread if os.path.exists(file.path)]
        held = sum(file.num_bytes for file in self._unread)
        if held + size > MAX_UNREAD_BYTES:
            return data
        self._num_written += 1
        name = f"{self._prefix}-{self._num_written}"
        paths = self._paths(name, self._num_readers)
        try:
            _write(paths, data)
        except OSError:
            # Containers often limit shared memory to 64 MiB.
            _remove(paths)
            return data
        self._unread += [_File(peer, path, size // self._num_readers) for path in paths]
        return MARK + f"{name} {self._num_readers}".encode()

    def take_back(self, frame: bytes) -> None:
        if frame[:1] == MARK:
            _remove(self._named(frame))

    def forget(self, peer: bytes) -> None:
        _remove([file.path for file in self._unread if file.peer == peer])

    def message(self, frame: bytes) -> bytes | memoryview:
        if frame[:1] != MARK:
            return frame
        for path in self._named(frame):
            # Another reader may unlink this name at any time.
            with suppress(FileNotFoundError):
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    os.unlink(path)
                    return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
                finally:
                    os.close(file)
        raise EngineDied(f"{self._directory} has no file of a message of this socket's peer")

    def _named(self, frame: bytes) -> list[str]:
        name, _, num_readers = frame[1:].decode().partition(" ")
        return self._paths(name, int(num_readers))

    def _paths(self, name: str, num_readers: int) -> list[str]:
        return [str(self._directory / f"{name}.{index}") for index in range(num_readers)]


def transfers_beside(endpoint: str, num_readers: int = 1) -> Transfers:
    """Transfers of the socket at `endpoint`: SharedMemoryTransfers for a Unix socket whose
    directory has a link to a directory of files (see `link_directory`), otherwise Transfers."""
    directory = Path(endpoint.removeprefix("ipc://")).parent / DIRECTORY
    if endpoint.startswith("ipc://") and directory.is_dir():
        return SharedMemoryTransfers(directory, num_readers)
    return Transfers()


def _write(paths: list[str], data: bytes) -> None:
    """Write `data` to a file and hard-link it to all `paths`, a path for each reader."""
    file = os.open(paths[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Allocate now: if memory ran out later, a reader's access would raise SIGBUS.
        os.posix_fallocate(file, 0, len(data))
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    finally:
        os.close(file)
    for path in paths[1:]:
        os.link(paths[0], path)


def _remove(paths: list[str]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)

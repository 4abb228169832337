"""BlockFiles: stores KV blocks in files, one per block, written and read on separate threads."""

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Condition, Thread

from config.cache_folder import foreign_writer, open_cached
from config.errors import ConfigError
from hpu.offload.host_blocks import HostBlocks, Row
from hpu.protocol import HASH_BYTES, BlocksFetched, FetchBlocks

logger = logging.getLogger(__name__)

MAGIC = b"gaudiserve KV 1\0"
DIGEST_BYTES = 32
HEADER_BYTES = len(MAGIC) + HASH_BYTES + DIGEST_BYTES
SUFFIX, TEMPORARY = ".kv", ".tmp"
LOCK = ".lock"
LOCK_TIMEOUT_S = 10.0
"""Maximum wait of a start for the previous owner of the files to exit; seconds."""
CLOSE_S = 5.0
"""Maximum wait of `BlockFiles.close` for pending writes; seconds."""
FOLDER = re.compile(r"kv-[0-9a-f]{32}")


class NoFiles:
    """Files of a worker that keeps no blocks in files."""

    @property
    def hashes(self) -> list[bytes]:
        """Hashes of the blocks with a file; at the start, least recently used first."""
        return []

    def write(self, hashes: Iterable[bytes], slots: Iterable[int]) -> None:
        """Write the blocks in these slots asynchronously."""

    def release(self, slots: Iterable[int]) -> None:
        """Cancel pending writes of these slots, and wait for a running write. Call it before the
        contents of the slots change."""

    def fetch(self, message: FetchBlocks) -> None:
        """Read blocks into slots asynchronously; `take_fetched` returns the results in call
        order."""
        raise AssertionError("blocks are read, and there are no files")

    def take_fetched(self) -> list[BlocksFetched]:
        """Take the results of the reads completed since the last call."""
        return []

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Delete files asynchronously."""
        raise AssertionError("files are deleted, and there are none")

    def close(self, *, deletes: bool = False) -> None:
        """Finish pending writes and stop. `deletes`: delete all files instead."""


class BlockFiles(NoFiles):
    """Block files in a folder that this process has locked. Blocks are read into `memory` and
    written from it; a block whose checksum in memory is wrong is not written.

    A file has a header with the hash of the block and a checksum, and is created atomically. A
    failed write is not an error: a later read reports the block as missing.
    """

    def __init__(
        self, folder: Path, lock: int, memory: HostBlocks, on_fetched: Callable[[], None]
    ) -> None:
        """`lock`: file descriptor of the folder's lock, from `acquire`. `on_fetched` is called on
        another thread when `take_fetched` has a result."""
        self._folder = folder
        self._memory = memory
        self._on_fetched = on_fetched
        self._lock = lock
        self._known = _files_of(folder)
        self._changed = Condition()
        self._writes: OrderedDict[int, bytes] = OrderedDict()
        """Pending writes: block hash by slot."""
        self._writing = -1
        """Slot being written; -1 if no write is running."""
        self._deletes: deque[bytes] = deque()
        self._is_deleting = False
        self._reads: deque[FetchBlocks] = deque()
        self._fetched: deque[BlocksFetched] = deque()
        self._is_closed = False
        self._has_failed = False
        self._threads = [
            Thread(target=target, name=name, daemon=True)
            for target, name in ((self._write_all, "kv-write"), (self._read_all, "kv-read"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def hashes(self) -> list[bytes]:
        return list(self._known)

    def write(self, hashes: Iterable[bytes], slots: Iterable[int]) -> None:
        with self._changed:
            for block_hash, slot in zip(hashes, slots, strict=True):
                # The slot may already be queued, if its block was evicted for another block.
                self._writes.pop(slot, None)
                if block_hash not in self._known:
                    self._writes[slot] = block_hash
            self._changed.notify_all()

    def release(self, slots: Iterable[int]) -> None:
        with self._changed:
            for slot in slots:
                self._writes.pop(slot, None)
                while self._writing == slot:
                    self._changed.wait()

    def fetch(self, message: FetchBlocks) -> None:
        self.release(message.slots)
        with self._changed:
            self._reads.append(message)
            self._changed.notify_all()

    def take_fetched(self) -> list[BlocksFetched]:
        with self._changed:
            fetched = list(self._fetched)
            self._fetched.clear()
        return fetched

    def drop(self, hashes: Iterable[bytes]) -> None:
        dropped = set(hashes)
        with self._changed:
            for block_hash in dropped:
                # The block may be stored again before the file is deleted.
                self._known.pop(block_hash, None)
            for slot in [s for s, written in self._writes.items() if written in dropped]:
                del self._writes[slot]
            self._deletes.extend(dropped)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until no write and no deletion is pending or running."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not (self._writes or self._deletes or self._is_deleting or self._writing >= 0)
                ),
                timeout_s,
            )

    def close(self, *, deletes: bool = False) -> None:
        """Finish pending writes within CLOSE_S seconds, or with `deletes` delete all files, and end
        the threads."""
        if not deletes:
            self.flush(CLOSE_S)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if deletes:
            # Keep the lock file: another process may be waiting for it.
            for path in self._folder.glob(f"[0-9a-f][0-9a-f]/*{SUFFIX}"):
                with contextlib.suppress(OSError):
                    path.unlink()
        os.close(self._lock)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._writes or self._deletes)
                if self._is_closed:
                    return
                deleted = list(self._deletes)
                self._deletes.clear()
                self._is_deleting = bool(deleted)
                slot, block_hash = -1, b""
                if self._writes:
                    slot, block_hash = self._writes.popitem(last=False)
                self._writing = slot
            for deleted_hash in deleted:
                self._known.pop(deleted_hash, None)
                with contextlib.suppress(OSError):
                    self._path(deleted_hash).unlink()
            if slot >= 0 and self._memory.is_whole(slot):
                self._write(block_hash, slot)
            with self._changed:
                self._writing, self._is_deleting = -1, False
                self._changed.notify_all()

    def _write(self, block_hash: bytes, slot: int) -> None:
        path = self._path(block_hash)
        temporary = self._folder / f"{block_hash.hex()}{TEMPORARY}"
        row = self._memory.rows[slot]
        try:
            self._make(path.parent)
            with open(temporary, "wb", buffering=0, opener=_private) as file:
                file.write(MAGIC + block_hash + _digest(block_hash, row))
                _write_fully(file.fileno(), row)
            temporary.replace(path)
        except (OSError, ConfigError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self._has_failed:
                logger.warning("KV blocks are not written to %s: %s", self._folder, error)
            self._has_failed = True
            return
        self._known[block_hash] = None

    def _make(self, parent: Path) -> None:
        """Create the folder of a file, and also the folder of all files if it was removed."""
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            with self._changed:
                self._known.clear()
            lock = _open_lock(self._folder)
            os.dup2(lock, self._lock, inheritable=False)
            os.close(lock)
            # Another server may have taken the lock in the meantime. Both may write, since each
            # file is checked.
            _has_locked(self._lock)
            parent.mkdir(mode=0o700, exist_ok=True)
            logger.warning("%s was removed, and was created again", self._folder)

    def _read_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._reads)
                if self._is_closed:
                    return
                message = self._reads.popleft()
            start = time.perf_counter()
            answer = BlocksFetched(0.0)
            for index, (block_hash, slot) in enumerate(
                zip(message.hashes, message.slots, strict=True)
            ):
                try:
                    is_whole = self._read(block_hash, slot)
                except OSError:
                    answer.missing.append(index)
                    continue
                if not is_whole:
                    answer.corrupt.append(index)
                    logger.warning(
                        "%s has a wrong checksum: the block is computed again",
                        self._path(block_hash),
                    )
            answer.seconds = time.perf_counter() - start
            with self._changed:
                self._fetched.append(answer)
                self._changed.notify_all()
            self._on_fetched()

    def _read(self, block_hash: bytes, slot: int) -> bool:
        """Read a block's file into `slot`. Returns whether the file belongs to the block and is
        intact. Raises OSError if the file is missing or cannot be read."""
        path, row = self._path(block_hash), self._memory.rows[slot]
        with open(path, "rb", buffering=0, opener=open_cached) as file:
            head = file.read(HEADER_BYTES)
            num_read = _read_fully(file, row)
            is_longer = bool(file.read(1))
        os.utime(path)
        expected = MAGIC + block_hash + _digest(block_hash, row)
        is_block = num_read == len(row) and not is_longer and head == expected
        if is_block:
            self._memory.seal([slot])
        return is_block

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / f"{name}{SUFFIX}"


def remove_others(parent: Path, own: str) -> None:
    """Remove the folders of other models and settings in `parent` that no process uses, so that
    disk usage does not grow with each served model."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            is_ours = FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            if is_ours and entry.name != own and _is_unused(Path(entry.path)):
                logger.info("KV blocks of another model are removed: %s", entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_unused(folder: Path) -> bool:
    for path in folder.glob(f"*/{LOCK}"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:
            return False
        try:
            if not _has_locked(lock):
                return False
        finally:
            os.close(lock)
    return True


def acquire(folders: Sequence[Path]) -> tuple[int, int]:
    """(index, lock descriptor) of the first of `folders` that no process uses. The lock is held
    until its descriptor is closed. Raises ConfigError if all folders are in use, or if a folder is
    unusable."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        for index, folder in enumerate(folders):
            lock = _open_lock(folder)
            if _has_locked(lock):
                return index, lock
            os.close(lock)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"--kv-offloading-dir: {folders[-1]} is used by another server of this model: "
                "give each server a separate folder"
            )
        time.sleep(0.05)


def _open_lock(folder: Path) -> int:
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for made in (folder.parent, folder):
            reason = foreign_writer(made)
            if reason:
                raise ConfigError(
                    f"--kv-offloading-dir: {made} {reason}: remove it, or name another folder"
                )
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"--kv-offloading-dir: {folder} cannot be written: {error}") from error


def _has_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _files_of(folder: Path) -> OrderedDict[bytes, None]:
    """Blocks with a file, least recently used first. Removes unfinished files of an earlier
    process."""
    found = []
    for path in folder.glob(f"*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            path.unlink()
    for path in folder.glob(f"[0-9a-f][0-9a-f]/*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):
            block_hash = bytes.fromhex(path.stem)
            if len(block_hash) == HASH_BYTES:
                found.append((path.stat().st_mtime_ns, block_hash))
    return OrderedDict.fromkeys(block_hash for _, block_hash in sorted(found))


def _digest(block_hash: bytes, row: Row) -> bytes:
    digest = hashlib.blake2b(block_hash, digest_size=DIGEST_BYTES)
    digest.update(row.data)
    return digest.digest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _write_fully(descriptor: int, row: Row) -> None:
    rest = row.data
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_fully(file: io.FileIO, row: Row) -> int:
    rest = row.data
    while rest:
        count = file.readinto(rest)
        if not count:
            break
        rest = rest[count:]
    return len(row) - len(rest)

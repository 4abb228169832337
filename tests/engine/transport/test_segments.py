"""Large messages are sent through files in shared memory, and no file remains."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from config.errors import EngineDied
from engine.transport import channels
from engine.transport import segments as module
from engine.transport.channels import PairSocket, SocketDirectory, ZmqContext, endpoint, new_token
from engine.transport.segments import (
    MARK,
    SharedMemoryTransfers,
    Transfers,
    files_parent,
    transfers_beside,
)

pytestmark = pytest.mark.skipif(files_parent() is None, reason="no shared memory")
LARGE_BYTES = 2**20
LARGE = bytes(range(256)) * (LARGE_BYTES // 256)


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", LARGE_BYTES)


@pytest.fixture
def directory() -> Iterator[SocketDirectory]:
    directory = SocketDirectory()
    yield directory
    directory.close()


def made(directory: SocketDirectory, num_readers: int = 1) -> SharedMemoryTransfers:
    found = transfers_beside(f"ipc://{directory.path}/x", num_readers)
    assert isinstance(found, SharedMemoryTransfers)
    return found


def files(directory: SocketDirectory) -> list[str]:
    return [path.name for path in Path(directory.path, "segments").iterdir() if path.name[0] != "."]


def test_a_large_message_is_read_from_unlinked_memory(
    directory: SocketDirectory,
) -> None:
    frame = made(directory).frame(LARGE)
    assert frame[:1] == MARK and len(frame) < 100
    assert len(files(directory)) == 1

    found = made(directory).message(frame)

    assert files(directory) == []
    assert found == LARGE


def test_a_small_message_is_sent_inline(directory: SocketDirectory) -> None:
    small = LARGE[:-1]

    assert made(directory).frame(small) is small
    assert made(directory).message(small) is small


def test_each_of_several_readers_reads_a_message_once(directory: SocketDirectory) -> None:
    frame = made(directory, 3).frame(LARGE)

    found = [made(directory).message(frame) for _ in range(3)]

    assert found == [LARGE] * 3
    assert files(directory) == []
    with pytest.raises(EngineDied, match="has no file"):
        made(directory).message(frame)


def test_unread_files_are_bounded_and_further_messages_are_sent_inline(
    directory: SocketDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 2 * len(LARGE))
    sender = made(directory)

    frames = [sender.frame(LARGE) for _ in range(3)]

    assert [frame[:1] == MARK for frame in frames] == [True, True, False]
    assert frames[2] is LARGE
    made(directory).message(frames[0])
    assert sender.frame(LARGE)[:1] == MARK


def test_without_memory_for_a_file_a_message_is_sent_inline(
    directory: SocketDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    assert made(directory).frame(LARGE) is LARGE
    assert files(directory) == []


def test_unsent_files_and_files_of_a_lost_peer_are_removed(
    directory: SocketDirectory,
) -> None:
    sender = made(directory)
    first = sender.frame(LARGE, b"one")
    sender.frame(LARGE, b"one")
    kept = sender.frame(LARGE, b"two")

    sender.take_back(first)
    sender.forget(b"one")

    assert len(files(directory)) == 1
    assert made(directory).message(kept) == LARGE


def test_only_sockets_of_the_same_host_use_shared_memory(directory: SocketDirectory) -> None:
    context = ZmqContext(new_token())
    at = endpoint(directory.path, "pair")
    ours: PairSocket[bytes, bytes] = context.bind_pair(at, bytes)
    theirs: PairSocket[bytes, bytes] = context.connect_pair(at, bytes)
    try:
        assert theirs.send(b"hello")
        while ours.receive() is None:
            time.sleep(0.001)
        assert ours.send(LARGE)
        assert len(files(directory)) == 1
        while (found := theirs.receive()) is None:
            time.sleep(0.001)
        assert found == LARGE
        assert files(directory) == []
    finally:
        ours.close()
        theirs.close()
        context.close()
    assert type(transfers_beside("tcp://127.0.0.1:1")) is Transfers


def test_without_a_shared_memory_folder_messages_are_sent_inline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILES", tmp_path / "none")
    assert files_parent() is None
    monkeypatch.setattr(channels, "files_parent", lambda: tmp_path / "none")

    directory = SocketDirectory(str(tmp_path))

    assert type(transfers_beside(f"ipc://{directory.path}/x")) is Transfers
    directory.close()


OWNER = """
import os, signal, sys
from engine.transport.channels import SocketDirectory
from engine.transport import segments
from engine.transport.segments import transfers_beside
segments.LARGE_BYTES = 1 << 20
directory = SocketDirectory(sys.argv[1])
transfers_beside(f"ipc://{directory.path}/x").frame(bytes(1 << 20))
print(os.path.realpath(os.path.join(directory.path, "segments")), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_files_of_a_dead_owner_are_removed(end: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), end]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == (-signal.SIGKILL if end == "killed" else 0), ended.stderr
    left = Path(ended.stdout.strip())

    assert left.exists() == (end == "killed")
    SocketDirectory(str(tmp_path)).close()

    assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_views_of_a_message_keep_its_memory(directory: SocketDirectory) -> None:
    class Message(msgspec.Struct, array_like=True):
        data: memoryview

    frame = made(directory).frame(msgspec.msgpack.encode(Message(memoryview(LARGE))))

    found = msgspec.msgpack.decode(made(directory).message(frame), type=Message).data

    assert found == LARGE
    assert found.readonly

"""Block files, without a model."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch
from waits import WAIT_S

from config.errors import ConfigError
from hpu.offload import block_files
from hpu.offload.block_files import HEADER_BYTES, BlockFiles, acquire, remove_others
from hpu.offload.host_blocks import HostBlocks, Row
from hpu.protocol import BlocksFetched, FetchBlocks

SLOTS, SIZE = 6, 100
NAMES = [bytes([i]) * 32 for i in range(20)]


def opened(folder: Path, pool: Row) -> BlockFiles:
    _, lock = acquire([folder])
    memory = HostBlocks(torch.from_numpy(pool))
    memory.seal(range(SLOTS))
    return BlockFiles(folder, lock, memory, lambda: None)


@pytest.fixture
def pool() -> Row:
    return np.arange(SLOTS * SIZE, dtype=np.uint8).reshape(SLOTS, SIZE).copy()


@pytest.fixture
def files(tmp_path: Path, pool: Row) -> Iterator[BlockFiles]:
    files = opened(tmp_path / "kv", pool)
    yield files
    files.close()


def read(files: BlockFiles, names: list[bytes], slots: list[int]) -> BlocksFetched:
    files.fetch(FetchBlocks(names, slots))
    deadline = time.monotonic() + WAIT_S
    while not (answers := files.take_fetched()) and time.monotonic() < deadline:
        time.sleep(0.001)
    (answer,) = answers
    return answer


def test_a_block_is_read_back_unchanged(files: BlockFiles, pool: Row) -> None:
    before = pool.copy()
    files.write(NAMES[:2], [3, 4])
    files.flush(WAIT_S)
    pool[:] = 0

    answer = read(files, NAMES[:2], [0, 1])

    assert answer.missing == answer.corrupt == []
    assert (pool[0] == before[3]).all() and (pool[1] == before[4]).all()


def test_a_block_that_changed_in_host_memory_is_not_written(files: BlockFiles, pool: Row) -> None:
    pool[3, 50] ^= 1
    files.write(NAMES[:2], [3, 4])
    files.flush(WAIT_S)

    assert files.hashes == [NAMES[1]]


@pytest.mark.parametrize("change", ["flip", "head", "cut", "longer", "other", "gone"])
def test_a_changed_or_missing_file_is_detected(
    files: BlockFiles, tmp_path: Path, change: str
) -> None:
    files.write(NAMES[:2], [3, 4])
    files.flush(WAIT_S)
    first, second = (tmp_path / "kv" / name.hex()[:2] / f"{name.hex()}.kv" for name in NAMES[:2])
    content = bytearray(first.read_bytes())
    assert len(content) == HEADER_BYTES + SIZE
    if change == "flip":
        content[-7] ^= 4
    elif change == "head":
        content[0] ^= 1
    elif change == "cut":
        del content[-1]
    elif change == "longer":
        content.append(0)
    elif change == "other":
        content = bytearray(second.read_bytes())
    first.write_bytes(content)
    if change == "gone":
        first.unlink()

    answer = read(files, NAMES[:2], [0, 1])

    assert (answer.missing, answer.corrupt) == (([0], []) if change == "gone" else ([], [0]))


def test_new_contents_wait_for_a_running_write_and_replace_a_queued_write(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, has_begun, may_end = block_files._digest, Event(), Event()

    def slow_digest(block_hash: bytes, row: Row) -> bytes:
        has_begun.set()
        assert may_end.wait(WAIT_S)
        return digest(block_hash, row)

    monkeypatch.setattr(block_files, "_digest", slow_digest)
    files.write(NAMES[:2], [0, 1])
    assert has_begun.wait(WAIT_S)
    files.release([1])
    releasing = Thread(target=files.release, args=([0],))
    releasing.start()
    releasing.join(0.1)
    is_waiting = releasing.is_alive()
    may_end.set()
    releasing.join(WAIT_S)
    files.flush(WAIT_S)

    assert is_waiting and not releasing.is_alive()
    answer = read(files, NAMES[:2], [2, 3])
    assert (answer.missing, answer.corrupt) == ([1], [])


def test_a_dropped_file_is_deleted_and_may_be_written_again(
    files: BlockFiles, tmp_path: Path
) -> None:
    files.write(NAMES[:1], [0])
    files.flush(WAIT_S)
    files.drop(NAMES[:1])
    files.write(NAMES[:1], [0])
    files.flush(WAIT_S)

    assert read(files, NAMES[:1], [1]).missing == []
    files.drop(NAMES[:1])
    files.flush(WAIT_S)
    assert read(files, NAMES[:1], [1]).missing == [0]


def test_flush_waits_for_a_running_deletion(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, has_begun, may_end = Path.unlink, Event(), Event()

    def slow_unlink(path: Path) -> None:
        has_begun.set()
        assert may_end.wait(WAIT_S)
        unlink(path)

    files.write(NAMES[:1], [0])
    files.flush(WAIT_S)
    monkeypatch.setattr(Path, "unlink", slow_unlink)
    files.drop(NAMES[:1])
    assert has_begun.wait(WAIT_S)
    flushing = Thread(target=files.flush, args=(WAIT_S,))
    flushing.start()
    flushing.join(0.1)
    is_waiting = flushing.is_alive()
    may_end.set()
    flushing.join(WAIT_S)

    assert is_waiting and not flushing.is_alive()
    assert read(files, NAMES[:1], [1]).missing == [0]


def test_a_restart_finds_the_files_in_order_of_use(tmp_path: Path, pool: Row) -> None:
    files = opened(tmp_path / "kv", pool)
    files.write(NAMES[:3], [0, 1, 2])
    files.close()
    for number, name in enumerate(NAMES[:3]):
        path = tmp_path / "kv" / name.hex()[:2] / f"{name.hex()}.kv"
        os.utime(path, (number, number if name != NAMES[0] else 9))
    (tmp_path / "kv" / f"{NAMES[5].hex()}.tmp").write_bytes(b"half")

    files = opened(tmp_path / "kv", pool)

    assert files.hashes == [NAMES[1], NAMES[2], NAMES[0]]
    assert not list((tmp_path / "kv").glob("*.tmp"))
    files.close()


def test_close_with_deletes_removes_all_blocks(tmp_path: Path, pool: Row) -> None:
    files = opened(tmp_path / "kv", pool)
    files.write(NAMES[:3], [0, 1, 2])
    files.flush(WAIT_S)
    files.write(NAMES[3:5], [3, 4])
    files.close(deletes=True)

    assert not list(tmp_path.rglob("*.kv")) and not list(tmp_path.rglob("*.tmp"))
    again = opened(tmp_path / "kv", pool)
    assert again.hashes == []
    again.close()


def test_failed_writes_are_logged_once_and_their_blocks_are_missing(
    files: BlockFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in NAMES[:2]:
        (tmp_path / "kv" / name.hex()[:2]).write_bytes(b"no folder")

    files.write(NAMES[:2], [0, 1])
    files.flush(WAIT_S)

    assert caplog.text.count("KV blocks are not written to") == 1
    assert read(files, NAMES[:2], [0, 1]).missing == [0, 1]


def test_a_folder_that_was_removed_is_made_again_with_its_lock(
    files: BlockFiles, tmp_path: Path, pool: Row
) -> None:
    before = pool.copy()
    files.write(NAMES[:1], [3])
    files.flush(WAIT_S)
    shutil.rmtree(tmp_path / "kv")

    files.write(NAMES[1:2], [4])
    files.flush(WAIT_S)
    files.write(NAMES[:1], [3])
    files.flush(WAIT_S)
    pool[:] = 0

    answer = read(files, NAMES[:2], [0, 1])
    assert answer.missing == answer.corrupt == []
    assert (pool[0] == before[3]).all() and (pool[1] == before[4]).all()
    index, lock = acquire([tmp_path / "kv", tmp_path / "other"])
    os.close(lock)
    assert index == 1


def test_folders_of_other_models_are_removed_unless_they_are_in_use(
    tmp_path: Path, pool: Row
) -> None:
    own, used, unused = (f"kv-{digit * 32}" for digit in "abc")
    (tmp_path / own).mkdir()
    (tmp_path / "notes").mkdir()
    in_use = opened(tmp_path / used / "0-rank-0", pool)
    opened(tmp_path / unused / "0-rank-0", pool).close()

    remove_others(tmp_path, own)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([own, used, "notes"])
    in_use.close()


def test_each_engine_takes_a_folder_that_is_free(tmp_path: Path, pool: Row) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    first, second = acquire(folders), acquire(folders)
    os.close(first[1])
    again = acquire(folders)

    assert (first[0], second[0], again[0]) == (0, 1, 0)
    os.close(second[1])
    os.close(again[1])


def test_a_world_writable_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kv-0" / "0-rank-0"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)

    with pytest.raises(ConfigError, match="can be written by every user"):
        acquire([folder])


@pytest.mark.parametrize("kind", ["fifo", "link", "owner"])
def test_only_own_regular_files_are_read_as_blocks(
    files: BlockFiles, tmp_path: Path, kind: str
) -> None:
    files.write(NAMES[:1], [3])
    files.flush(WAIT_S)
    (path,) = (tmp_path / "kv").glob("*/*.kv")
    if kind == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif kind == "owner":
        try:
            os.chown(path, 65534, -1)
        except PermissionError:
            pytest.skip("only root can give a file to another user")
    else:
        path.replace(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")

    answer = read(files, NAMES[:1], [0])

    assert answer.missing == [0]


def test_an_unfinished_file_that_is_a_link_is_not_followed(
    files: BlockFiles, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    (tmp_path / "kv" / f"{NAMES[0].hex()}.tmp").symlink_to(target)

    files.write(NAMES[:1], [3])
    files.flush(WAIT_S)

    assert target.read_bytes() == b"kept"

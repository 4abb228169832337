"""config/whole_files.py: size limits of reads, and atomic replacement of files."""

import errno
import os
import threading
from pathlib import Path

import pytest

from config.whole_files import read_limited, write_whole


def reason(path: str | Path, timeout_s: float = 60, **options: object) -> str:
    with pytest.raises(OSError) as failed:
        read_limited(path, 10, timeout_s=timeout_s, **options)  # type: ignore[arg-type]
    assert failed.value.strerror is not None
    return failed.value.strerror


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    assert read_limited(file, 10) == b"0123456789"

    file.write_bytes(b"0123456789a")
    assert reason(file) == "it has 11 bytes, at most 10 are allowed"


def test_an_endless_device_and_a_pipe_without_a_writer_are_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    assert reason("/dev/zero") == "it has more, at most 10 are allowed"
    assert reason(fifo, 0.05) == "it did not end within 0.05 s"
    assert reason(tmp_path) == "it is a folder, it must be a file"
    assert reason(fifo, takes_pipes=False) == "it is not a regular file"


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(b"content"))
    writer.start()

    assert read_limited(fifo, 10, timeout_s=60) == b"content"
    writer.join()


def test_a_full_disk_leaves_the_old_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    write_whole(file, b"old")

    def fill(path: Path, content: bytes) -> int:
        with path.open("wb") as opened:
            opened.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, b"new")

    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"old"


def test_pipes_and_links_are_written_in_place(tmp_path: Path) -> None:
    fifo, link, target = tmp_path / "fifo", tmp_path / "link", tmp_path / "target"
    os.mkfifo(fifo)
    target.write_bytes(b"old")
    link.symlink_to(target)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    write_whole(fifo, b"new")
    write_whole(link, b"new")

    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert link.is_symlink() and target.read_bytes() == b"new"

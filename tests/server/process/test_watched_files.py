"""server/process/watched_files.py: when changed files are read again."""

from pathlib import Path

import pytest

from config.errors import ConfigError
from server.process.watched_files import WatchedFiles


def test_files_are_read_again_once_they_have_settled(tmp_path: Path) -> None:
    first, other = tmp_path / "one", tmp_path / "other"
    first.write_text("1")
    other.write_text("1")
    read: list[str] = []
    watched = WatchedFiles(
        [str(first), str(other)],
        "files",
        lambda: read.append(first.read_text() + other.read_text()),
    )
    watched.poll()
    watched.poll()
    assert read == []

    first.write_text("22")
    watched.poll()
    other.write_text("33")
    watched.poll()
    assert read == []
    watched.poll()
    watched.poll()

    assert read == ["2233"]


def test_temporarily_unreadable_files_are_read_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    read: list[str] = []
    failures = [ConfigError("too many open files")] * 2

    def reload() -> None:
        if failures:
            raise failures.pop()
        read.append(file.read_text())

    watched = WatchedFiles([str(file)], "TLS certificate", reload)
    file.write_text("22")
    for _ in range(6):
        watched.poll()

    assert read == ["22"]
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


def test_unreadable_files_are_logged_once_and_retried_after_the_next_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    read: list[str] = []

    def reload() -> None:
        if not file.exists():
            raise ConfigError(f"{file} is not there")
        read.append(file.read_text())

    watched = WatchedFiles([str(file)], "keys", reload)
    file.unlink()
    for _ in range(4):
        watched.poll()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "keys not reloaded, the old contents stay in use" in caplog.text
    file.write_text("22")
    for _ in range(4):
        watched.poll()

    assert read == ["22"]

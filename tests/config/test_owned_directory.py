"""config/owned_directory.py: directories of killed processes are removed, all others stay."""

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from waits import WAIT_S

from config.owned_directory import LOCK, OwnedDirectory

ROOT = Path(__file__).parents[2]
PREFIX = "gaudiserve-"

OWNER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from config.owned_directory import OwnedDirectory
directory = OwnedDirectory({PREFIX!r}, sys.argv[1])
print(directory.path, flush=True)
time.sleep(60)
"""


@contextmanager
def owner(parent: Path) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """A process that owns a directory with a daemon's files."""
    command = [sys.executable, "-c", OWNER, str(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path / "fe0.sock"))
        (path / "metrics").mkdir()
        (path / "metrics" / "counter_1.db").write_bytes(b"1")
        (path / "checkpoint.json").write_bytes(b"{}")
        try:
            yield path, process
        finally:
            process.kill()


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)


def made_in(parent: Path) -> OwnedDirectory:
    return OwnedDirectory(PREFIX, parent)


def test_directories_of_a_killed_owner_are_removed_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with owner(tmp_path) as (path, process):
        kill(process)
        was_left = path.exists()

        with closing(made_in(tmp_path)) as mine:
            names = os.listdir(tmp_path)

    assert was_left
    assert names == [os.path.basename(mine.path)]
    assert os.listdir(tmp_path) == []
    # Logged at DEBUG: every start after a kill removes such folders, and a line at INFO would
    # alarm.
    (line,) = caplog.records
    assert "left by a process that was killed" in line.getMessage()
    assert line.levelno == logging.DEBUG


def test_an_empty_directory_of_an_owner_killed_before_its_lock_is_removed(tmp_path: Path) -> None:
    left = tempfile.mkdtemp(prefix=PREFIX, dir=tmp_path)
    others = [tmp_path / f"{PREFIX}notes", tmp_path / "another"]
    others[0].mkdir(mode=0o755)
    others[1].mkdir(mode=0o700)

    made_in(tmp_path).close()

    assert not os.path.exists(left)
    assert all(other.exists() for other in others)


def test_a_directory_that_another_start_removes_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, []

    def make_removed(*args: Any, **options: Any) -> str:
        path = make(*args, **options)
        made.append(path)
        if len(made) == 1:
            os.rmdir(path)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_removed)

    with closing(made_in(tmp_path)) as mine:
        assert [mine.path] == made[1:]
        assert Path(mine.path, LOCK).is_file()


def test_the_directory_of_a_living_owner_is_kept(tmp_path: Path) -> None:
    with owner(tmp_path) as (dead, killed), owner(tmp_path) as (living, _):
        kill(killed)
        before = sorted(os.listdir(living))

        made_in(tmp_path).close()

        assert not dead.exists()
        assert sorted(os.listdir(living)) == before


def test_a_process_may_own_two_directories(tmp_path: Path) -> None:
    with closing(made_in(tmp_path)) as first, closing(made_in(tmp_path)) as second:
        both = sorted(os.listdir(tmp_path))

    assert both == sorted(map(os.path.basename, (first.path, second.path)))


def test_directories_created_concurrently_are_all_kept(tmp_path: Path) -> None:
    """A thread may see another thread's directory before its file and its lock exist."""
    made: list[OwnedDirectory] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait(WAIT_S)
        made.extend(made_in(tmp_path) for _ in range(20))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [Path(item.path, LOCK).is_file() for item in made]
    with ExitStack() as stack:
        for item in made:
            stack.callback(item.close)

    assert len(made) == 160 and all(kept)
    assert os.listdir(tmp_path) == []


def test_directories_with_another_name_or_without_a_lock_are_kept(tmp_path: Path) -> None:
    others = [tmp_path / "another-1", tmp_path / f"{PREFIX}notes", tmp_path / f"{PREFIX}file"]
    others[0].mkdir()
    (others[0] / LOCK).touch()
    others[1].mkdir()
    (others[1] / "notes.txt").touch()
    others[2].touch()

    made_in(tmp_path).close()

    assert all(other.exists() for other in others)
    assert (others[0] / LOCK).exists() and (others[1] / "notes.txt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_the_directory_of_another_user_is_kept(tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}theirs"
    other.mkdir()
    (other / LOCK).touch()
    os.chown(other, 12345, 12345)

    made_in(tmp_path).close()

    assert (other / LOCK).exists()


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    parent, elsewhere = tmp_path / "temporary", tmp_path / "precious"
    for folder in (parent, elsewhere):
        folder.mkdir()
    (elsewhere / LOCK).touch()
    (elsewhere / "data").touch()
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    lock_is_a_link = parent / f"{PREFIX}lock"
    lock_is_a_link.mkdir()
    (lock_is_a_link / LOCK).symlink_to(elsewhere / LOCK)
    lock_is_a_pipe = parent / f"{PREFIX}pipe"
    lock_is_a_pipe.mkdir()
    os.mkfifo(lock_is_a_pipe / LOCK)
    stale = parent / f"{PREFIX}stale"
    stale.mkdir()
    (stale / LOCK).touch()
    (stale / "to_folder").symlink_to(elsewhere)
    (stale / "to_file").symlink_to(elsewhere / "data")

    made_in(parent).close()

    assert not stale.exists()
    assert (elsewhere / "data").exists() and (elsewhere / LOCK).exists()
    assert lock_is_a_link.exists() and stat.S_ISFIFO((lock_is_a_pipe / LOCK).stat().st_mode)


def test_a_child_that_outlives_its_parent_does_not_keep_the_directory(tmp_path: Path) -> None:
    with closing(made_in(tmp_path)) as mine, subprocess.Popen(["sleep", "60"]) as child:
        held = os.path.realpath(Path(mine.path, LOCK))
        links = [os.path.realpath(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
        child.kill()

    assert held not in links

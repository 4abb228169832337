"""hpu/native/library.py: the compiled file in a folder that is full or read-only, and a cut one."""

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpu.native import library as library_module
from hpu.native.library import open_library


class Loaded:
    """A stand-in for the library: loading counts, not computing."""

    has_tiles = False
    instruction_set = "AVX-512"

    def __init__(self, path: Path, _: int) -> None:
        self.path = path
        self.content = path.read_bytes()

    def round_inputs(self, _: bool) -> bool:
        return False


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that the stand-in of the compiler wrote."""
    compiled: list[Path] = []

    def compile_to(_: str, path: Path, __: list[str]) -> bool:
        path.write_bytes(b"\x7fELF" * 100)
        compiled.append(path)
        return True

    monkeypatch.setattr(library_module, "NEEDED", frozenset())
    monkeypatch.setattr(library_module, "_compile", compile_to)
    monkeypatch.setattr(library_module, "Library", Loaded)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    return compiled


def opened(folder: Path) -> Any:
    library = open_library(folder, 1)
    assert library is not None
    return library


def test_a_file_is_compiled_once_and_again_when_it_was_cut(
    tmp_path: Path, num_compiled: list[Path]
) -> None:
    path = opened(tmp_path / "kernels").path
    opened(tmp_path / "kernels")
    assert len(num_compiled) == 1

    for content in (b"", path.read_bytes()[:-5], b"\x7fELF"):
        before = len(num_compiled)
        path.write_bytes(content)
        assert opened(tmp_path / "kernels").content.startswith(b"\x7fELF" * 100)
        assert len(num_compiled) == before + 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ("file", "full", "dangling"))
def test_a_folder_that_cannot_be_written_costs_the_cache_alone(
    kind: str,
    tmp_path: Path,
    num_compiled: list[Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "kernels"
    if kind == "file":
        folder.write_text("")
    elif kind == "dangling":
        folder.symlink_to(tmp_path / "nothing")
    else:

        def fill(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(library_module, "write_whole", fill)

    with caplog.at_level(logging.WARNING):
        library = opened(folder)

    assert library.path == num_compiled[0] and not library.path.exists()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cannot be written" in line and "--cache-dir" in line

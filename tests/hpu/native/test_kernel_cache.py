"""hpu/native/library.py: the compiled file in a folder that is full or read-only, and a truncated
file."""

import errno
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpu.native import library as library_module
from hpu.native.library import open_library


class Loaded:
    """Fake library that records the loaded files."""

    has_tiles = False
    instruction_set = "AVX-512"

    def __init__(self, path: Path, _: int) -> None:
        self.path = path
        self.content = path.read_bytes()

    def round_inputs(self, _: bool) -> bool:
        return False


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that the fake compiler wrote."""
    compiled: list[Path] = []

    def compile_to(_: str, path: Path, *__: object) -> bool:
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


def test_a_kernel_file_is_compiled_once_and_again_after_truncation(
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


def test_another_environment_with_the_same_torch_needs_no_compilation(
    tmp_path: Path, num_compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name, count in (
        ("one", "libgomp.so.1", 1),
        ("two", "libgomp.so.1", 1),
        ("two", "libgomp-a34b3233.so.1", 2),
    ):
        runtime = [f"/{place}/torch/lib/{name}"]
        monkeypatch.setattr(library_module, "openmp_runtime", lambda runtime=runtime: runtime)

        opened(tmp_path / "kernels")

        assert len(num_compiled) == count


def test_the_start_log_does_not_mention_quantized_weights(
    tmp_path: Path,
    num_compiled: list[Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Loaded, "round_inputs", lambda *_: True)

    with caplog.at_level(logging.INFO):
        opened(tmp_path / "kernels")

    assert "compiled for this CPU" in caplog.text
    assert "quantized" not in caplog.text


@pytest.mark.parametrize("kind", ("file", "full", "dangling"))
def test_an_unwritable_folder_disables_only_the_cache(
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

    with caplog.at_level(logging.INFO):
        library = opened(folder)

    assert library.path == num_compiled[0] and not library.path.exists()
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "cannot be written" in line]
    starts = next(at for at, text in enumerate(lines) if "compiling with" in text)
    assert (lines.index(line) < starts) == (kind != "full")
    assert "cannot be written" in line and "--cache-dir" in line


def test_kernels_in_a_folder_that_every_user_may_write_are_not_loaded(
    tmp_path: Path, num_compiled: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kernels"
    opened(folder)
    folder.chmod(0o777)

    library = opened(folder)

    assert len(num_compiled) == 2 and library.path == num_compiled[1]
    assert "it can be written by every user (mode 777); set --cache-dir" in caplog.text


def test_kernels_of_another_user_are_recompiled(
    tmp_path: Path, num_compiled: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = opened(tmp_path).path
    try:
        os.chown(path, 65534, -1)
    except PermissionError:
        pytest.skip("only root can give a file to another user")

    again = opened(tmp_path)

    assert len(num_compiled) == 2 and again.path == path
    assert path.stat().st_uid == os.geteuid()
    assert "compiled again: it belongs to user 65534" in caplog.text


@pytest.mark.parametrize(
    ("script", "limit_s", "reason"),
    [
        ("echo a.h:1: note: x; echo 'a.h:2: error: no y' >&2; exit 1", 60, "a.h:2: error: no y"),
        ("echo; echo out of luck; exit 1", 60, "out of luck"),
        ("exit 4", 60, "exit status 4 without output"),
        ("kill -9 $$", 60, "it was killed by signal 9, probably because memory ran out"),
        ("exec sleep 20", 0.3, "it was not done within 0.3 s"),
    ],
)
def test_a_failed_compilation_is_logged_with_its_reason(
    script: str,
    limit_s: float,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(library_module, "NEEDED", frozenset())
    monkeypatch.setattr(library_module, "COMPILERS", (str(compiler),))
    monkeypatch.setattr(library_module, "COMPILE_TIMEOUT_S", limit_s)
    monkeypatch.setattr(library_module, "COUNT_S", 0.1)
    steps: list[str] = []

    with caplog.at_level(logging.INFO):
        assert open_library(tmp_path / "kernels", 1, on_step=steps.append) is None

    begun, failed = (record.getMessage() for record in caplog.records)
    assert "lacks kernels of this version, CPU and torch" in begun
    assert re.search(r"failed after \d+\.\d s: (.*); the next start tries again", failed)
    assert f" s: {reason}; the next" in failed and "-march" not in failed
    assert re.fullmatch(
        r"compiling kernels for this CPU, once, usually 1 to 3 minutes: \d+ s", steps[0]
    )
    assert len(steps) > 2 or limit_s == 60
    assert steps[-1] == library_module.AFTER_COMPILATION


def test_a_stop_during_the_compilation_ends_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(library_module, "NEEDED", frozenset())
    monkeypatch.setattr(library_module, "COMPILERS", (str(compiler),))

    others = set(psutil.Process().children())
    started: set[psutil.Process] = set()

    def stop(_: str) -> None:
        started.update(set(psutil.Process().children()) - others)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_library(tmp_path / "kernels", 1, on_step=stop)

    assert started and not any(process.is_running() for process in started)
    assert library_module.COMPILE_TIMEOUT_S >= 1800

"""server/cli/vllm_command.py: the `vllm` command that runs gaudiserve, and never hides vLLM."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from config.version import VERSION
from server.cli.main import main

ROOT = Path(__file__).parents[3]


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for commands that is first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    paths = {"scripts": str(folder), "purelib": str(tmp_path)}
    monkeypatch.setattr("sysconfig.get_path", paths.__getitem__)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def write_command(path: Path, text: str = "#!/bin/sh\necho the real one $*\n") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def other_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Python of another environment in which `gaudiserve vllm-command` was called."""
    folder = tmp_path / "environment"
    venv.create(folder)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    paths = {"scripts": str(folder / "bin"), "purelib": str(packages / "site-packages")}
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{sysconfig.get_path('purelib')}")
    monkeypatch.setattr("sysconfig.get_path", paths.__getitem__)
    assert main(["vllm-command"]) == 0
    return folder / "bin" / "python"


def write_package(folder: Path, module: str) -> None:
    """Write a package vllm with one module that prints its name."""
    file = folder / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    file.write_text("print(__spec__.name)\n")
    (folder / "vllm" / "__init__.py").touch()


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("openai.api_server", "serve"),
        ("openai.mm_api_server", "serve"),
        ("openai.run_batch", "run-batch"),
    ],
)
def test_a_module_of_vllm_runs_the_command_of_gaudiserve(
    module: str, command: str, other_python: Path, tmp_path: Path
) -> None:
    shown = call(str(other_python), "-m", f"vllm.entrypoints.{module}", "--help", cwd=str(tmp_path))

    assert shown.stdout.startswith(f"usage: gaudiserve {command} ")
    assert shown.stderr.startswith("vllm: this is gaudiserve ")


def test_other_programs_find_no_module_vllm(other_python: Path, tmp_path: Path) -> None:
    done = call(str(other_python), "-c", "import vllm", cwd=str(tmp_path))

    assert "No module named 'vllm'" in done.stderr


def test_a_vllm_package_that_is_installed_later_is_run(
    other_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "vllm.entrypoints.openai.api_server"
    write_package(tmp_path / "real", module)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path / 'real'}")

    done = call(str(other_python), "-m", module, cwd=str(tmp_path))
    absent = call(str(other_python), "-m", "vllm.entrypoints.cli.main", cwd=str(tmp_path))

    assert (done.stdout, done.stderr) == (f"{module}\n", "")
    assert "No module named vllm.entrypoints.cli" in absent.stderr.replace("'", "")


def call(*words: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)


def test_the_vllm_command_runs_gaudiserve_and_prints_a_notice(
    scripts: Path, tmp_path: Path
) -> None:
    assert main(["vllm-command"]) == 0
    assert main(["vllm-command"]) == 0

    version = call("vllm", "--version", cwd=str(tmp_path))
    refused = call("vllm", "serve", "m", "--frobnicate", cwd=str(tmp_path))

    line = f"vllm: this is gaudiserve {VERSION}, which takes the command line of vLLM\n"
    assert (version.returncode, version.stdout, version.stderr) == (0, f"{VERSION}\n", line)
    assert refused.returncode == 2
    assert refused.stderr.startswith(line) and "--frobnicate is not a flag" in refused.stderr


@pytest.mark.parametrize("place", ["bin", "other"])
def test_an_installed_vllm_command_is_not_replaced(
    place: str,
    scripts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = write_command(tmp_path / place / "vllm")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{tmp_path / 'other'}")

    assert main(["vllm-command"]) == 0

    assert capsys.readouterr().out == f"{real} is installed: nothing is written\n"
    assert call("vllm", "serve").stdout == "the real one serve\n"


def test_no_command_is_written_if_the_vllm_package_is_installed(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    assert main(["vllm-command"]) == 0

    assert list(scripts.iterdir()) == [] and list(tmp_path.glob("*.pth")) == []


def test_a_vllm_command_that_is_installed_later_is_run(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["vllm-command"])
    write_command(tmp_path / "other" / "vllm")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{tmp_path / 'other'}")

    done = call("vllm", "serve", "m")

    assert (done.returncode, done.stdout, done.stderr) == (0, "the real one serve m\n", "")


def test_the_error_names_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_path", "/no/such/folder".format)

    assert main(["vllm-command"]) == 2

    assert "/no/such/folder/vllm cannot be written: No such file" in capsys.readouterr().err


def test_flags_without_a_command_run_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--block-size", "128", "--frobnicate", "--model", "m"]) == 2

    assert "--frobnicate is not a flag of gaudiserve serve" in capsys.readouterr().err

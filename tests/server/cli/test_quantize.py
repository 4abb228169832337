"""`gaudiserve quantize` without the library: its flags, the texts, and the table. tests/quantizers
has the other tests."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_ends import is_alive, pid_in
from waits import wait_for

from server.cli import quantize
from server.cli.main import main
from server.cli.quantize import table
from server.offline.perplexity import Reading

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.txt"
    file.write_text("One text\n")
    return file


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--to awq", "--to awq needs --data, a file with texts"),
        ("--to fp8 --group-size 32", "--group-size is 32, and --to fp8 has a scale per output"),
        ("--to awq --all-layers --data {folder}/data.txt", "--to awq quantizes all layers anyway"),
        ("--to int4 --data {folder}/none.txt", "{folder}/none.txt is not a file"),
        ("--to int4 -o {folder}", "--output {folder} exists and is not an empty folder"),
        (
            "--to fp8-gaudi2 --all-layers",
            "--all-layers is set, and --to fp8-gaudi2 converts a quantized checkpoint as it is",
        ),
        ("--to int3", "--to is 'int3', it must be one of "),
        (
            "--to int4",
            "llmcompressor is not installed here: `pip install '.[cpu,quantize]'` in the clone",
        ),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line_with_status_2(
    flags: str,
    error: str,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quantize, "is_installed", lambda name: False)
    words = flags.format(folder=data.parent).split()
    output = [] if "-o" in words else ["-o", str(data.parent / "new")]

    assert main(["quantize", "some/model", *output, *words]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert error.format(folder=data.parent) in line


def test_a_text_that_is_not_utf_8_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize, "is_installed", lambda name: True)
    monkeypatch.setattr(quantize, "resolve", lambda model, report: str(tmp_path))
    text = tmp_path / "text"
    text.write_bytes("caf\u00e9".encode("latin-1"))
    words = ["--to", "fp8", "--text", str(text), "-o", str(tmp_path / "new")]

    assert main(["quantize", "some/model", *words]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert f"{text}: no text in UTF-8" in line


def test_the_table_compares_size_and_perplexity(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))
    before = Reading([-math.log(2)] * 4, [1, 2, 3, 4])
    after = Reading([-math.log(3)] * 4, [1, 2, 3, 5])

    first, second, third = table("int4", str(tmp_path), str(tmp_path), before, after).splitlines()

    assert first.split() == ["GB", "perplexity", "ratio", "same", "likeliest", "token"]
    assert second.split() == ["before", "0.001", "2.000", "1.0000", "100.0%"]
    assert third.split()[2:] == ["3.000", "1.5000", "75.0%"]


def test_the_quantization_process_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from server.cli.quantize import _in_own_process\n"
        "_in_own_process('subprocess', 'call', ['sh', '-c', 'echo $PPID > pid; cat'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = [sys.executable, "-c", code]
    with subprocess.Popen(start, stdin=subprocess.PIPE, cwd=tmp_path, env=environment) as command:
        pid = pid_in(tmp_path / "pid")

        command.kill()

        wait_for(lambda: not is_alive(pid))

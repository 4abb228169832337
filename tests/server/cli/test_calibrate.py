"""`gaudiserve calibrate` without the compressor."""

from pathlib import Path

import pytest

from config.errors import ConfigError
from server.cli import main as command
from server.cli.samples import read_samples


def test_samples_may_be_texts_or_conversations(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    path.write_text(
        '"plain"\n\n{"prompt": "p"}\n{"text": "t"}\n'
        '{"messages": [{"role": "user", "content": "hi"}]}\n"last"\n'
    )

    assert read_samples(path, 4) == ["plain", "p", "t", messages]


def test_lines_of_files_other_than_jsonl_are_plain_texts(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text('{"prompt": "p"}\n\n one \n')

    assert read_samples(path, 10) == ['{"prompt": "p"}', " one "]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON: a name in double quotes is missing, at column 2"),
        *[
            (line, "must be a string, or an object with prompt, text or messages")
            for line in ('["a"]', "[1]", '[{"role": "user"}]', '{"prompt": [1]}', "true", "null")
        ],
        ("3", "must be a string, or an object with prompt, text or messages"),
        ('{"a": 1}', "must be a string, or an object with prompt, text or messages"),
        ('{"messages": []}', "must be a string, or an object with prompt, text or messages"),
    ],
)
def test_the_error_names_an_invalid_sample_and_its_line(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'"good"\n{line}\n')

    with pytest.raises(ConfigError, match=rf"data\.jsonl, line 2 {message}"):
        read_samples(path, 10)


def test_a_missing_or_empty_sample_file_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.cli.calibrate.is_installed", lambda name: True)
    path = tmp_path / "data.txt"
    words = ["calibrate", "m", "--data", str(path), "-o", str(tmp_path / "out")]

    assert command.main(words) == 1
    assert f"{path}: No such file" in capsys.readouterr().err
    path.touch()
    assert command.main(words) == 1
    assert f"{path} has no samples" in capsys.readouterr().err


def test_the_compressor_must_be_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.txt"
    path.write_text("hello\n")
    monkeypatch.setattr("server.cli.calibrate.is_installed", lambda name: False)

    status = command.main(["calibrate", "m", "--data", str(path), "-o", str(tmp_path / "out")])

    assert status == 2
    assert "pip install neural-compressor-pt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""config/log.py: the same line format for this server and for uvicorn."""

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from config import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the process's logging after the test."""
    root = logging.getLogger()
    names = (*log.CHATTY, *log.UVICORN)
    before = (root.handlers[:], root.level, [logging.getLogger(name).level for name in names])
    yield
    root.handlers[:], level, levels = before
    root.setLevel(level)
    for name, old in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(old)
    access = logging.getLogger("uvicorn.access")
    access.filters.clear()
    access.disabled = False


def test_each_line_has_role_rank_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("worker", rank=3)

    logging.getLogger("hpu.worker.worker").info("loaded %d blocks", 7)

    line = capsys.readouterr().err.strip()
    assert line.endswith("INFO    worker 3 hpu.worker.worker: loaded 7 blocks")


def test_the_role_appears_once_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server")

    logging.getLogger("server.process.api_server").info("ready")

    assert capsys.readouterr().err.strip().endswith("INFO    server process.api_server: ready")


def test_a_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server")
    log.setup("engine", rank=0)

    logging.getLogger("x").warning("once")

    assert capsys.readouterr().err.count("once") == 1


def test_records_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server", log.LogConfig("warning"))

    logging.getLogger("x").info("hidden")
    logging.getLogger("x").warning("seen")

    err = capsys.readouterr().err
    assert "seen" in err
    assert "hidden" not in err


def test_libraries_log_only_warnings() -> None:
    log.setup("engine", log.LogConfig("debug"))

    compiler = logging.getLogger("torch.any_module")
    assert not compiler.isEnabledFor(logging.INFO)
    assert compiler.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    "text",
    ["\n", "\r", "\x1b[2J", "\x00", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\u202e", "\ud800"],
)
def test_line_breaks_and_control_characters_of_users_are_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    log.setup("server")

    root = logging.getLogger()
    with monkeypatch.context() as without_pytest:
        # pytest sends its captured log from a test process to the reporting process, as UTF-8.
        ours = [
            handler for handler in root.handlers if type(handler).__module__ != "_pytest.logging"
        ]
        without_pytest.setattr(root, "handlers", ours)
        logging.getLogger("x").info("path %s, done", f"/a{text}2026-01-01 INFO forged")

    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert text.encode("unicode_escape").decode() in err
    assert text == "\n" or text not in err
    assert err.endswith("2026-01-01 INFO forged, done\n")


def test_letters_of_every_script_are_not_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server")

    logging.getLogger("x").info("Größe 漢字 שלום 🙂 C:\\new")

    assert capsys.readouterr().err.endswith("Größe 漢字 שלום 🙂 C:\\new\n")


def test_a_traceback_keeps_its_lines_and_cannot_forge_log_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup("server")

    try:
        raise ValueError("no\n2026-01-01 00:00:00.000 INFO    server x: forged\x1b[2J")
    except ValueError:
        logging.getLogger("x").exception("it broke")

    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR   server x: it broke")
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") for line in rest)
    assert rest[-2:] == [
        "    ValueError: no",
        "    2026-01-01 00:00:00.000 INFO    server x: forged\\x1b[2J",
    ]


def access(path: str) -> None:
    logging.getLogger("uvicorn.access").info(
        '%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200
    )


def test_uvicorn_uses_this_format_and_does_not_log_probes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup("server")

    access("/health")
    access("/metrics?x=1")
    access("/v1/models")

    err = capsys.readouterr().err
    assert "server uvicorn.access: 127.0.0.1:1 - " in err
    assert err.count("\n") == 1


def test_access_log_lines_can_be_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server", access_log=False)

    access("/v1/models")

    assert capsys.readouterr().err == ""


def test_a_limited_warning_is_logged_once_a_minute_with_the_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [100.0]
    warning = log.LimitedWarning(logging.getLogger("x"), "%d so far", clock=lambda: now_s[0])

    for _ in range(5):
        warning.add()
    now_s[0] += 60
    warning.add()

    assert [record.getMessage() for record in caplog.records] == ["1 so far", "6 so far"]
    assert warning.count == 6


def test_a_limited_warning_formats_its_arguments_before_the_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warning = log.LimitedWarning(logging.getLogger("x"), "%.1f s (%d so far)", clock=lambda: 0.0)

    warning.add(2.5)

    assert caplog.messages == ["2.5 s (1 so far)"]


def test_libraries_that_reset_their_levels_still_log_only_warnings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.setup("engine", log.LogConfig("debug"))
    # The state of torch's logger after an interrupted import.
    torch_logger = logging.getLogger("torch")
    monkeypatch.setattr(torch_logger, "propagate", True)
    monkeypatch.setattr(torch_logger, "handlers", [])
    torch_logger.setLevel(logging.NOTSET)

    logging.getLogger("torch.any_module").info("FakeTensor cache stats:")
    logging.getLogger("torch.any_module").warning("seen")

    err = capsys.readouterr().err
    assert "seen" in err and "cache stats" not in err


def test_json_lines_have_the_fields_of_a_request_and_one_line_for_each_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup("worker", log.LogConfig("info", "json"), rank=1)

    logging.getLogger("x").info("a\nb", extra={"fields": {"request_id": "7", "ms": 1.5}})
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("failed")

    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        **{"level": "info", "process": "worker", "rank": 1, "logger": "x", "message": "a\nb"},
        **{"request_id": "7", "ms": 1.5},
    }
    assert second["exception"].endswith("ValueError: bad")
    assert log.applied() == log.LogConfig("info", "json")


STALLED = """
import logging, sys, time
sys.path.insert(0, sys.argv[1])
from config import log

log.setup("server")
logger = logging.getLogger("x")
for number in range(5_000):
    logger.info("line %d %s", number, "x" * 10_000 * (number == 4_000))
print("written", flush=True)
sys.stdin.read()
logger.info("after")
"""


def test_a_reader_that_stops_does_not_block_the_process() -> None:
    command = [sys.executable, "-c", STALLED, str(Path(__file__).parents[2])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin and process.stdout and process.stderr
        # Nobody reads stderr, whose pipe takes some hundred lines.
        assert process.stdout.readline() == "written\n"
        os.set_blocking(process.stderr.fileno(), False)
        first = process.stderr.read()
        os.set_blocking(process.stderr.fileno(), True)
        process.stdin.close()
        last = process.stderr.read().splitlines()

    lines = [line for line in first.splitlines() if "x: line" in line]
    assert 0 < len(lines) < 5_000
    assert f"{5_000 - len(lines)} log lines were lost" in last[0]
    assert last[1].endswith("x: after") and len(last) == 2


def test_a_long_line_for_a_slow_reader_waits_no_longer_than_a_short_line() -> None:
    out, into = os.pipe()
    content = bytearray()

    def read_slowly() -> None:
        while piece := os.read(out, select.PIPE_BUF):
            content.extend(piece)
            time.sleep(0.02)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    with open(into, "w", encoding="utf-8") as stream:
        handler = log.RoleHandler(stream)
        handler.setFormatter(log.RoleFormatter("server", None))
        started = time.monotonic()
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "y" * 2**20, (), None))
        waited_s = time.monotonic() - started
        while len(content) < 2**16:
            time.sleep(0.01)
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "after", (), None))
    reader.join()
    os.close(out)

    cut, lost, after = content.decode().splitlines()
    assert waited_s < 1.0
    assert cut.endswith("yyy")
    assert lost.endswith("1 log lines were lost, because the reader of stderr took none")
    assert after.endswith("x: after")

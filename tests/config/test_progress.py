"""config/progress.py: bars on a terminal, log lines, and reports."""

import contextlib
import fcntl
import io
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest

from config import progress
from config.progress import INTERVAL_S, STARTING, Bar, ProgressLines, ProgressReporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_no_bar_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    out, reports = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", out)

    def report(*words: object) -> None:
        reports.append(words)

    with Bar("fetch", report, total=98_000_000, desc="Fetching it") as bar:
        for _ in range(98):
            bar.update(1_000_000)

    assert out.getvalue() == ""
    assert reports[-1] == ("fetch", 98_000_000, 98_000_000)


def test_on_a_terminal_a_bar_is_drawn_and_no_line_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)

    with (
        caplog.at_level(logging.INFO),
        Bar("fetch", progress.unreported, total=100, desc="Fetching it") as bar,
    ):
        bar.update(100)

    assert "Fetching it" in out.getvalue() and caplog.records == []


DRAWING = """
from config.progress import Bar, CountBar, unreported
with Bar("fetch", unreported, total=100, desc="Fetching it") as bar:
    bar.update(100)
for _ in CountBar(range(2), desc="Counting it"):
    pass
"""


@pytest.mark.parametrize("columns", [0, 100])
def test_bars_are_drawn_whatever_width_the_terminal_reports(columns: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", columns // 4, columns, 0, 0))

    subprocess.run([sys.executable, "-c", DRAWING], stderr=theirs, check=True, timeout=60)

    os.close(theirs)
    text = b""
    # At the end of a terminal's output, Linux raises an error.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 4096):
            text += data
    os.close(ours)
    assert b"Fetching it: 100%|" in text and b"Counting it: 100%|" in text


@pytest.mark.parametrize("disable", [False, True])
def test_a_bar_stops_at_its_total(disable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[int] = []
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    def report(_: str, done_bytes: int, __: int) -> None:
        reports.append(done_bytes)

    with Bar("fetch", report, total=100, desc="Fetching it", disable=disable) as bar:
        for done_bytes in (0, 30, 30, 20, 70, 400):
            bar.reach(done_bytes)

    # The total is known before the first byte is done.
    assert reports == [0, 0, 30, 30, 30, 70, 100]


def test_a_start_is_silent_for_no_longer_than_the_interval() -> None:
    reporter = ProgressReporter(100.0)
    steps = [(100.1, "load"), (105.0, "load"), (106.0, "warmup, 1"), (110.0, "warmup, 2")]
    steps += [(112.0, "warmup, 2"), (115.0, "warmup, 2"), (235.0, "warmup, 2")]

    lines = [reporter.line(text, now_s) for now_s, text in steps]

    expected = [None, "Starting: load, unchanged for 5 s", None, "Starting: warmup, 2"]
    expected += [None, "Starting: warmup, 2, unchanged for 5 s"]
    assert lines == [*expected, "Starting: warmup, 2, unchanged for 2 min"]
    assert INTERVAL_S == 5


def test_a_start_without_a_known_stage_says_what_it_does() -> None:
    line = "Starting: importing modules and reading the checkpoint"

    assert ProgressReporter(0.0).line(STARTING, 5.0) == line


def test_beside_a_bar_a_line_is_logged_only_while_the_bar_stands_still() -> None:
    reporter = ProgressReporter(100.0)
    steps = [(104.0, "8 of 9 MB"), (105.0, "8 of 9 MB"), (110.0, "8 of 9 MB")]

    lines = [reporter.line(text, now_s, has_bar=True) for now_s, text in steps]

    assert lines == [None, None, "Starting: 8 of 9 MB, unchanged for 6 s"]


def _shown_lines(monkeypatch: pytest.MonkeyPatch, num_lines: int, seen: Callable[[], str]) -> str:
    """The output of ProgressLines after `num_lines` lines of it."""
    monkeypatch.setattr(progress, "INTERVAL_S", 0.02)
    with ProgressLines("importing the server") as lines:
        for stage in range(num_lines):
            if stage:
                lines.report(f"stage {stage}", 5_000_000, 9_000_000)
            deadline = time.monotonic() + 20.0
            while seen().count("\n") < stage + 1 and time.monotonic() < deadline:
                time.sleep(0.01)
    return seen()


def test_progress_lines_go_to_stderr_if_logging_is_not_set_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(logging.root, "hasHandlers", lambda: False)

    shown = _shown_lines(monkeypatch, 1, out.getvalue)

    assert shown.startswith("Starting: importing the server")


def test_progress_lines_are_logged_while_the_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        shown = _shown_lines(
            monkeypatch, 3, lambda: "".join(f"{record.getMessage()}\n" for record in caplog.records)
        )

    assert "Starting: importing the server" in shown
    assert "Starting: stage 2, 5 of 9 MB" in shown or "Starting: stage 1, 5 of 9 MB" in shown

"""config/progress.py: bars on a terminal, lines elsewhere, and reports in both."""

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

import pytest

from config import progress
from config.progress import Bar, TenthLines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("disable", [False, True])
def test_without_a_terminal_a_line_is_written_for_each_tenth(
    disable: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out, reports = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", out)

    def report(*words: object) -> None:
        reports.append(words)

    with (
        caplog.at_level(logging.INFO),
        Bar("fetch", report, total=98_000_000, desc="Fetching it", disable=disable) as bar,
    ):
        for _ in range(98):
            bar.update(1_000_000)

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if disable else 10)
    assert disable or lines[0] == "Fetching it: 10 %, 10 of 98 MB"
    assert disable or lines[-1] == "Fetching it: 100 %, 98 of 98 MB"
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


def test_an_unknown_total_writes_no_lines_for_tenths(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        TenthLines("Fetching it").update(50, 0)

    assert caplog.records == []

"""config/progress.py: bars on a terminal, lines elsewhere, and reports in both."""

import io
import logging
import sys

import pytest

from config import progress
from config.progress import Bar, TenthLines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("disable", [False, True])
def test_where_there_is_no_terminal_each_tenth_is_a_line(
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


@pytest.mark.parametrize("disable", [False, True])
def test_a_bar_reaches_its_total_and_no_more(
    disable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[int] = []
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    def report(_: str, done_bytes: int, __: int) -> None:
        reports.append(done_bytes)

    with Bar("fetch", report, total=100, desc="Fetching it", disable=disable) as bar:
        for done_bytes in (0, 30, 30, 20, 70, 400):
            bar.reach(done_bytes)

    # The total is known before the first byte is done.
    assert reports == [0, 0, 30, 30, 30, 70, 100]


def test_a_total_that_is_unknown_has_no_tenths(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        TenthLines("Fetching it").update(50, 0)

    assert caplog.records == []

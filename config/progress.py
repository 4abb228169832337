"""Progress of slow start-up work: log lines, a progress bar on a terminal, and callbacks."""

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from config.errors import capitalized

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Interval between progress lines."""
STARTING = "importing modules and reading the checkpoint"
"""Progress before the first stage is known."""

DOWNLOADING = "downloading the model"
"""Stage of a Report."""
CONVERTING = "converting the model"
"""Stage of a Report."""

Report = Callable[[str, int, int], None]
"""Called with a stage, such as CONVERTING, the bytes done and the total (0: unknown). May
be called from several threads; an exception aborts the work."""


def unreported(stage: str, done_bytes: int, total_bytes: int) -> None:
    """A Report that does nothing."""


OnStep = Callable[[str], None]
"""Called with the current work, for example `compiling kernels, 12 s`. An exception aborts the
work."""


def unreported_step(step: str) -> None:
    """An OnStep that does nothing."""


class ProgressReporter:
    """Rate limiter for progress lines: at most a line per INTERVAL_S. A line also says for how long
    the text has been unchanged, from INTERVAL_S / 2 on."""

    def __init__(self, started_s: float, prefix: str = "Starting: ") -> None:
        self._prefix = prefix
        self._last = ""
        self._since_s = started_s
        self._next_s = started_s + INTERVAL_S

    def line(self, text: str, now_s: float, *, has_bar: bool = False) -> str | None:
        """The line to log now for the progress `text`; None if no line is due, or if a progress bar
        (`has_bar`) shows that the text changes."""
        if text != self._last:
            self._last, self._since_s = text, now_s
        if now_s < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        waited_s = now_s - self._since_s
        is_stalled = waited_s >= INTERVAL_S / 2
        if has_bar and not is_stalled:
            return None
        line = f"{self._prefix}{text}" if self._prefix else capitalized(text)
        return f"{line}, unchanged for {duration(waited_s)}" if is_stalled else line


class ProgressLines:
    """Logs the current work of a `with` block every INTERVAL_S, from a thread, unless a progress
    bar shows that it changes. The lines go to stderr if logging is not set up."""

    def __init__(self, text: str = STARTING, *, prefix: str = "Starting: ") -> None:
        self._text: Callable[[], str] = lambda: text
        self._prefix = prefix
        self._has_bar = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress lines", daemon=True)

    def __enter__(self) -> "ProgressLines":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def report(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Show byte progress: a Report. On a terminal, a Bar shows it as well."""
        text = byte_progress(stage, done_bytes, total_bytes)
        self._text = lambda: text
        self._has_bar = total_bytes > 0 and sys.stderr.isatty()

    def show(self, text: Callable[[], str]) -> None:
        """Show the result of `text`, which is called from the thread; empty: show nothing."""
        self._text, self._has_bar = text, False

    def _run(self) -> None:
        reporter = ProgressReporter(time.monotonic(), self._prefix)
        while not self._ended.wait(INTERVAL_S):
            text = self._text()
            line = text and reporter.line(text, time.monotonic(), has_bar=self._has_bar)
            if line and logging.root.hasHandlers():
                logger.info("%s", line)
            elif line:
                print(line, file=sys.stderr, flush=True)


def byte_progress(stage: str, done_bytes: int, total_bytes: int) -> str:
    """Arguments of a Report as text: `downloading the model, 12 of 98 MB`."""
    if not total_bytes:
        return stage
    return f"{stage}, {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """A duration in its unit: `12 s`, `3 min`, `1.9 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def bar_size() -> dict[str, int]:
    """Arguments of a tqdm bar on a terminal that reports 0 columns, as serial consoles and some
    containers do: tqdm would draw nothing there. Empty elsewhere."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return {}
    usual = shutil.get_terminal_size()
    return {} if columns else {"ncols": usual.columns, "nrows": usual.lines}


class CountBar(tqdm):  # type: ignore[type-arg] # a class only to the type checker's stubs
    """A progress bar that is also drawn on a terminal that reports 0 columns."""

    def __init__(self, *args: Any, **look: Any) -> None:
        super().__init__(*args, **{**bar_size(), **look})


class Bar(CountBar):
    """A byte progress bar on a terminal, unless `disable`. Each update also calls `report`."""

    def __init__(self, stage: str, report: Report, *, desc: str, **look: Any) -> None:
        self._stage = stage
        self._report = report
        self._done_bytes = 0
        look["disable"] = look.get("disable") or not sys.stderr.isatty()
        super().__init__(**{"unit": "B", "unit_scale": True, "desc": desc, **look})
        # tqdm keeps no total while it is disabled.
        self._total_bytes = int(look.get("total") or 0)
        report(stage, 0, self._total_bytes)

    def reach(self, done_bytes: int) -> None:
        """Update to `done_bytes`, but not above the total, and never backwards."""
        self.update(max(0, min(done_bytes, self._total_bytes) - self._done_bytes))

    def update(self, n: float | None = 1) -> bool | None:
        # tqdm does not count while it is disabled.
        self._done_bytes += int(n or 0)
        self._report(self._stage, self._done_bytes, self._total_bytes)
        return super().update(n)

"""Formats start-up progress as text and as a progress bar. Each update is a new log line,
because other processes write to the same log."""

from config.errors import capitalized
from engine.transport.messages import Progress

WIDTH = 24
INTERVAL_S = 5.0
"""Interval between progress lines."""
STARTING = "starting"
"""Progress before the first stage is known."""


def describe(progress: Progress) -> str:
    """Progress as text: `warming up, 12 of 97, about 3 min left`."""
    text = progress.text
    if progress.left_s > 0 and progress.done < progress.total:
        text += f", about {_duration(progress.left_s)} left"
    return text


def bar(progress: Progress) -> str:
    """Progress as a progress bar: `[######------------------] warming up, 12 of 48, about 3
    min left`. Without a total, only the text."""
    if not progress.total:
        return describe(progress)
    filled = WIDTH * min(progress.done, progress.total) // progress.total
    return f"[{'#' * filled}{'-' * (WIDTH - filled)}] {describe(progress)}"


class ProgressReporter:
    """Rate limiter for progress lines: at most a line per INTERVAL_S. A line also says for how long
    the text has been unchanged, from INTERVAL_S / 2 on."""

    def __init__(self, started_s: float) -> None:
        self._last = ""
        self._since_s = started_s
        self._next_s = started_s + INTERVAL_S

    def line(self, text: str, now_s: float) -> str | None:
        """The line to log now for the progress `text`; None if no line is due."""
        if text != self._last:
            self._last, self._since_s = text, now_s
        if now_s < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        waited_s = now_s - self._since_s
        line = capitalized(text) if text == STARTING else f"Starting: {text}"
        if waited_s < INTERVAL_S / 2:
            return line
        return f"{line}, unchanged for {_duration(waited_s)}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"

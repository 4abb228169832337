"""Formats start-up progress as text and as a progress bar. Each update is a new log line,
because other processes write to the same log."""

from config.progress import duration
from engine.transport.messages import Progress

WIDTH = 24


def describe(progress: Progress) -> str:
    """Progress as text: `warming up, 12 of 97, about 3 min left`."""
    text = progress.text
    if progress.left_s > 0 and progress.done < progress.total:
        text += f", about {duration(progress.left_s)} left"
    return text


def bar(progress: Progress) -> str:
    """Progress as a progress bar: `[######------------------] warming up, 12 of 48, about 3
    min left`. Without a total, only the text."""
    if not progress.total:
        return describe(progress)
    filled = WIDTH * min(progress.done, progress.total) // progress.total
    return f"[{'#' * filled}{'-' * (WIDTH - filled)}] {describe(progress)}"

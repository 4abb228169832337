"""Progress of slow start-up work: a progress bar on a terminal, log lines elsewhere, and
callbacks."""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

NUM_LINES = 10
"""Maximum number of log lines for a download or conversion without a progress bar."""

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


class TenthLines:
    """Logs byte progress at each tenth of the total, in place of a progress bar."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._num_written = 0

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Log a line if `done_bytes` has reached the next tenth of the total."""
        tenths = NUM_LINES * done_bytes // total_bytes if total_bytes else 0
        if tenths > self._num_written:
            self._num_written = tenths
            megabytes = f"{done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"
            logger.info("%s: %d %%, %s", self._words, 100 * tenths // NUM_LINES, megabytes)


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
    """A progress bar that is drawn on terminals of any reported size."""

    def __init__(self, *args: Any, **look: Any) -> None:
        super().__init__(*args, **{**bar_size(), **look})


class Bar(CountBar):
    """A byte progress bar on a terminal, log lines elsewhere; with `disable`, neither. Each update
    also calls `report`, even with `disable`."""

    def __init__(self, stage: str, report: Report, *, desc: str, **look: Any) -> None:
        self._stage = stage
        self._report = report
        self._done_bytes = 0
        is_terminal = sys.stderr.isatty()
        self._lines = None if is_terminal or look.get("disable") else TenthLines(desc)
        look["disable"] = look.get("disable") or not is_terminal
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
        if self._lines is not None:
            self._lines.update(self._done_bytes, self._total_bytes)
        return super().update(n)

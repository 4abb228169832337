"""Progress of downloads and conversions at start-up: a bar and a callback."""

from collections.abc import Callable
from typing import Any

from tqdm import tqdm

Report = Callable[[str, int, int], None]
"""Called with a stage ("fetch", "convert"), the bytes done and the total (0: unknown). May be
called on several threads; an exception aborts the work."""


def unreported(stage: str, done_bytes: int, total_bytes: int) -> None:
    """A Report that does nothing."""


class Bar(tqdm):  # type: ignore[type-arg] # a class only to the type checker's stubs
    """A bar over bytes that also reports each update, even if it is disabled."""

    def __init__(self, stage: str, report: Report, **look: Any) -> None:
        self._stage = stage
        self._report = report
        self._done_bytes = 0
        super().__init__(**{"unit": "B", "unit_scale": True, **look})

    def update(self, n: float | None = 1) -> bool | None:
        # tqdm does not count while it is disabled.
        self._done_bytes += int(n or 0)
        self._report(self._stage, self._done_bytes, int(self.total or 0))
        return super().update(n)

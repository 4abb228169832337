"""MetricsPages: responses of /metrics, shared by concurrent scrapes."""

import asyncio
import time
from collections.abc import Callable, Iterator

from server.metrics.registry import openmetrics_version

PAGE_GAP_S = 0.025
"""Minimum time between the end of a page and the next page."""
GAP_RATIO = 4
"""Minimum time between the end of a page and the next page, as a multiple of the time that the page
took on the event loop: about 10 ms for each engine. Clients need no key for
/metrics: their pages take at most a fifth of the event loop."""
SLICE_S = 0.005
"""Time on the event loop after which the page lets other tasks run."""

Page = tuple[bytes, str]
"""(text, content type)"""


class MetricsPages:
    """Generates one page at a time, with PAGE_GAP_S and GAP_RATIO between two pages of any format.
    A page is generated after the requests for it have arrived."""

    def __init__(self, pieces: Callable[[str], tuple[Iterator[bytes], str]]) -> None:
        """`pieces`: function that generates the page for an Accept header in pieces."""
        self._pieces = pieces
        self._coming: dict[str | None, asyncio.Task[Page]] = {}
        """OpenMetrics version (None: plain text) -> page that will be generated next."""
        self._making = asyncio.Lock()
        self._next_s = 0.0
        """Earliest start of the next page, in the event loop's time."""

    async def get(self, accept: str) -> Page:
        """The page in the format that `accept` prefers."""
        version = openmetrics_version(accept)
        if version not in self._coming:
            self._coming[version] = asyncio.create_task(self._make_next(version, accept))
        # A client that disconnects must not cancel the page for the other clients.
        return await asyncio.shield(self._coming[version])

    async def _make_next(self, version: str | None, accept: str) -> Page:
        loop = asyncio.get_running_loop()
        async with self._making:
            await asyncio.sleep(max(0.0, self._next_s - loop.time()))
            del self._coming[version]
            busy_s = 0.0
            begun_s = time.monotonic()
            try:
                pieces, content_type = self._pieces(accept)
                page = []
                for piece in pieces:
                    page.append(piece)
                    slice_s = time.monotonic() - begun_s
                    if slice_s > SLICE_S:
                        busy_s += slice_s
                        await asyncio.sleep(0)
                        begun_s = time.monotonic()
                return b"".join(page), content_type
            finally:
                busy_s += time.monotonic() - begun_s
                self._next_s = loop.time() + max(PAGE_GAP_S, GAP_RATIO * busy_s)

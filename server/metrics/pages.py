"""MetricsPages: responses of /metrics, shared by concurrent scrapes."""

import asyncio
import math
from collections.abc import Callable

from server.metrics.registry import openmetrics_version

PAGE_GAP_S = 0.025
"""Minimum time between pages of the same format. A page takes about 6 ms of the event loop."""

Page = tuple[bytes, str]
"""(text, content type)"""


class MetricsPages:
    """Generates at most one page per format in PAGE_GAP_S. A page is generated after the requests
    for it have arrived."""

    def __init__(self, make: Callable[[str], Page]) -> None:
        """`make`: function that generates the page for an Accept header."""
        self._make = make
        self._coming: dict[str | None, asyncio.Task[Page]] = {}
        """OpenMetrics version (None: plain text) -> page that will be generated next."""
        self._made_s: dict[str | None, float] = {}

    async def get(self, accept: str) -> Page:
        """The page in the format that `accept` prefers."""
        version = openmetrics_version(accept)
        if version not in self._coming:
            self._coming[version] = asyncio.create_task(self._make_next(version, accept))
        # A client that disconnects must not cancel the page for the other clients.
        return await asyncio.shield(self._coming[version])

    async def _make_next(self, version: str | None, accept: str) -> Page:
        loop = asyncio.get_running_loop()
        next_s = self._made_s.get(version, -math.inf) + PAGE_GAP_S
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        del self._coming[version]
        self._made_s[version] = loop.time()
        return self._make(accept)

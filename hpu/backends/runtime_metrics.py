"""Counts of compilations, host fallbacks and recipe cache hits that the runtime of a device
keeps."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)


class RuntimeMetrics:
    """Totals since the start of the runtime. Reading them does not wait for the device."""

    def __init__(self, source: Any) -> None:
        """`source`: the vendor's module `hpu.metrics`."""
        self._source = source
        for name in ("graph_compilation", "cpu_fallback"):
            if source.metric_global(name) is None:
                logger.warning("The runtime has no metric %s: it is reported as 0", name)

    def compilations(self) -> int:
        return int(self._metric("graph_compilation").get("TotalNumber", 0))

    def compile_seconds(self) -> float:
        return float(self._metric("graph_compilation").get("TotalTime", 0)) / 1e6

    def compiled_recipes(self) -> Sequence[tuple[str, int]]:
        """(name, microseconds) of each compilation, recorded only with
        PT_HPU_METRICS_GC_DETAILS."""
        return [
            (str(name), int(us)) for name, us in self._metric("graph_compilation").get("recipe", ())
        ]

    def cpu_fallbacks(self) -> Mapping[str, int]:
        """Count of host fallbacks by operation."""
        return dict(self._metric("cpu_fallback").get("FallbackOps", {}))

    def recipe_cache(self) -> tuple[int, int]:
        """(hits, misses) of the cache of compiled recipes, counted only with
        PT_HPU_ENABLE_CACHE_METRICS."""
        found = self._metric("recipe_cache")
        return int(found.get("TotalHit", 0)), int(found.get("TotalMiss", 0))

    def _metric(self, name: str) -> dict[str, Any]:
        """The runtime's counts; empty if the runtime does not have this metric."""
        metric = self._source.metric_global(name)
        return {} if metric is None else dict(metric.stats())

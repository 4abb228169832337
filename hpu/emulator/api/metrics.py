"""The module `habana_frameworks.torch.hpu.metrics`: compilations, fallbacks, defragmentation and
recipe cache, with the runtime's order of fields."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hpu.emulator.card.device import Device

Stats = list[tuple[str, Any]]
NAMES = ("graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache")


class MetricNotFound(Exception):
    """No metric of this name."""


class Metric:
    """Counts since this metric was created or reset."""

    def __init__(self, name: str, device: Device, since_start: bool) -> None:
        self._name = name
        self._device = device
        self._compilations = self._time_us = self._num_recipes = 0
        self._fallbacks: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        if not since_start:
            self.reset()

    def name(self) -> str:
        return self._name

    def reset(self) -> None:
        """Restart the counts; the list of recipes stays, like in the real runtime."""
        counters = self._device.counters
        self._compilations = counters.counts["compilations"]
        self._time_us = counters.compile_us
        self._fallbacks = Counter(counters.fallback_ops)
        self._hits = Counter(counters.recipe_hits)
        self._misses = Counter(counters.recipe_misses)

    def stats(self) -> Stats:
        """Ordered (field, value) pairs."""
        counters = self._device.counters
        if self._name == "graph_compilation":
            number = counters.counts["compilations"] - self._compilations
            time_us = counters.compile_us - self._time_us
            pairs: Stats = [
                ("TotalNumber", number),
                ("TotalTime", time_us),
                ("AvgTime", time_us / number if number else 0),
            ]
            if self._device.variables.flag("PT_HPU_METRICS_GC_DETAILS"):
                pairs.append(("Recipes", list(counters.recipes)))
            return pairs
        if self._name == "cpu_fallback":
            ops = counters.fallback_ops - self._fallbacks
            return [("TotalNumber", ops.total()), ("FallbackOps", dict(ops))]
        if self._name == "memory_defragmentation":
            fields = ("TotalNumber", "TotalSuccessful", "AvgTime", "MaxTime")
            return [(field, 0) for field in fields]
        hits, misses = counters.recipe_hits - self._hits, counters.recipe_misses - self._misses
        return [
            ("TotalHit", hits.total()),
            ("RecipeHit", dict(hits)),
            ("TotalMiss", misses.total()),
            ("RecipeMiss", dict(misses)),
        ]


def make_module(device: Device) -> ModuleType:
    """`habana_frameworks.torch.hpu.metrics`."""
    module = ModuleType("habana_frameworks.torch.hpu.metrics")
    counts_recipes = device.variables.flag("PT_HPU_ENABLE_CACHE_METRICS")
    names = [name for name in NAMES if name != "recipe_cache" or counts_recipes]
    overall = {name: Metric(name, device, since_start=True) for name in names}

    def metric_global(name: str) -> Metric | None:
        """None for a metric that is not registered."""
        return None if device.has_fault("metrics") else overall.get(name)

    @contextmanager
    def metric_localcontext(name: str) -> Iterator[Metric]:
        if name not in overall:
            raise MetricNotFound(f"metric {name!r} is not one of {', '.join(overall)}")
        yield Metric(name, device, since_start=False)

    def metrics_dump(file: str | Path, format: str = "json") -> None:
        table = {name: dict(metric.stats()) for name, metric in overall.items()}
        Path(file).write_text(json.dumps(table, indent=1))

    vars(module).update(
        metric_global=metric_global,
        metric_localcontext=metric_localcontext,
        metrics_dump=metrics_dump,
        MetricNotFound=MetricNotFound,
    )
    return module

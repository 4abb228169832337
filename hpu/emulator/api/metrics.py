"""The module `habana_frameworks.torch.hpu.metrics`: compilations, fallbacks, defragmentation and
recipe cache, with the runtime's order of fields."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from hpu.emulator.card.device import EmulatedDevice

Stats = list[tuple[str, Any]]
NAMES = ("graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache")


class MetricNotFound(Exception):
    """There is no metric of this name."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Snapshot of the card's counters."""

    compilations: int
    time_us: int
    num_recipes: int
    fallbacks: Counter[str]
    hits: Counter[str]
    misses: Counter[str]


class Metric:
    """A metric of the runtime. It counts from its creation on or, with `since_start`, from the
    start of the runtime on; `stop` pauses it."""

    def __init__(self, name: str, device: EmulatedDevice, since_start: bool) -> None:
        self._name = name
        self._device = device
        nothing: Counter[str] = Counter()
        self._base = Totals(0, 0, 0, nothing, nothing, nothing)
        self._ends: list[Totals] = []
        """The totals at the time of `stop`; empty while the metric counts."""
        if not since_start:
            self._base = self._now()

    def name(self) -> str:
        return self._name

    def start(self) -> None:
        """Resume counting. Events since `stop` are not counted."""
        if not self._ends:
            return
        now, end, base = self._now(), self._ends.pop(), self._base
        self._base = Totals(
            base.compilations + now.compilations - end.compilations,
            base.time_us + now.time_us - end.time_us,
            base.num_recipes + now.num_recipes - end.num_recipes,
            base.fallbacks + (now.fallbacks - end.fallbacks),
            base.hits + (now.hits - end.hits),
            base.misses + (now.misses - end.misses),
        )

    def stop(self) -> None:
        if not self._ends:
            self._ends.append(self._now())

    def reset(self) -> None:
        """Restart the counts; the list of recipes stays, as in the real runtime."""
        self._base = replace(self._now(), num_recipes=self._base.num_recipes)
        self._ends = self._ends and [self._now()]

    def stats(self) -> Stats:
        """Ordered (field, value) pairs."""
        base, end = self._base, (self._ends or [self._now()])[0]
        if self._name == "graph_compilation":
            number = end.compilations - base.compilations
            time_us = end.time_us - base.time_us
            pairs: Stats = [
                ("TotalNumber", number),
                ("TotalTime", time_us),
                ("AvgTime", time_us / number if number else 0),
            ]
            if self._device.variables.flag_of_metrics("PT_HPU_METRICS_GC_DETAILS"):
                recipes = self._device.counters.recipes[base.num_recipes : end.num_recipes]
                pairs.append(("recipe", recipes))
            return pairs
        if self._name == "cpu_fallback":
            ops = end.fallbacks - base.fallbacks
            return [("TotalNumber", ops.total()), ("FallbackOps", dict(ops))]
        if self._name == "memory_defragmentation":
            fields = ("TotalNumber", "TotalSuccessful", "AvgTime", "MaxTime")
            return [(field, 0) for field in fields]
        hits, misses = end.hits - base.hits, end.misses - base.misses
        return [
            ("TotalHit", hits.total()),
            ("RecipeHit", dict(hits)),
            ("TotalMiss", misses.total()),
            ("RecipeMiss", dict(misses)),
        ]

    def _now(self) -> Totals:
        counters = self._device.counters
        return Totals(
            counters.counts["compilations"],
            counters.compile_us,
            len(counters.recipes),
            Counter(counters.fallback_ops),
            Counter(counters.recipe_hits),
            Counter(counters.recipe_misses),
        )


def _unused(file: Path) -> Path:
    """`file`, or the first unused `file.1`, `file.2`, ... if it exists."""
    names = (file, *(file.with_name(f"{file.name}.{number}") for number in range(1, 1000)))
    return next(name for name in names if not name.exists())


def make_module(device: EmulatedDevice) -> ModuleType:
    """`habana_frameworks.torch.hpu.metrics`."""
    module = ModuleType("habana_frameworks.torch.hpu.metrics")
    # The native library reads the variable too, and refuses other words.
    device.variables.flag("PT_HPU_ENABLE_CACHE_METRICS")
    counts_recipes = device.variables.flag_of_metrics("PT_HPU_ENABLE_CACHE_METRICS")
    names = [name for name in NAMES if name != "recipe_cache" or counts_recipes]
    overall = {name: Metric(name, device, since_start=True) for name in names}

    def metric_global(name: str) -> Metric | None:
        """None for a metric that is not registered."""
        return None if device.has_fault("metrics") else overall.get(name)

    @contextmanager
    def metric_localcontext(name: str) -> Iterator[Metric]:
        if name not in overall:
            raise MetricNotFound(f"metric {name!r} is not one of {', '.join(overall)}")
        metric = Metric(name, device, since_start=False)
        try:
            yield metric
        finally:
            metric.stop()

    def metrics_dump(file: str | Path, format: str = "json") -> None:
        """Write a list with an object for each metric. An existing file is kept."""
        moment = datetime.now().isoformat()
        table = [
            {
                "metric_name": name,
                "triggered_by": "user",
                "generated_on": moment,
                "statistics": dict(metric.stats()),
            }
            for name, metric in overall.items()
        ]
        _unused(Path(file)).write_text(json.dumps(table))

    vars(module).update(
        metric_global=metric_global,
        metric_localcontext=metric_localcontext,
        metrics_dump=metrics_dump,
        MetricNotFound=MetricNotFound,
    )
    return module

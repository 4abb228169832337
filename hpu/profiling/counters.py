"""Counters: numbers a worker keeps for its operator, by name. What can be told from a plan alone
(bucket lookups, padding) the engine counts.

compilations.{prefill,decode}.{warmup,serving}  captured graphs, by when they were captured; where
                                                none are, what the device's runtime compiled
compile_seconds.{warmup,serving}                time that took
graphs, graph_bytes                             graphs kept, and the memory they hold (gauges)
recompilations, cpu_fallbacks                   after warm-up, as the device's runtime counts them
recipe_hits, recipe_misses                      its cache of compiled recipes, since the start
"""

from hpu.protocol import PREFILL


def phase_name(phase: int) -> str:
    """The word for a launch's phase in a counter's name."""
    return "prefill" if phase == PREFILL else "decode"


class Counters:
    """Totals since start, and which of them changed since they were last read."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._changed: set[str] = set()

    def add(self, name: str, amount: float) -> None:
        if amount:
            self._totals[name] = self._totals.get(name, 0) + amount
            self._changed.add(name)

    def total(self, name: str) -> float:
        return self._totals.get(name, 0)

    def take_changed(self) -> dict[str, float]:
        """New totals of the counters that changed since the last call."""
        changed = {name: self._totals[name] for name in self._changed}
        self._changed.clear()
        return changed

"""Counters: a worker's metrics by name.

compilations.{prefill,decode}.{warmup,serving}  captured buckets, and buckets that run first while
                                                serving; without captures, compilations of the
                                                device's runtime
compile_seconds.{warmup,serving}                time of these compilations
graphs, graph_bytes                             captured buckets, memory of all graphs (gauges)
recompilations, cpu_fallbacks                   after warm-up, counted by the device's runtime
recipe_hits, recipe_misses                      the runtime's recipe cache, since the start
images_encoded, image_embeddings                encoded images and the rows of their embeddings
spec_decode.*                                   see AcceptanceCounts
"""

from hpu.protocol import PREFILL


def phase_name(phase: int) -> str:
    """Name of a phase in counters and logs."""
    return "prefill" if phase == PREFILL else "decode"


class Counters:
    """Totals since the start, with change tracking."""

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
        """Take the totals of the counters that changed since the last call."""
        changed = {name: self._totals[name] for name in self._changed}
        self._changed.clear()
        return changed

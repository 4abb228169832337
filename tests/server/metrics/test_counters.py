"""Counters and histograms, compared with prometheus_client's own page."""

from collections.abc import Iterator
from pathlib import Path

import prometheus_client as library
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from server.metrics.counters import Registry, SharedSnapshots

BOUNDS = (0.5, 1.0, 2.0)
VALUES = (0.125, 0.5, 0.75, 1.0, 2.0, 2.125, 50.0)
"""Exact binary fractions, so that sums are equal in any order."""


def without_created(page: bytes) -> list[bytes]:
    return [line for line in page.splitlines() if b"_created" not in line]


def test_the_metrics_page_equals_prometheus_client() -> None:
    ours, theirs = Registry(), CollectorRegistry()
    counters = [
        ours.counter("c", "x", ("label",)),
        library.Counter("c", "x", ("label",), registry=theirs),
    ]
    histograms = [
        ours.histogram("h", "x", ("label",), BOUNDS),
        library.Histogram("h", "x", ("label",), buckets=BOUNDS, registry=theirs),
    ]

    for step in range(3):
        for counter, histogram in zip(counters, histograms, strict=True):
            for value in VALUES[step:]:
                counter.labels("a").inc(step)
                counter.labels("b").inc(1)
                histogram.labels("a").observe(value)

        assert without_created(generate_latest(ours)) == without_created(generate_latest(theirs))


class Page:
    """Metrics of a process together with the snapshots of the other processes, as a
    prometheus_client collector."""

    def __init__(self, registry: Registry, shared: SharedSnapshots) -> None:
        self._registry = registry
        self._shared = shared

    def collect(self) -> Iterator[Metric]:
        return self._registry.collect(list(self._shared.others()))


def test_every_process_shows_the_sums_of_all_processes(tmp_path: Path) -> None:
    registries = [Registry() for _ in range(4)]
    families = [
        (registry.counter("c", "x", ("label",)), registry.histogram("h", "x", ("label",), BOUNDS))
        for registry in registries
    ]
    *processes, whole = registries
    for index, label in enumerate("aba"):
        for counter, histogram in (families[index], families[-1]):
            counter.labels(label).inc(2)
            histogram.labels(label).observe(0.75)
    shared = [SharedSnapshots(str(tmp_path), index) for index in range(3)]

    for registry, snapshots in zip(processes, shared, strict=True):
        snapshots.publish(registry.snapshot())

    expected = sorted(generate_latest(whole).splitlines())
    for registry, snapshots in zip(processes, shared, strict=True):
        page = generate_latest(Page(registry, snapshots))
        assert sorted(page.splitlines()) == expected

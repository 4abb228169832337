"""Counters and histograms of this process, and their sums over all API servers.

prometheus_client is not used for them: its counters take two locks per value, a tenth of an API
server's time per token, and share values between processes through memory-mapped files that are
chosen at import.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from config.whole_files import write_whole

Labels = tuple[str, ...]
Values = list[float]
Snapshot = dict[str, list[tuple[Labels, Values]]]
"""Family name -> (labels, values) of each series."""


class Counter:
    """A counter. Not thread-safe."""

    def __init__(self) -> None:
        self._sum = 0

    def inc(self, count: int = 1) -> None:
        self._sum += count

    @property
    def values(self) -> Values:
        return [self._sum]


class Histogram:
    """Counts per bucket, and the sum of all values. Not thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Observe `value` `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def values(self) -> Values:
        """Count of each bucket (not cumulative), then the sum."""
        return [*self._counts, self._sum]


class CounterFamily:
    """Counters with the same name and different label values."""

    def __init__(self, name: str, text: str, label_names: Sequence[str]) -> None:
        self._about = (name, text)
        self._label_names = label_names
        self.series: dict[Labels, Counter] = {}

    def labels(self, *labels: str) -> Counter:
        """The counter with these label values."""
        return self.series.setdefault(labels, Counter())

    def metric(self, values: Mapping[Labels, Values]) -> Metric:
        """Metric family with `values`, for prometheus_client."""
        family = CounterMetricFamily(*self._about, labels=self._label_names)
        for labels, (total,) in values.items():
            family.add_metric(labels, total)
        return family


class HistogramFamily:
    """Histograms with the same name and different label values."""

    def __init__(
        self, name: str, text: str, label_names: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._about = (name, text)
        self._label_names = label_names
        self._bounds = bounds
        self.series: dict[Labels, Histogram] = {}

    def labels(self, *labels: str) -> Histogram:
        """The histogram with these label values."""
        return self.series.setdefault(labels, Histogram(self._bounds))

    def metric(self, values: Mapping[Labels, Values]) -> Metric:
        """Metric family with `values`, for prometheus_client."""
        family = HistogramMetricFamily(*self._about, labels=self._label_names)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, (*counts, total) in values.items():
            buckets = list(zip(names, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, total)
        return family


class Registry:
    """Metric families by name."""

    def __init__(self) -> None:
        self._families: dict[str, CounterFamily | HistogramFamily] = {}

    def counter(self, name: str, text: str, label_names: Sequence[str]) -> CounterFamily:
        """The counter family `name`, created on first use."""
        family = self._families.setdefault(name, CounterFamily(name, text, label_names))
        assert isinstance(family, CounterFamily), f"{name} is a histogram"
        return family

    def histogram(
        self, name: str, text: str, label_names: Sequence[str], bounds: Sequence[float]
    ) -> HistogramFamily:
        """The histogram family `name`, created on first use; `bounds`: upper bounds of the
        buckets."""
        family = self._families.setdefault(name, HistogramFamily(name, text, label_names, bounds))
        assert isinstance(family, HistogramFamily), f"{name} is a counter"
        return family

    def snapshot(self) -> Snapshot:
        """Values of all series."""
        return {
            name: [(labels, series.values) for labels, series in family.series.items()]
            for name, family in self._families.items()
        }

    def collect(self, snapshots: Sequence[Snapshot] = ()) -> Iterator[Metric]:
        """All metric families, summed with the `snapshots` of other processes. Values may be
        observed, and families added, between two families."""
        for name, family in list(self._families.items()):
            totals = {labels: series.values for labels, series in family.series.items()}
            for snapshot in snapshots:
                for labels, values in snapshot.get(name, ()):
                    own = totals.get(labels)
                    totals[labels] = (
                        values if own is None else [a + b for a, b in zip(own, values, strict=True)]
                    )
            yield family.metric(totals)


class SharedSnapshots:
    """Folder with the latest snapshot of each API server, one file each. The last snapshot of a
    dead server is kept, so that summed counters never decrease."""

    def __init__(self, folder: str, index: int, restart: int = 0) -> None:
        """`index`: index of this API server; `restart`: number of earlier servers with this
        index."""
        self._folder = Path(folder)
        self._path = self._folder / f"{index}-{restart}.msgpack"
        self._published = b""

    def publish(self, snapshot: Snapshot) -> None:
        """Replace this server's snapshot atomically, if it has changed. Raises OSError."""
        data = msgspec.msgpack.encode(snapshot)
        if data == self._published:
            return
        write_whole(str(self._path), data)
        self._published = data

    def others(self) -> Iterator[Snapshot]:
        """Snapshots of the other servers."""
        for path in sorted(self._folder.glob("*.msgpack")):
            if path != self._path:
                yield msgspec.msgpack.decode(path.read_bytes(), type=Snapshot)

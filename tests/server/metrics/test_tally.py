"""Counts that wait in plain numbers: the library's own page is the reference."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from server.metrics.tally import BatchedCounter, BatchedHistogram

BOUNDS = (0.5, 1.0, 2.0)
VALUES = (0.125, 0.5, 0.75, 1.0, 2.0, 2.125, 50.0)
"""Without rounding, so that sums are equal in any order."""


def test_batches_leave_what_the_library_would_have_counted_itself() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counters = [Counter("c", "x", registry=one) for one in (ours, theirs)]
    histograms = [Histogram("h", "x", buckets=BOUNDS, registry=one) for one in (ours, theirs)]
    counter, histogram = BatchedCounter(counters[0]), BatchedHistogram(histograms[0], BOUNDS)

    for turn in range(3):
        for value in VALUES[turn:]:
            counter.inc(turn)
            histogram.observe(value)
            counters[1].inc(turn)
            histograms[1].observe(value)
        counter.settle()
        histogram.settle()

        told = [line for line in generate_latest(ours).splitlines() if b"_created" not in line]
        due = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
        assert told == due

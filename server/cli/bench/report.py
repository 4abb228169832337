"""Numbers from outcomes: percentiles, throughput, failures; as a table and as JSON. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from server.cli.bench.openai import Outcome

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        """None when there is nothing to measure."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        found = [percentile(ordered, share) * 1000 for share in PERCENTILES]
        return cls(sum(ordered) / len(ordered) * 1000, *found)


def percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation between the two nearest of a sorted, non-empty sequence."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Report:
    """All that a run showed. Failed requests count nowhere but in `failures`."""

    completed: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None
    """From sending to the first text."""
    itl_ms: Spread | None
    """Between two pieces of text."""
    tpot_ms: Spread | None
    """Per output token after the first; one number a request."""
    e2e_ms: Spread | None
    """From sending to the end of the stream."""


def summarise(outcomes: Sequence[Outcome]) -> Report:
    """The report of all `outcomes`; the clock runs from the first start to the last end."""
    good = [one for one in outcomes if one.failure is None]
    failures = Counter(one.failure for one in outcomes if one.failure is not None)
    duration_s = 0.0
    if outcomes:
        duration_s = max(one.ended for one in outcomes) - min(one.started for one in outcomes)
    prompt_tokens = sum(one.prompt_tokens for one in good)
    output_tokens = sum(one.output_tokens for one in good)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Report(
        completed=len(good),
        failures=dict(failures),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        ttft_ms=Spread.of([one.arrivals[0] - one.started for one in good]),
        itl_ms=Spread.of(
            [
                later - earlier
                for one in good
                for earlier, later in zip(one.arrivals, one.arrivals[1:], strict=False)
            ]
        ),
        tpot_ms=Spread.of(
            [
                (one.arrivals[-1] - one.arrivals[0]) / (one.output_tokens - 1)
                for one in good
                if one.output_tokens > 1
            ]
        ),
        e2e_ms=Spread.of([one.ended - one.started for one in good]),
    )


def as_text(report: Report) -> str:
    """A table for a terminal."""
    failed = sum(report.failures.values())
    lines = [
        f"{'Requests':<28}{report.completed} completed, {failed} failed",
        f"{'Duration':<28}{report.duration_s:.2f} s",
        f"{'Prompt tokens':<28}{report.prompt_tokens}",
        f"{'Output tokens':<28}{report.output_tokens}",
        f"{'Requests a second':<28}{report.requests_per_s:.2f}",
        f"{'Output tokens a second':<28}{report.output_tokens_per_s:.1f}",
        f"{'All tokens a second':<28}{report.total_tokens_per_s:.1f}",
        "",
        f"{'milliseconds':<28}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    rows = (
        ("Time to first token", report.ttft_ms),
        ("Inter-token latency", report.itl_ms),
        ("Time per output token", report.tpot_ms),
        ("End to end", report.e2e_ms),
    )
    for name, spread in rows:
        if spread is None:
            lines.append(f"{name:<28}{'-':>10}")
        else:
            numbers = (spread.mean, spread.p50, spread.p90, spread.p99)
            lines.append(f"{name:<28}" + "".join(f"{number:>10.2f}" for number in numbers))
    lines += [f"failed {count} x {reason}" for reason, count in report.failures.items()]
    return "\n".join(lines)


def as_dict(report: Report) -> dict[str, object]:
    """For JSON."""
    return asdict(report)

"""The report of a run: percentiles, throughput, failures; as a table and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from server.cli.bench.openai import Outcome

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Distribution | None":
        """None without values."""
        if not seconds:
            return None
        milliseconds = np.asarray(seconds) * 1000
        return cls(float(milliseconds.mean()), *np.percentile(milliseconds, PERCENTILES).tolist())


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a run. Failed requests count only in `failures`."""

    completed: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Distribution | None
    """From sending the request to the first text."""
    itl_ms: Distribution | None
    """Between two chunks with text."""
    tpot_ms: Distribution | None
    """Mean per output token after the first; one value per request."""
    e2e_ms: Distribution | None
    """From sending the request to the end of the stream."""


def summarise(outcomes: Sequence[Outcome]) -> Report:
    """The report of `outcomes`; the duration is from the first start to the last end."""
    completed = [outcome for outcome in outcomes if outcome.failure is None]
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    duration_s = 0.0
    if outcomes:
        duration_s = max(outcome.ended for outcome in outcomes) - min(
            outcome.started for outcome in outcomes
        )
    prompt_tokens = sum(outcome.prompt_tokens for outcome in completed)
    output_tokens = sum(outcome.output_tokens for outcome in completed)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Report(
        completed=len(completed),
        failures=dict(failures),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(completed) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        ttft_ms=Distribution.of([outcome.arrivals[0] - outcome.started for outcome in completed]),
        itl_ms=Distribution.of(
            [
                later - earlier
                for outcome in completed
                for earlier, later in zip(outcome.arrivals, outcome.arrivals[1:], strict=False)
            ]
        ),
        tpot_ms=Distribution.of(
            [
                (outcome.arrivals[-1] - outcome.arrivals[0]) / (outcome.output_tokens - 1)
                for outcome in completed
                if outcome.output_tokens > 1
            ]
        ),
        e2e_ms=Distribution.of([outcome.ended - outcome.started for outcome in completed]),
    )


def as_text(report: Report) -> str:
    """The report as a table."""
    failed = sum(report.failures.values())
    lines = [
        f"{'Requests':<28}{report.completed} completed, {failed} failed",
        f"{'Duration':<28}{report.duration_s:.2f} s",
        f"{'Prompt tokens':<28}{report.prompt_tokens}",
        f"{'Output tokens':<28}{report.output_tokens}",
        f"{'Requests per second':<28}{report.requests_per_s:.2f}",
        f"{'Output tokens per second':<28}{report.output_tokens_per_s:.1f}",
        f"{'Total tokens per second':<28}{report.total_tokens_per_s:.1f}",
        "",
        f"{'milliseconds':<28}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    rows = (
        ("Time to first token", report.ttft_ms),
        ("Inter-token latency", report.itl_ms),
        ("Time per output token", report.tpot_ms),
        ("End to end", report.e2e_ms),
    )
    for name, distribution in rows:
        if distribution is None:
            lines.append(f"{name:<28}{'-':>10}")
        else:
            numbers = (distribution.mean, distribution.p50, distribution.p90, distribution.p99)
            lines.append(f"{name:<28}" + "".join(f"{number:>10.2f}" for number in numbers))
    lines += [f"failed {count} x {reason}" for reason, count in report.failures.items()]
    return "\n".join(lines)


def as_dict(report: Report) -> dict[str, object]:
    """The report for JSON."""
    return asdict(report)

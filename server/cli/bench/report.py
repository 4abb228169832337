"""Report of a benchmark: percentiles, throughput and failures, as a table and as JSON."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from server.cli.bench.openai import Outcome

PERCENTILES = (50, 90, 99)
METRICS = {
    "ttft": "Time to first token",
    "itl": "Inter-token latency",
    "tpot": "Time per output token",
    "e2el": "End to end",
}
"""vLLM's name of a metric -> its name in the table."""

Distribution = dict[str, float]
"""Mean and percentiles (p50, ...) in milliseconds."""


def distribution(
    seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES
) -> Distribution | None:
    """Mean and percentiles of `seconds`, in milliseconds; None if `seconds` is empty."""
    if not seconds:
        return None
    milliseconds = np.asarray(seconds) * 1000
    points = np.percentile(milliseconds, percentiles).tolist()
    names = [f"p{percentile:g}" for percentile in percentiles]
    return {"mean": float(milliseconds.mean()), **dict(zip(names, points, strict=True))}


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a benchmark. Failed requests count only in `failures` and `duration_s`."""

    completed: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Distribution | None
    """Time from sending the request to the first text."""
    itl_ms: Distribution | None
    """Time between consecutive chunks with text."""
    tpot_ms: Distribution | None
    """Mean time per output token after the first, one value per request."""
    e2e_ms: Distribution | None
    """Time from sending the request to the end of the stream."""


def summarise(outcomes: Sequence[Outcome], percentiles: Sequence[float] = PERCENTILES) -> Report:
    """Summarize `outcomes`; the duration is from the first start to the last end."""
    completed = [outcome for outcome in outcomes if outcome.failure is None]
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    duration_s = 0.0
    if outcomes:
        duration_s = max(outcome.ended for outcome in outcomes) - min(
            outcome.started for outcome in outcomes
        )
    prompt_tokens = sum(outcome.prompt_tokens for outcome in completed)
    output_tokens = sum(outcome.output_tokens for outcome in completed)
    times = partial(distribution, percentiles=percentiles)
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
        ttft_ms=times([outcome.arrivals[0] - outcome.started for outcome in completed]),
        itl_ms=times(
            [
                later - earlier
                for outcome in completed
                for earlier, later in zip(outcome.arrivals, outcome.arrivals[1:], strict=False)
            ]
        ),
        tpot_ms=times(
            [
                (outcome.arrivals[-1] - outcome.arrivals[0]) / (outcome.output_tokens - 1)
                for outcome in completed
                if outcome.output_tokens > 1
            ]
        ),
        e2e_ms=times([outcome.ended - outcome.started for outcome in completed]),
    )


def as_text(report: Report, metrics: Collection[str] = tuple(METRICS)) -> str:
    """Report as a table with the times in `metrics`."""
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
    ]
    times = (report.ttft_ms, report.itl_ms, report.tpot_ms, report.e2e_ms)
    columns = next((list(time) for time in times if time), ["mean"])
    lines.append(f"{'milliseconds':<28}" + "".join(f"{name:>10}" for name in columns))
    for (metric, name), found in zip(METRICS.items(), times, strict=True):
        if metric in metrics:
            cells = [f"{number:>10.2f}" for number in found.values()] if found else [f"{'-':>10}"]
            lines.append(f"{name:<28}" + "".join(cells))
    lines += [f"failed {count} x {reason}" for reason, count in report.failures.items()]
    return "\n".join(lines)


def as_dict(report: Report) -> dict[str, object]:
    """Report as JSON fields."""
    return asdict(report)

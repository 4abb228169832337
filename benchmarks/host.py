"""Cost of the engine with a simulated device: time from a result to the next plan by batch size,
waiting queue and context; device utilization; admission; a long run.

    python benchmarks/host.py --json host.json --markdown host.md
"""

import argparse
import asyncio
import datetime
import json
import sys
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.host_processes import watch_steps
from benchmarks.host_rig import watch_admission, watch_decodes, watch_growth
from benchmarks.machine import machine

ROWS = (1, 8, 64, 256, 1024)
WAITING = (0, 1_000, 100_000)
CONTEXTS = (1_024, 8_192, 32_768, 131_072)
GOAL_US = {256: 400, 1024: 1500}
GOAL_BUSY = {5.0: 0.99, 1.0: 0.90}
Numbers = dict[str, float]


def cases() -> list[tuple[int, int, int]]:
    """Cases (batch size, waiting requests, context): each value varies alone; the defaults are 0
    waiting requests and 1,024 tokens."""
    found = [(rows, 0, CONTEXTS[0]) for rows in ROWS]
    for rows in GOAL_US:
        found += [(rows, waiting, CONTEXTS[0]) for waiting in WAITING[1:]]
        found += [(rows, 0, context) for context in CONTEXTS[1:]]
    return found


def measure_steps(num_steps: int, repeats: int) -> list[Numbers]:
    """Microseconds from a result to the next plan, and the ratio to the same batch without a
    waiting queue or a long context. Wall time is the minimum of all repeats, since other work may
    use the machine; CPU times come from the repeat with the lowest median."""
    found: list[Numbers] = []
    for rows, waiting, context in cases():
        runs = [watch_decodes(rows, waiting, context, num_steps) for _ in range(repeats)]
        best = min(runs, key=lambda times: median(times.cpu))
        cpu = sorted(best.cpu)
        numbers: Numbers = {"rows": rows, "waiting": waiting, "context": context}
        numbers["wall_us"] = min(median(times.wall) for times in runs) * 1e6
        numbers["cpu_us"] = median(cpu) * 1e6
        numbers["cpu_p99_us"] = cpu[len(cpu) * 99 // 100] * 1e6
        plain = next((entry for entry in found if entry["rows"] == rows), numbers)
        numbers["ratio"] = numbers["cpu_us"] / plain["cpu_us"]
        found.append(numbers)
        _log(f"batch {rows}, {waiting} waiting, context {context}: {numbers['cpu_us']:.0f} us")
    return found


def measure_overlap(repeats: int) -> list[Numbers]:
    """Device utilization with real processes: the maximum of all repeats."""
    found: list[Numbers] = []
    for rows, step_ms in ((256, 5.0), (256, 1.0), (1024, 5.0)):
        runs = [
            asyncio.run(watch_steps(rows, step_ms / 1e3, int(4000 / step_ms))).seconds
            for _ in range(repeats)
        ]
        least = min(mean(seconds) for seconds in runs)
        numbers: Numbers = {"rows": rows, "step_ms": step_ms}
        numbers["busy"] = step_ms / 1e3 / least
        numbers["busy_median_step"] = step_ms / 1e3 / min(median(seconds) for seconds in runs)
        found.append(numbers)
        _log(f"batch {rows}, {step_ms} ms per step: busy {numbers['busy']:.1%}")
    return found


def measure_rest(growth_steps: int) -> Numbers:
    """Admission of 10,000 requests of 1,000 tokens, and a run of `growth_steps` steps."""
    admission = watch_admission(10_000, 1_000)
    _log(
        f"10,000 requests queued in {admission.queue_s:.2f} s, aborted in {admission.abort_s:.2f} s"
    )
    growth = watch_growth(growth_steps)
    return {
        "queue_s": admission.queue_s,
        "abort_s": admission.abort_s,
        "growth_steps": growth_steps,
        "early_us": growth.early_s * 1e6,
        "late_us": growth.late_s * 1e6,
        "growth_mib": growth.resident / 2**20,
    }


def markdown(steps: list[Numbers], overlap: list[Numbers], rest: Numbers) -> str:
    """All tables, with date and machine."""
    lines = [
        f"# The host's part, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/host.py`, {machine()}.",
        "Simulated device; prefix cache on.",
        "",
        "From a result to the next plan, including the encoding of messages: medians.",
        "",
        "| batch | waiting | context | us | CPU us | 99th percentile | ratio to the base case "
        "| goal |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for step in steps:
        most = GOAL_US.get(int(step["rows"]))
        lines.append(
            f"| {step['rows']:.0f} | {step['waiting']:.0f} | {step['context']:.0f} | "
            f"{step['wall_us']:.0f} | {step['cpu_us']:.0f} | {step['cpu_p99_us']:.0f} | "
            f"{step['ratio']:.2f} | {f'under {most} us' if most else ''} |"
        )
    lines += ["", "| batch | device's step | busy | in the median step | goal |"]
    lines += ["| ---: | ---: | ---: | ---: | --- |"]
    for item in overlap:
        least = GOAL_BUSY[item["step_ms"]] if item["rows"] == 256 else None
        lines.append(
            f"| {item['rows']:.0f} | {item['step_ms']:g} ms | {item['busy']:.1%} | "
            f"{item['busy_median_step']:.1%} | {f'at least {least:.0%}' if least else ''} |"
        )
    lines += [
        "",
        "| what | measured | goal |",
        "| --- | ---: | --- |",
        f"| 10,000 requests of 1,000 tokens decoded, hashed and queued | {rest['queue_s']:.2f} s "
        "| under 2 s |",
        f"| all of them aborted | {rest['abort_s']:.3f} s | under 1 s |",
        f"| a step in the first and last tenth of {rest['growth_steps']:,.0f} | "
        f"{rest['early_us']:.0f} us, {rest['late_us']:.0f} us | no growth |",
        f"| growth of resident memory | {rest['growth_mib']:+.1f} MiB | no growth |",
    ]
    return "\n".join(lines) + "\n"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="measured steps per case")
    parser.add_argument(
        "--repeats", type=int, default=3, help="repeats per case; the minimum counts"
    )
    parser.add_argument("--growth-steps", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    steps = measure_steps(arguments.steps, arguments.repeats)
    overlap = measure_overlap(arguments.repeats)
    rest = measure_rest(arguments.growth_steps)
    table = markdown(steps, overlap, rest)
    print(table, end="")
    if arguments.markdown:
        arguments.markdown.write_text(table)
    if arguments.json:
        found = {"date": datetime.date.today().isoformat(), "machine": machine()}
        text = json.dumps({**found, "steps": steps, "overlap": overlap, "rest": rest}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Compares servers under the same load on one machine; writes a table with ratios.

    python benchmarks/compare.py --out benchmarks/results/cpu \
        --server 'gaudiserve=gaudiserve serve demo --max-model-len 2048 --port {port}' \
        --server 'other=other-server --port {port}' --flags 'other=--no-ignore-eos'

Each server is started by its command, loaded by `gaudiserve bench serve`, and stopped before the
next one starts. With `--turns` all servers run at once, and each load is sent to one server after
the other. Use it for two versions of a server whose difference is smaller than the machine's drift
between two runs. Run nothing else at the same time. Writes OUT.json and OUT.md after each server,
or with `--turns` once. A server that does not start is reported and skipped, and the exit status is
1. With `--weights` and the model's folder, the report has a table with the upper bound of the
machine's memory and matrix products (`bound.py`).
"""

import argparse
import datetime
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bound import Rates, least_first_token_ms, least_seconds, machine_rates, read_weights
from benchmarks.machine import machine
from benchmarks.started import NotStarted, started


@dataclass(frozen=True)
class Workload:
    """Requests of the same shape; lengths in tokens."""

    name: str
    prompt: int
    output: int
    concurrency: int
    requests: int
    shared: int = 0

    @property
    def flags(self) -> list[str]:
        return [
            f"--random-input-len={self.prompt}",
            f"--random-output-len={self.output}",
            f"--max-concurrency={self.concurrency}",
            f"--num-prompts={self.requests}",
            f"--shared-prefix-len={self.shared}",
            "--num-warmups=2",
        ]


WORKLOADS = [
    Workload("128/128, 1 stream", 128, 128, 1, 4),
    Workload("128/128, 8 streams", 128, 128, 8, 16),
    Workload("128/128, 32 streams", 128, 128, 32, 64),
    Workload("1024/16, 4 streams", 1024, 16, 4, 12),
    Workload("1024 shared + 32/32, 8 streams", 32, 32, 8, 32, shared=1024),
    Workload("first token, 8 at once", 128, 16, 8, 8),
    Workload("first token, 32 at once", 128, 16, 32, 32),
]
QUICK_OUTPUT = 32


def quick(workload: Workload) -> Workload:
    """`workload` with shorter outputs and one request per stream."""
    output = min(workload.output, QUICK_OUTPUT)
    return replace(workload, output=output, requests=workload.concurrency)


@dataclass
class Measured:
    """Results of a server: medians over the rounds."""

    name: str
    command: str
    start_s: float = 0.0
    idle_mib: float = 0.0
    output_tokens_s: dict[str, float] = field(default_factory=dict)
    first_token_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Medians of each run's 50th and 99th percentile."""
    runs: list[dict[str, object]] = field(default_factory=list)


class Running(NamedTuple):
    """A started server."""

    measured: Measured
    port: int
    flags: list[str]
    """Flags of `bench serve` for this server."""


def main() -> int:
    options = _options()
    flags = dict(argument.split("=", 1) for argument in options.flags)
    chosen = [w for w in WORKLOADS if not options.only or any(o in w.name for o in options.only)]
    if options.quick:
        chosen = [quick(workload) for workload in chosen]
    rates = [machine_rates()] if options.weights else []
    measured: list[Measured] = []
    left_out, report = 0, "nothing was measured"
    groups = [options.server] if options.turns else [[server] for server in options.server]
    for group in groups:
        with ExitStack() as stack:
            running: list[Running] = []
            for argument in group:
                name, command = argument.split("=", 1)
                try:
                    extra = shlex.split(flags.get(name, ""))
                    running.append(_start(stack, Measured(name, command), extra))
                except NotStarted as error:
                    print(f"{name}: {error}; left out", file=sys.stderr, flush=True)
                    left_out += 1
            _load_all(running, chosen, options.rounds)
        measured += [server.measured for server in running]
        if options.weights:
            rates.append(machine_rates())
        if measured:
            report = _markdown(measured, chosen, options.rounds)
            if options.weights:
                report += _bounds(measured[0], chosen, options.weights, rates)
            _write(Path(options.out), measured, report)
    print(report)
    return 1 if left_out else 0


def _write(out: Path, measured: list[Measured], report: str) -> None:
    """Write the results so far, so that a later failure or interrupt does not lose them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(report)
    facts = {"machine": machine(), "date": _today(), "servers": [asdict(m) for m in measured]}
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--flags", action="append", default=[], metavar="NAME=BENCH_FLAGS")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS_OF_A_WORKLOAD")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="short outputs, one request per stream"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FOLDER", help="show the machine's limit for these weights"
    )
    parser.add_argument(
        "--turns", action="store_true", help="run all servers, measure them in turn"
    )
    parser.add_argument("--out", required=True, metavar="PATH")
    return parser.parse_args()


def _start(stack: ExitStack, measured: Measured, extra: list[str]) -> Running:
    named = [flag.partition("=")[2] for flag in extra if flag.startswith("--model=")]
    server = stack.enter_context(started(measured.command, named[0] if named else None))
    measured.start_s = server.start_s
    measured.idle_mib = resident_mib(server.pid)
    return Running(measured, server.port, extra)


def _load_all(running: list[Running], workloads: list[Workload], rounds: int) -> None:
    # Each run gets new prompts: a repeated prompt may still be in a prefix cache.
    loads = [workload for _ in range(rounds) for workload in workloads]
    for seed, workload in enumerate(loads):
        # Reverse the order in every other round, so that no server always runs first.
        for server in running if seed // len(workloads) % 2 else reversed(running):
            flags = [f"--seed={seed}", *server.flags]
            measured = server.measured
            measured.runs.append(load(measured.name, server.port, workload, flags))
    for measured in (server.measured for server in running):
        for workload in workloads:
            runs = [run for run in measured.runs if run["workload"] == workload.name]
            rates = [float(str(run["rate"])) for run in runs]
            measured.output_tokens_s[workload.name] = statistics.median(rates)
            p50, p99 = (
                statistics.median(_first_token_ms(run, name) for run in runs)
                for name in ("p50", "p99")
            )
            measured.first_token_ms[workload.name] = p50, p99


def load(name: str, port: int, workload: Workload, extra: list[str]) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "server.cli.main",
                "bench",
                "serve",
                f"--base-url=http://127.0.0.1:{port}",
                f"--json={out.name}",
                "--quiet",
                *workload.flags,
                *extra,
            ],
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],
        )
        text = Path(out.name).read_text()
        numbers = json.loads(text) if text else {"exit_code": done.returncode}
    # A server that failed every request has no rate; the table still shows the other servers.
    rate = float(numbers.get("output_tokens_per_s", 0.0))
    print(f"{name}: {workload.name}: {rate:.1f} output tokens/s", file=sys.stderr, flush=True)
    return {"workload": workload.name, "rate": rate, **numbers}


def _first_token_ms(run: dict[str, object], percentile: str) -> float:
    """Infinity if no request was answered."""
    numbers = run.get("ttft_ms")
    return float(numbers[percentile]) if isinstance(numbers, dict) else math.inf


def resident_mib(pid: int) -> float:
    """Proportional set size (PSS) of a process and all its descendants."""
    total = 0.0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            total += int(line.split()[1]) / 1024
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        total += sum(resident_mib(int(child)) for child in task.read_text().split())
    return total


def _markdown(measured: list[Measured], workloads: list[Workload], rounds: int) -> str:
    first = measured[0]
    head = "| workload (prompt/output tokens) | " + " | ".join(m.name for m in measured) + " |"
    lines = [
        f"Output tokens per second, median of {rounds}; in brackets the ratio to {first.name}.",
        f"{_today()}, {machine()}.",
        "",
        head,
        "| --- |" + " --- |" * len(measured),
    ]
    for workload in workloads:
        rates = [m.output_tokens_s[workload.name] for m in measured]
        cells = [f"{rate:.1f} ({rate / (rates[0] or 1):.2f})" for rate in rates]
        lines.append(f"| {workload.name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Milliseconds to the first token, 50th / 99th percentile, median of {rounds}.",
        "",
    ]
    lines += [head, "| --- |" + " --- |" * len(measured)]
    for workload in workloads:
        pairs = [m.first_token_ms[workload.name] for m in measured]
        cells = [f"{p50:.0f} / {p99:.0f}" for p50, p99 in pairs]
        lines.append(f"| {workload.name} | " + " | ".join(cells) + " |")
    starts = " | ".join(f"{m.start_s:.1f} s" for m in measured)
    idle = " | ".join(f"{m.idle_mib:.0f} MiB" for m in measured)
    lines += [f"| start to first answer | {starts} |", f"| memory, idle | {idle} |", ""]
    lines += [f"- {m.name}: `{m.command}`" for m in measured]
    return "\n".join(lines) + "\n"


def _bounds(first: Measured, workloads: list[Workload], folder: Path, rates: list[Rates]) -> str:
    """Table of the machine's bounds at the mean of `rates`, and the share of them that the first
    server reaches."""
    weights = read_weights(folder)
    mean = Rates(
        statistics.fmean(rate.reads for rate in rates),
        statistics.fmean(rate.multiplies for rate in rates),
    )
    lines = [
        "",
        f"Bound of this machine, which reads {mean.reads / 1e9:.1f} GB/s and does "
        f"{mean.multiplies / 1e9:.0f} billion multiplications a second; in brackets what "
        f"{first.name} reaches of it.",
        "",
        "| workload | output tokens a second | first token, median / last, ms |",
        "| --- | --- | --- |",
    ]
    for workload in workloads:
        seconds = least_seconds(
            weights,
            mean,
            prompt=workload.prompt,
            output=workload.output,
            streams=workload.concurrency,
            requests=workload.requests,
        )
        rate = workload.requests * workload.output / seconds
        share = first.output_tokens_s[workload.name] / rate
        p50, last = least_first_token_ms(
            weights, mean, prompt=workload.prompt, requests=workload.concurrency
        )
        reached = p50 / first.first_token_ms[workload.name][0]
        lines.append(
            f"| {workload.name} | {rate:.1f} ({share:.0%}) | {p50:.0f} / {last:.0f} "
            f"({reached:.0%}) |"
        )
    return "\n".join(lines) + "\n"


def _today() -> str:
    return datetime.date.today().isoformat()


if __name__ == "__main__":
    sys.exit(main())

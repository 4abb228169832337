"""Resident memory of each process of a server, idle and while streams run.

    python benchmarks/memory.py --json memory.json --markdown memory.md

Starts the server, reads its metrics after the first answer, and then each second while
`gaudiserve bench serve` runs the streams; the maximum of each process counts. Other work on the
machine does not change the sizes.
"""

import argparse
import datetime
import json
import re
import shlex
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compare import WORKLOADS, load, resident_mib
from benchmarks.machine import machine
from benchmarks.started import started

SIZE = re.compile(r'^gaudiserve:process_resident_memory_bytes\{process="([^"]+)"\} (\S+)$', re.M)
PARTS = {"weights": "hpu_weights_bytes", "KV cache when full": "hpu_kv_cache_bytes"}
"""Part of the engine's memory -> its metric."""
SAMPLE_S = 1.0
MIB = 2**20
TOTAL = "all, shared pages once"
WORKLOAD = next(workload for workload in WORKLOADS if workload.name == "128/128, 8 streams")

Sizes = dict[str, float]
"""MiB by name."""


def process_sizes(page: str) -> Sizes:
    """Resident MiB of each process, from a page of metrics."""
    return {name: float(size) / MIB for name, size in SIZE.findall(page)}


def part_sizes(page: str) -> Sizes:
    """MiB of each part of the engine's memory that a page of metrics shows."""
    sizes = {}
    for part, metric in PARTS.items():
        values = re.findall(rf"^{metric}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        if values:
            sizes[part] = sum(map(float, values)) / MIB
    return sizes


class Peak:
    """Maximum size of each process, and of all of them together, over several readings."""

    def __init__(self, pid: int, port: int) -> None:
        self.sizes: Sizes = {}
        self._pid, self._port = pid, port

    def read(self) -> None:
        sizes = process_sizes(metrics(self._port))
        # A child process may end while its sizes are read; the next reading counts then.
        with suppress(OSError):
            sizes[TOTAL] = resident_mib(self._pid)
        for name, size in sizes.items():
            self.sizes[name] = max(size, self.sizes.get(name, 0.0))

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Read the sizes each second, and once at the end."""
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLE_S):
                self.read()

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        self.read()


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def measure(command: str) -> dict[str, Sizes]:
    """Sizes of the server of `command`: idle, under load, and of the parts of the engine."""
    with started(command) as server:
        idle, loaded = (Peak(server.pid, server.port) for _ in range(2))
        idle.read()
        parts = part_sizes(metrics(server.port))
        with loaded.sampled():
            numbers = load("gaudiserve", server.port, WORKLOAD, [])
        if not numbers["rate"]:
            raise SystemExit(f"{WORKLOAD.name}: no request was answered")
    return {"idle": idle.sizes, "loaded": loaded.sizes, "parts": parts}


def markdown(data: Mapping[str, Any]) -> str:
    """The tables of a measurement, from the content of its JSON file."""
    idle, loaded = data["idle"], data["loaded"]
    lines = [
        f"# Memory by process, {data['date']}",
        "",
        f"`python benchmarks/memory.py`, {data['machine']}. The server: `{data['command']}`.",
        "",
        "Resident MiB of each process after the first answer, and the maximum while "
        f"{data['streams']} streams of {WORKLOAD.prompt} prompt and {WORKLOAD.output} output "
        f"tokens run. Pages that processes share count in each row except `{TOTAL}`.",
        "",
        f"| process | idle | {data['streams']} streams |",
        "| --- | ---: | ---: |",
    ]
    # The sort is stable, so only the sum moves to the end.
    names = sorted(loaded, key=lambda name: name == TOTAL)
    lines += [f"| {name} | {idle.get(name, 0):.0f} | {loaded[name]:.0f} |" for name in names]
    lines += ["", "| part of the engine | MiB |", "| --- | ---: |"]
    lines += [f"| {name} | {size:.0f} |" for name, size in data["parts"].items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flags", default="", help="more flags of the server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    serve = f"serve demo --port {{port}} {options.flags}".strip()
    found = measure(f"{shlex.quote(sys.executable)} -m server.cli.main {serve}")
    about = {"date": datetime.date.today().isoformat(), "machine": machine()}
    command = {"command": f"gaudiserve {serve}", "streams": WORKLOAD.concurrency}
    data = {**about, **command, **found}
    table = markdown(data)
    print(table, end="")
    if options.markdown:
        options.markdown.write_text(table)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

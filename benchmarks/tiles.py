"""Time of AMX tile products on one thread, alone and with the loads of a matmul's inner loop, with
and without zeroing tiles after their last use.

    python benchmarks/tiles.py --json tiles.json --markdown tiles.md

Other machines' threads on the same core change all times, so each round measures all kinds within a
few milliseconds, and rounds are grouped by the time of products alone at their start and end.
"""

import argparse
import ctypes
import datetime
import json
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels import compiled
from benchmarks.machine import machine

SOURCE = Path(__file__).with_name("tiles.cpp")
KINDS = ("products alone", "loads alone", "products with loads", "products with loads and zeros")
"""Kinds of measurement, in the order of tiles.cpp."""
STEPS, PER_STEP = 200, 4
SLOW_NS = 13.0
"""Between two states of a core: a product alone took 7 to 9 ns or 18 to 20 ns."""


def measure(folder: Path, rounds: int) -> dict[str, list[list[float]]]:
    """Nanoseconds per product (or load) of each kind in each round, by the state of the core."""
    code = ctypes.CDLL(str(compiled(SOURCE, folder / "tiles.so")))
    code.run.restype = ctypes.c_double

    def nanoseconds(kind: int) -> float:
        seconds = float(code.run(ctypes.c_int64(kind), ctypes.c_int64(STEPS)))
        return seconds / (STEPS * PER_STEP) * 1e9

    found: dict[str, list[list[float]]] = {"free": [], "shared": []}
    for _ in range(rounds):
        times = [nanoseconds(kind) for kind in range(len(KINDS))]
        is_slow = [time > SLOW_NS for time in (times[0], nanoseconds(0))]
        if is_slow[0] == is_slow[1]:
            found["shared" if is_slow[0] else "free"].append(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(temporary), arguments.rounds)
    title = f"{datetime.date.today()}, {machine()}, one thread, {arguments.rounds} rounds."
    head = " | ".join(f"{state} core, {len(rows)} rounds" for state, rows in found.items())
    lines = [title, "", f"| ns per product or load (quartiles) | {head} |", "| --- | ---: | ---: |"]
    data: dict[str, dict[str, list[float]]] = {}
    for kind, name in enumerate(KINDS):
        cells = []
        for state, rows in found.items():
            times = [row[kind] for row in rows]
            if len(times) < 2:
                cells.append("not seen")
                continue
            first, _, third = quantiles(times)
            cells.append(f"{median(times):.1f} ({first:.1f} to {third:.1f})")
            data.setdefault(name, {})[state] = [median(times), first, third]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"title": title, "ns: median, quartiles": data}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

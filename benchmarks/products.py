"""Read bandwidth of the CPU's matrix products: compiled kernels and PyTorch's packed product in
alternating runs, with more weights than the caches hold.

    python benchmarks/products.py --json products.json --markdown products.md

The shapes come from the demo model. For comparison, the same threads also only read memory, which
is the maximum.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import machine
from hpu.backends.cpu import CpuBackend
from hpu.native.library import Library, PackedLinear, kernel_folder, open_library
from hpu.ops.cpu import packed_linear

SHAPES = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
"""(outputs, inputs)"""
BYTES = 120 << 20
"""Bytes of weights per shape; should exceed the last-level cache."""

Product = Callable[[Tensor], Tensor]


def products(shape: tuple[int, int], library: Library | None) -> list[Product]:
    """Products whose packed weights together have about BYTES, with the kernels of `library`; None:
    PyTorch's packed product."""
    outputs, inputs = shape
    layers: list[Product] = []
    for _ in range(max(1, BYTES // (2 * outputs * inputs))):
        weight = torch.randn(outputs, inputs).bfloat16()
        layers.append(
            packed_linear(weight, None) if library is None else PackedLinear(library, weight, None)
        )
    return layers


def rates(kinds: Sequence[Sequence[Product]], x: Tensor, size: int, rounds: int) -> list[float]:
    """Median GB/s of each kind of product, whose weights have `size` bytes; the kinds alternate."""
    seconds: list[list[float]] = [[] for _ in kinds]
    for _ in range(rounds):
        for kind, times in zip(kinds, seconds, strict=True):
            start = time.perf_counter()
            for product in kind:
                product(x)
            times.append((time.perf_counter() - start) / len(kind))
    return [size / median(times[1:]) / 1e9 for times in seconds]


def reading_rate(rounds: int) -> float:
    """GB/s at which a sum reads an array in memory."""
    memory = torch.zeros(BYTES // 8, dtype=torch.int64)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - start)
    return BYTES / median(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    CpuBackend()  # Sets the number of threads as in the server
    threads = torch.get_num_threads()
    library = open_library(kernel_folder(None), threads)
    if library is None:
        raise SystemExit("the kernels are not available on this machine")
    found = []
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            kinds = [products(shape, library), products(shape, None)]
            for rows in arguments.rows:
                x = torch.randn(rows, shape[1]).bfloat16()
                ours, theirs = rates(kinds, x, 2 * shape[0] * shape[1], arguments.rounds)
                memory = reading_rate(arguments.rounds)
                found.append(
                    {"product": name, "rows": rows, "ours": ours, "torch": theirs, "read": memory}
                )
                print(f"{name}, {rows} rows: {ours:.1f} GB/s, PyTorch {theirs:.1f}", flush=True)
    lines = [
        f"{datetime.date.today()}, {machine()}, {threads} threads. GB/s of weights in bfloat16.",
        "",
        "| product | rows | compiled kernels | PyTorch's packed product | ratio | memory read |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['product']} {SHAPES[str(row['product'])]} | {row['rows']} | {row['ours']:.1f} "
        f"| {row['torch']:.1f} | {float(row['ours']) / float(row['torch']):.2f} "
        f"| {row['read']:.1f} |"
        for row in found
    ]
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rates": found}, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(table)


if __name__ == "__main__":
    main()

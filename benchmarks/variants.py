"""CPU time of the variants of two settings, --block-softmax and --handle-topk-duplicates, in
alternating rounds on one thread of this machine. The figures say nothing about a card, where the
same operations have other costs.

    python benchmarks/variants.py --json variants.json --markdown variants.md
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import machine
from hpu.ops.block_softmax import REFERENCES, Blocks
from hpu.sampling.filters import cut, ties_of, top_k_by_sort

HEADS = 32
BLOCKS_OF_A_SEQUENCE = 16
TOP_K = 50
VOCABULARIES = (32_000, 151_936)
MICROSECONDS = 1e6
Figures = dict[str, float]


def fastest(variants: Mapping[str, Callable[[], object]], repeats: int) -> Figures:
    """Microseconds of CPU time of each variant: the minimum of `repeats` alternating rounds, after
    a round that is not counted."""
    best = dict.fromkeys(variants, float("inf"))
    for number in range(repeats + 1):
        for name, run in variants.items():
            start = time.thread_time()
            run()
            if number:
                best[name] = min(best[name], (time.thread_time() - start) * MICROSECONDS)
    return best


def softmax_variants(num_rows: int) -> dict[str, Callable[[], object]]:
    """Softmax references of a decode of `num_rows` sequences, by the values of --block-softmax."""
    rows = torch.arange(num_rows).repeat_interleave(BLOCKS_OF_A_SEQUENCE)
    mapping = (torch.arange(num_rows).unsqueeze(1) == rows).float()
    blocks = Blocks(torch.randn(len(rows), HEADS), rows, mapping)
    return {name: partial(kind.of, blocks) for name, kind in REFERENCES.items()}


def top_k_variants(num_rows: int, vocab_size: int) -> dict[str, Callable[[], object]]:
    """Top-k of `num_rows` rows with the ties of the k-th token kept, or cut."""
    weights = torch.rand(num_rows, vocab_size)
    top_k = torch.full((num_rows, 1), TOP_K)

    def filtered(*, keeps: bool) -> object:
        left = ties_of(keeps=keeps)(weights, top_k, TOP_K)
        return cut(left, top_k_by_sort(left, top_k, TOP_K))

    return {
        "true (ties kept)": lambda: filtered(keeps=True),
        "false (exactly k)": lambda: filtered(keeps=False),
    }


def table(setting: str, columns: Mapping[str, Figures]) -> list[str]:
    found = [
        f"| {setting} | {' | '.join(columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    for name in next(iter(columns.values())):
        cells = " | ".join(f"{figures[name]:.0f}" for figures in columns.values())
        found.append(f"| `{name.split()[0]}`{name[len(name.split()[0]) :]} | {cells} |")
    return [*found, ""]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 64], help="numbers of sequences"
    )
    parser.add_argument("--repeats", type=int, default=20, help="repeats; the minimum counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    softmax = {
        f"rows {rows}": fastest(softmax_variants(rows), options.repeats) for rows in options.rows
    }
    top_k = {
        f"rows {rows}, vocabulary {size}": fastest(top_k_variants(rows, size), options.repeats)
        for rows in options.rows
        for size in VOCABULARIES
    }
    today = datetime.date.today().isoformat()
    text = "\n".join(
        [
            f"# Variants of the decode softmax and of top-k, {today}",
            "",
            f"`python benchmarks/variants.py`, {machine()}, torch {torch.__version__}.",
            "",
            "Microseconds of CPU time on one thread of this machine: the minimum of "
            f"{options.repeats} alternating rounds. No card was measured.",
            "",
            f"References of one layer's decode, {HEADS} heads, {BLOCKS_OF_A_SEQUENCE} blocks of "
            "each sequence:",
            "",
            *table("`--block-softmax`", softmax),
            f"Top-k of {TOP_K} tokens:",
            "",
            *table("`--handle-topk-duplicates`", top_k),
        ]
    )
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        figures = {"date": today, "machine": machine(), "softmax": softmax, "top_k": top_k}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

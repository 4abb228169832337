"""Padding of fitted buckets and of the other strategies at equal numbers of graphs, on three
synthetic traffics, as a share of modelled work. Run: python benchmarks/buckets_fit.py

Tables are fitted to one half of a traffic and evaluated on the other.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.buckets import BucketConfig
from config.traffic import Lengths, read_traffic
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import BucketLimits

LIMITS = BucketLimits(
    block_size=128,
    max_model_len=16_384,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    max_prefill_batch=4,
    num_blocks=3000,
    prefix_caching=True,
)
RULES = ("exponential", "exponential-v3", "padding-aware")


def chat(rng: random.Random) -> Lengths:
    """Conversations: some hundred tokens per request, half of them with a shared prefix."""
    prompt = _lognormal(rng, 350, 0.9, 6000)
    cached = 512 if rng.random() < 0.5 and prompt > 600 else 0
    return Lengths(prompt, _lognormal(rng, 220, 0.7, 2000), cached)


def long_documents(rng: random.Random) -> Lengths:
    """Summaries: long prompts, short answers."""
    return Lengths(_lognormal(rng, 7000, 0.4, 15_000), _lognormal(rng, 150, 0.5, 1000))


def mixed(rng: random.Random) -> Lengths:
    """Four chats per document."""
    return long_documents(rng) if rng.random() < 0.2 else chat(rng)


def _lognormal(rng: random.Random, median: int, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * rng.lognormvariate(0, sigma))))


def waste(table: BucketTable, traffic: list[Lengths]) -> float:
    """Share of padding in the modelled work, 0 to 1."""
    parts = table.padding(traffic)
    return 1 - sum(p.exact_cost for p in parts) / sum(p.padded_cost for p in parts)


def fitted(traffic: list[Lengths], num_graphs: int) -> tuple[BucketTable, float]:
    """The fitted table, and the fitting time in seconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for one in traffic:
            file.write(
                f'{{"prompt_tokens": {one.prompt_tokens}, "output_tokens": {one.output_tokens}, '
                f'"cached_tokens": {one.cached_tokens}}}\n'
            )
        file.flush()
        assert read_traffic(file.name) == traffic
        start = time.perf_counter()
        config = BucketConfig(strategy="fitted", traffic=file.name, num_graphs=num_graphs)
        table = BucketTable.make(config, LIMITS)
        return table, time.perf_counter() - start


def rows(kind: Callable[[random.Random], Lengths], requests: int) -> list[str]:
    """Markdown rows: one per strategy, and a few small fitted tables."""
    rng = random.Random(kind.__name__)
    seen, later = ([kind(rng) for _ in range(requests)] for _ in range(2))
    name = kind.__name__.replace("_", " ")
    lines = []
    for rule in RULES:
        table = BucketTable.make(BucketConfig(strategy=rule), LIMITS)
        graphs = len(table.buckets)
        chosen, seconds = fitted(seen, graphs)
        lines.append(
            f"| {name} | {rule} | {graphs} | {waste(table, later):.1%} | "
            f"{len(chosen.buckets)} | {waste(chosen, later):.1%} | {seconds:.1f} |"
        )
    for graphs in (100, 50, 25):
        chosen, seconds = fitted(seen, graphs)
        lines.append(
            f"| {name} | - | - | - | {len(chosen.buckets)} | {waste(chosen, later):.1%} | "
            f"{seconds:.1f} |"
        )
    return lines


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, metavar="N")
    requests = parser.parse_args().requests
    print("| traffic | strategy | graphs | padding | fitted graphs | padding | fit, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in (chat, long_documents, mixed):
        print("\n".join(rows(kind, requests)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

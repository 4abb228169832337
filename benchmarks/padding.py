"""Graphs and padding of the default buckets and of vLLM's Gaudi plug-in, on six length
distributions. Pure arithmetic: no device, no server.

    python benchmarks/padding.py --json padding.json --markdown padding.md

The plug-in's rule is stated here from its sources (vllm-project/vllm-gaudi, commit 091bbadd, files
common.py and exponential.py of vllm_gaudi/extension/bucketing; prefill batch 1, prefix caching on):
points of an axis lie in a constant ratio; a launch takes the first bucket in the order of (batch,
query, blocks) that holds it. Both tables get the same launches, from the model of the scheduler in
hpu/bucketing/traffic.py.

Medians of the distributions are near the lengths of public data: chats between ShareGPT (vLLM's
paper: 161 prompt and 338 output tokens on average) and the conversations of the Azure trace of 2023
(1,020 and 129, medians); code with the prompts of that trace (1,500) and longer answers; summaries
of articles of some 2,000 words.
"""

import argparse
import datetime
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.buckets import BucketConfig
from config.traffic import Lengths
from hpu.bucketing.bucket_table import HIT, BucketTable, fallback_point
from hpu.bucketing.cost import launch_cost
from hpu.bucketing.select import GAUDI_STRATEGY
from hpu.bucketing.traffic import Launches, launches_of
from hpu.protocol import DECODE, PREFILL, Bucket, BucketLimits, Shape

Tables = tuple[dict[int, list[Shape]], BucketTable]
"""The plug-in's shapes by phase, and this project's default table."""

Row = dict[str, Any]
"""Figures of a setting and a distribution, of the plug-in and of this project."""

PLUGIN_COMMIT = "091bbadd"
BLOCK = 128
LONG_CONTEXT = 8192

SIGMA = (0.8, 0.7)
"""Standard deviations of the logarithms of prompt and output tokens."""

MEDIANS = {
    "chat": (400, 250),
    "summaries": (3000, 200),
    "code": (1500, 400),
    # Traffic that the default buckets were not fitted to.
    "Azure chat": (1020, 129),
    "Azure code": (1500, 13),
    "long": (6000, 800),
}
"""Median (prompt, output) tokens."""

SETTINGS = {
    "8B, 8192/128/8192": (8192, 128, 8192, 4000),
    "70B on 8 cards, 8192/128/8192": (8192, 128, 8192, 20_000),
    "8B, 131072/128/8192": (131_072, 128, 8192, 4000),
    "70B on 8 cards, 131072/128/8192": (131_072, 128, 8192, 20_000),
    "8B, 8192/256/2048": (8192, 256, 2048, 4000),
    "8B, 8192/32/2048": (8192, 32, 2048, 4000),
}
"""Name -> (context, sequences, tokens a step, KV blocks)."""


ABOUT = f"""\
`python benchmarks/padding.py`: graphs and padding of the default buckets (fitted to a general
traffic) and of vLLM's Gaudi plug-in at commit {PLUGIN_COMMIT}, whose rule the script states. Pure
arithmetic, which does not depend on the machine: nothing was run on a card.

Settings are context/sequences/tokens per step, with 4000 blocks of 128 tokens for 8B on one card
and 20,000 for 70B on eight. Padding is a fraction of the padded amount: of the tokens that prefills
compute, of the blocks that decodes read, and of the modeled cost of all launches, at loads from one
sequence to all, with equal weights. Ratios are ours over the plug-in's. `unprepared` are launches
without a prepared bucket, which compile while serving.

Lengths are log-normal (standard deviations of the logarithms: 0.8 of prompts, 0.7 of outputs).
Medians of prompt and output tokens: chat 400 and 250, between the means of ShareGPT in vLLM's paper
(161 and 338) and the conversations of the Azure trace of 2023; code 1500, the prompts of that
trace's code, and 400; summaries 3000 and 200, articles of some 2000 words. The other traffics weigh
little or nothing in the mix that the default is fitted to: the medians of the Azure trace of 2023
(Splitwise: conversations 1020 and 129, code 1500 and 13), and long requests of 6000 and 800. The
general mix has the medians of the first three with weight 1, and of the long requests with weight
0.3.
"""

COLUMNS = {"tokens": "prompt tokens", "blocks": "decode blocks", "work": "work"}
"""Field of Waste -> its name in the table."""


class Waste(NamedTuple):
    """Padding as a fraction of all work, padding included."""

    tokens: float
    """Fraction of the tokens that prefills compute."""
    blocks: float
    """Fraction of the blocks that decodes read."""
    work: float
    """Fraction of the modeled cost of all launches."""
    unprepared: float
    """Fraction of launches without a prepared bucket."""


def limits_of(context: int, sequences: int, tokens: int, blocks: int) -> BucketLimits:
    return BucketLimits(BLOCK, context, sequences, tokens, 1, blocks, prefix_caching=True)


def draw(kind: str, count: int, seed: int = 0) -> list[Lengths]:
    """Requests of a distribution, log-normal in both lengths."""
    rng = random.Random(f"{kind} {seed}")
    prompt, output = MEDIANS[kind]
    return [
        Lengths(
            max(1, round(prompt * rng.lognormvariate(0, SIGMA[0]))),
            max(1, round(output * rng.lognormvariate(0, SIGMA[1]))),
        )
        for _ in range(count)
    ]


def axis(low: int, step: int, high: int, count: int) -> list[int]:
    """Points of the plug-in: `low`, `high`, and at most `count` multiples of `step` between; only
    `high` for a `count` of 1."""
    if count <= 1:
        return [high]
    start = step if low in (0, 1) else low
    ratio = (high / start) ** (1 / (count - 1))
    points = {min(high, step * math.ceil(start * ratio**i / step - 1e-9)) for i in range(count)}
    return sorted(points | {low, high})


def doublings(high: int) -> int:
    return math.ceil(math.log2(high)) + 1


def plugin_prompts(limits: BucketLimits) -> list[Shape]:
    length, budget = limits.max_model_len, limits.max_num_batched_tokens
    queries = axis(BLOCK, BLOCK, budget, math.ceil(math.log2(budget)))
    is_long = length >= LONG_CONTEXT
    most = max(1, (length - (budget if is_long else BLOCK)) // BLOCK)
    contexts = axis(0, 1, most, 2 if most == 1 else doublings(most))
    shapes = set()
    for query, context in product(queries, contexts):
        if is_long and context == contexts[-1]:
            context = (length - query) // BLOCK
        if query <= length and context <= math.ceil((length - 1) / BLOCK):
            shapes.add((1, query, context))
    return sorted(shapes)


def plugin_decodes(limits: BucketLimits) -> list[Shape]:
    sequences = limits.max_num_seqs
    of_seq = math.ceil(limits.max_model_len / BLOCK)
    most = min(sequences * of_seq, 3 * limits.num_blocks)
    batches = axis(1, 2, sequences, doublings(sequences))
    blocks = axis(1, sequences, most, doublings(most))
    return sorted(
        {
            (batch, 1, min(count, batch * of_seq))
            for batch, count in product(batches, blocks)
            if batch <= count
        }
    )


def plugin_lookup(shapes: list[Shape], launch: Bucket, limits: BucketLimits) -> tuple[Shape, bool]:
    """(bucket, whether it was prepared) of a launch."""
    phase, *sizes = launch
    for shape in shapes:
        if all(size >= needed for size, needed in zip(shape, sizes, strict=True)):
            return shape, True
    batch, query, blocks = sizes
    if phase == PREFILL:
        query = fallback_point(query, 32, limits.max_num_batched_tokens)
        return (batch, query, fallback_point(blocks, 32, limits.blocks_per_seq)), False
    batch = fallback_point(batch, 2, limits.max_num_seqs)
    return (batch, 1, fallback_point(blocks, 32, shapes[-1][2])), False


def waste(launches: Launches, found: dict[Bucket, tuple[Shape, bool]]) -> Waste:
    """`found`: bucket of each launch, and whether it was prepared."""
    exact = {"tokens": 0.0, "blocks": 0.0, "work": 0.0}
    padded = dict.fromkeys(exact, 0.0)
    missed = 0.0
    for launch, weight in launches.items():
        shape, is_prepared = found[launch]
        missed += 0.0 if is_prepared else weight
        for sums, (batch, query, blocks) in ((exact, launch[1:]), (padded, shape)):
            key, size = ("tokens", batch * query) if launch[0] == PREFILL else ("blocks", blocks)
            sums[key] += weight * size
            sums["work"] += weight * launch_cost(launch[0], batch, query, blocks, BLOCK)
    parts = {name: 1 - exact[name] / padded[name] for name in exact}
    return Waste(**parts, unprepared=missed / sum(launches.values()))


def measure(limits: BucketLimits, tables: Tables, launches: Launches) -> tuple[Waste, Waste]:
    """Padding of the plug-in's buckets and of this project's buckets."""
    shapes, table = tables
    theirs = {launch: plugin_lookup(shapes[launch[0]], launch, limits) for launch in launches}
    found = {launch: table.find(*launch) for launch in launches}
    ours = {launch: (lookup.bucket, lookup.result == HIT) for launch, lookup in found.items()}
    return waste(launches, theirs), waste(launches, ours)


def tables_of(limits: BucketLimits) -> Tables:
    shapes = {PREFILL: plugin_prompts(limits), DECODE: plugin_decodes(limits)}
    return shapes, BucketTable.make(BucketConfig(strategy=GAUDI_STRATEGY), limits)


def rows(name: str, requests: int) -> Iterator[Row]:
    """Figures of a setting: a row for each distribution."""
    limits = limits_of(*SETTINGS[name])
    tables = tables_of(limits)
    graphs = {"plugin": sum(map(len, tables[0].values())), "ours": len(tables[1].reachable)}
    for kind in MEDIANS:
        theirs, ours = measure(limits, tables, launches_of(draw(kind, requests), limits))
        padding = {"plugin": theirs._asdict(), "ours": ours._asdict()}
        yield {"setting": name, "traffic": kind, "graphs": graphs, **padding}


def markdown(data: Mapping[str, Any]) -> str:
    """The page, from the content of its JSON file."""
    lines = [
        f"# Padding of the default buckets, {data['date']}",
        "",
        ABOUT,
        "| setting | graphs, plug-in | ours | traffic | "
        + " | ".join(f"{name}, plug-in | ours | ratio" for name in COLUMNS.values())
        + " | unprepared, plug-in | ours |",
        "| --- |" + " ---: |" * 2 + " --- |" + " ---: |" * 11,
    ]
    for row in data["rows"]:
        theirs, ours = row["plugin"], row["ours"]
        parts = [
            f"{theirs[key]:.1%} | {ours[key]:.1%} | {ours[key] / theirs[key]:.2f}"
            for key in COLUMNS
        ]
        lines.append(
            f"| {row['setting']} | {row['graphs']['plugin']} | {row['graphs']['ours']} | "
            f"{row['traffic']} | {' | '.join(parts)} | {theirs['unprepared']:.1%} | "
            f"{ours['unprepared']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    found: list[Row] = []
    for name in SETTINGS:
        found += rows(name, options.requests)
        print(f"{name}: measured", file=sys.stderr, flush=True)
    about = {"date": datetime.date.today().isoformat(), "plugin_commit": PLUGIN_COMMIT}
    data = {**about, "rows": found}
    table = markdown(data)
    print(table, end="")
    if options.markdown:
        options.markdown.write_text(table)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

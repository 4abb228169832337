"""A bucket table for people: its size, what it wastes on a traffic, a picture, a file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from config.buckets import BucketConfig
from config.engine import EngineConfig
from config.errors import ConfigError
from config.traffic import Lengths
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.limits import BucketLimits
from hpu.protocol import DECODE, PREFILL

MAX_MODEL_LEN = 4096
BLOCK_SIZE = 128
"""Assumed where no flag says otherwise; no checkpoint and no device is looked at."""

SECONDS_A_GRAPH = 3.0
"""A guess: from under a second, from a recipe cache, to minutes; the metric
`hpu_graph_compile_seconds` tells."""

COLUMNS = 60
SHADES = "░▒▓█"
NAMES = ((PREFILL, "prompt"), (DECODE, "decode"))


class Cell(NamedTuple):
    """One bucket of the picture; `share` of launches and `waste` of work, 0 without a traffic."""

    row: int
    column: int
    share: float
    waste: float


def planned_limits(config: EngineConfig) -> BucketLimits:
    """The limits that `config` names, with assumptions for what only a model or a card tells."""
    cache, schedule = config.cache, config.scheduler
    max_model_len = config.max_model_len or MAX_MODEL_LEN
    block_size = cache.block_size or BLOCK_SIZE
    full = schedule.max_num_seqs * -(-max_model_len // block_size)
    return BucketLimits(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        max_prefill_batch=schedule.prefill_batch(),
        num_blocks=cache.num_blocks or full,
        prefix_caching=cache.enable_prefix_caching,
    )


def fit_buckets(config: EngineConfig, traffic_file: str, num_graphs: int) -> BucketTable:
    """The table that wastes least on the traffic."""
    buckets = BucketConfig(strategy="fitted", traffic=traffic_file, num_graphs=num_graphs)
    return BucketTable.make(buckets, planned_limits(config))


def planned_table(config: EngineConfig) -> BucketTable:
    """The table of the strategy that `config` names; auto: what a Gaudi device takes."""
    buckets = config.buckets
    if buckets.strategy == "auto":
        buckets = replace(buckets, strategy="exponential")
    if buckets.strategy == "exact":
        raise ConfigError("the strategy 'exact' pads nothing and has 0 buckets to show")
    return BucketTable.make(buckets, planned_limits(config))


def report(
    table: BucketTable, traffic: list[Lengths] | None, seconds_a_graph: float = SECONDS_A_GRAPH
) -> str:
    """Counts, the axes, the padding that `traffic` pays for, a warm-up estimate and heat maps."""
    limits = table.limits
    lines = [
        f"block size {limits.block_size}, context {limits.max_model_len} tokens, "
        f"{limits.max_num_seqs} sequences, {limits.max_num_batched_tokens} tokens a step, "
        f"{limits.num_blocks} blocks, prefix caching {'on' if limits.prefix_caching else 'off'}",
        "",
    ]
    used = {padding.bucket: padding for padding in (table.padding(traffic) if traffic else [])}
    for phase, name in NAMES:
        shapes = [shape for own, *shape in table.buckets if own == phase]
        lines.append(f"{len(shapes)} {name} buckets")
        for axis, what in enumerate(("batch", "query", "blocks")):
            points = sorted({shape[axis] for shape in shapes})
            lines.append(f"  {what:<7}{_points(points)}")
        if used:
            own = [padding for padding in used.values() if padding.bucket[0] == phase]
            work, padded = sum(p.work for p in own), sum(p.padded for p in own)
            busy = sum(1 for p in own if p.share)
            lines.append(
                f"  padding {_percent(padded - work, padded)} of modelled work; "
                f"{busy} of {len(own)} buckets used"
            )
        lines.append("")
    if used:
        work, padded = sum(p.work for p in used.values()), sum(p.padded for p in used.values())
        lines.append(f"padding over all: {_percent(padded - work, padded)} of modelled work")
    count = len(table.needed)
    lines.append(
        f"warm-up: {count} graphs, about {count * seconds_a_graph / 60:.1f} minutes at "
        f"{seconds_a_graph:g} s each"
    )
    for phase, name, row, axis in (
        (PREFILL, "prompts of batch 1", 2, 3),
        (DECODE, "decodes", 1, 3),
    ):
        cells = []
        for bucket in table.buckets:
            if bucket[0] != phase or (phase == PREFILL and bucket[1] != 1):
                continue
            padding = used.get(bucket)
            waste = 1 - padding.work / padding.padded if padding and padding.padded else 0.0
            share = padding.share if padding else 0.0
            cells.append(Cell(bucket[row], bucket[axis], share, waste))
        rows = "query" if phase == PREFILL else "batch"
        lines += ["", *heat_map(f"{name}: {rows} down, blocks across", cells)]
    if used:
        lines.append("· prepared, not used   ░ under 25 % padding   ▒ 50   ▓ 75   █ more")
    return "\n".join(lines)


def heat_map(title: str, cells: Sequence[Cell]) -> list[str]:
    """One line a row, one sign a column; where columns are too many, neighbours share a sign."""
    rows = sorted({cell.row for cell in cells})
    columns = sorted({cell.column for cell in cells})
    width = min(COLUMNS, len(columns))
    place = {column: at * width // len(columns) for at, column in enumerate(columns)}
    lines = [title]
    for row in rows:
        signs = [" "] * width
        ranked: list[float] = [-1.0] * width
        for cell in cells:
            at = place[cell.column]
            # Of several in one sign the busiest is shown.
            if cell.row == row and cell.share > ranked[at]:
                signs[at], ranked[at] = _sign(cell), cell.share
        lines.append(f"{row:>7} |{''.join(signs)}|")
    return [*lines, f"{'':>7}  {columns[0]} ... {columns[-1]}"]


def bucket_file(table: BucketTable, comment: str) -> str:
    """The table in the form that the strategy `file` reads."""
    groups = [
        f"# {name}: batch, query, blocks\n"
        + "".join(f"({b}, {q}, {n})\n" for own, b, q, n in table.buckets if own == phase)
        for phase, name in NAMES
    ]
    return "".join(f"# {line}\n" for line in comment.splitlines()) + "".join(groups)


def _sign(cell: Cell) -> str:
    return SHADES[min(int(cell.waste * 4), 3)] if cell.share else "·"


def _points(points: Sequence[int]) -> str:
    if len(points) <= 20:
        return " ".join(map(str, points))
    head, tail = points[:12], points[-4:]
    return f"{' '.join(map(str, head))} ... {' '.join(map(str, tail))} ({len(points)})"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"

"""Reports on a bucket table: its size, its padding for given traffic, heat maps, a bucket file."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from config.buckets import BucketConfig
from config.engine import EngineConfig
from config.errors import ConfigError
from config.traffic import Lengths
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.fitted import Padding
from hpu.bucketing.select import GAUDI_STRATEGY
from hpu.protocol import DECODE, PREFILL, BucketLimits

MAX_MODEL_LEN = 4096
BLOCK_SIZE = 128
"""Maximum length and block size where the settings have none: the reports read no device, and
`gaudiserve buckets` reads no checkpoint."""

SECONDS_PER_GRAPH = 3.0
"""Assumed compile time: under a second with a recipe cache, up to minutes without a cache. The
metric `hpu_graph_compile_seconds` reports the measured time."""

COLUMNS = 60
SHADES = "░▒▓█"
NAMES = ((PREFILL, "prompt"), (DECODE, "decode"))


class Cell(NamedTuple):
    """A bucket in a heat map: its share of launches and its padding; both are 0 without traffic."""

    row: int
    column: int
    share: float
    waste: float


def planned_limits(config: EngineConfig, *, has_windows: bool = False) -> BucketLimits:
    """Limits from `config`, with defaults for limits that depend on the model or the card.
    `has_windows`: whether some layers use a sliding window."""
    cache, schedule = config.cache, config.scheduler
    max_model_len = config.max_model_len or MAX_MODEL_LEN
    schedule.check_whole_prompts(max_model_len)
    block_size = cache.block_size or BLOCK_SIZE
    full = schedule.max_num_seqs * -(-max_model_len // block_size)
    return BucketLimits(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.token_budget(max_model_len),
        max_prefill_batch=schedule.prefill_batch(),
        num_blocks=cache.num_blocks or full,
        prefix_caching=cache.enable_prefix_caching,
        chunked_prefill=schedule.enable_chunked_prefill,
        merged_prefill=schedule.merged_prefill,
        bounds_references=not has_windows,
    )


def fit_buckets(config: EngineConfig, traffic_file: str, num_graphs: int) -> BucketTable:
    """The table of strategy `fitted` for the traffic in `traffic_file`, with at most `num_graphs`
    buckets if these cover all launches."""
    buckets = BucketConfig(strategy="fitted", traffic=traffic_file, num_graphs=num_graphs)
    return BucketTable.make(buckets, planned_limits(config))


def planned_buckets(config: EngineConfig) -> BucketConfig:
    """Bucket settings of `config`, resolved for a Gaudi."""
    return config.buckets.resolved(GAUDI_STRATEGY)


def planned_table(config: EngineConfig, *, has_windows: bool = False) -> BucketTable:
    """Bucket table for the `planned_buckets` of `config`. Raises ConfigError for "exact"."""
    buckets = planned_buckets(config)
    if buckets.strategy == "exact":
        raise ConfigError("the strategy 'exact' does not pad and has 0 buckets to show")
    return BucketTable.make(buckets, planned_limits(config, has_windows=has_windows))


def report(
    table: BucketTable,
    traffic: list[Lengths] | None,
    seconds_per_graph: float = SECONDS_PER_GRAPH,
    *,
    strategy: str = "fitted",
) -> str:
    """Text report: counts, axes, the number of buckets that `strategy` made and the buckets that
    were added, padding for `traffic`, estimated warm-up time, and heat maps."""
    limits = table.limits
    lines = [
        f"block size {limits.block_size}, context {limits.max_model_len} tokens, "
        f"{limits.max_num_seqs} sequences, {limits.max_num_batched_tokens} tokens a step, "
        f"{limits.num_blocks} blocks, prefix caching {'on' if limits.prefix_caching else 'off'}, "
        f"chunked prefill {'on' if limits.chunked_prefill else 'off'}",
        "",
    ]
    used = {padding.bucket: padding for padding in (table.padding(traffic) if traffic else [])}
    for phase, name in NAMES:
        shapes = [shape for bucket_phase, *shape in table.buckets if bucket_phase == phase]
        lines.append(f"{len(shapes)} {name} buckets")
        for axis, what in enumerate(("batch", "query", "blocks")):
            points = sorted({shape[axis] for shape in shapes})
            lines.append(f"  {what:<7}{_points(points)}")
        lines.append(f"  made by {_makers(table, phase, strategy)}")
        if used:
            of_phase = [padding for padding in used.values() if padding.bucket[0] == phase]
            num_used = sum(1 for padding in of_phase if padding.share)
            lines.append(
                f"  padding {_padding_percent(of_phase)} of modelled work; "
                f"{num_used} of {len(of_phase)} buckets used"
            )
        lines.append("")
    if used:
        lines.append(f"padding over all: {_padding_percent(used.values())} of modelled work")
    count = len(table.reachable)
    lines.append(
        f"warm-up: {count} graphs, about {count * seconds_per_graph / 60:.1f} minutes at "
        f"{seconds_per_graph:g} s each"
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
            share, waste = (padding.share, padding.waste) if padding else (0.0, 0.0)
            cells.append(Cell(bucket[row], bucket[axis], share, waste))
        rows = "query" if phase == PREFILL else "batch"
        lines += ["", *heat_map(f"{name}: {rows} down, blocks across", cells)]
    if used:
        lines.append("· prepared, not used   ░ under 25 % padding   ▒ 50   ▓ 75   █ more")
    return "\n".join(lines)


def _makers(table: BucketTable, phase: int, strategy: str) -> str:
    """Rules that made the buckets of a phase, with a list of the added buckets."""
    added = [bucket[1:] for bucket in table.added if bucket[0] == phase]
    count = sum(bucket[0] == phase for bucket in table.buckets) - len(added)
    if not added:
        return f"{strategy}: all"
    why = "a chunk after any context" if phase == PREFILL else "a decode of all sequences"
    listed = " ".join(f"({batch},{query},{blocks})" for batch, query, blocks in added)
    return f"{strategy}: {count}; added, so that {why} fits: {listed}"


def heat_map(title: str, cells: Sequence[Cell]) -> list[str]:
    """Lines of a heat map: the title, a line per row with a character per column, and the labels of
    the first and the last column. Adjacent columns share a character if there are more than
    COLUMNS."""
    rows = sorted({cell.row for cell in cells})
    columns = sorted({cell.column for cell in cells})
    width = min(COLUMNS, len(columns))
    position = {column: at * width // len(columns) for at, column in enumerate(columns)}
    lines = [title]
    for row in rows:
        chars = [" "] * width
        ranked: list[float] = [-1.0] * width
        for cell in cells:
            at = position[cell.column]
            # If buckets share a character, the most used bucket is shown.
            if cell.row == row and cell.share > ranked[at]:
                chars[at], ranked[at] = _char(cell), cell.share
        lines.append(f"{row:>7} |{''.join(chars)}|")
    return [*lines, f"{'':>7}  {columns[0]} ... {columns[-1]}"]


def bucket_file(table: BucketTable, comment: str) -> str:
    """Bucket table in the format of the `file` strategy."""
    groups = [
        f"# {name}: batch, query, blocks\n"
        + "".join(
            f"({b}, {q}, {n})\n" for bucket_phase, b, q, n in table.buckets if bucket_phase == phase
        )
        for phase, name in NAMES
    ]
    return "".join(f"# {line}\n" for line in comment.splitlines()) + "".join(groups)


def _char(cell: Cell) -> str:
    return SHADES[min(int(cell.waste * 4), 3)] if cell.share else "·"


def _points(points: Sequence[int]) -> str:
    if len(points) <= 20:
        return " ".join(map(str, points))
    head, tail = points[:12], points[-4:]
    return f"{' '.join(map(str, head))} ... {' '.join(map(str, tail))} ({len(points)})"


def _padding_percent(paddings: Iterable[Padding]) -> str:
    paddings = list(paddings)
    exact = sum(padding.exact_cost for padding in paddings)
    padded = sum(padding.padded_cost for padding in paddings)
    return f"{100 * (padded - exact) / padded:.1f} %" if padded else "-"

"""`gaudiserve buckets show` and `buckets fit`: flags, and what is printed. Knows no shapes."""

import argparse
import math
import sys
from pathlib import Path

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.parser import Parser, server_parser
from config.loading.sources import load
from config.traffic import read_traffic
from engine.reports.buckets import (
    SECONDS_PER_GRAPH,
    bucket_file,
    fit_buckets,
    planned_table,
    report,
)

USAGE = """\
usage: gaudiserve buckets show [flags]   a strategy's table, and what it wastes on a traffic
       gaudiserve buckets fit --traffic FILE [--graphs N] [--output FILE] [flags]
                                         choose a table for a traffic, as a bucket file
"""


def parser(action: str) -> Parser:
    """The flags of `show` or `fit`, beside those of a server."""
    made = server_parser(f"gaudiserve buckets {action}", "Plan bucket tables, without a device.")
    group = made.add_argument_group("This command")
    group.add_argument(
        "--traffic", metavar="FILE", help="JSONL of lengths, a /metrics page, or a request log"
    )
    group.add_argument(
        "--seconds-per-graph",
        type=float,
        default=SECONDS_PER_GRAPH,
        metavar="X",
        help=f"Warm-up time of one graph, for the estimate [{SECONDS_PER_GRAPH:g}]",
    )
    if action == "fit":
        group.add_argument("--graphs", type=int, metavar="N", help="Buckets, at most [100]")
        group.add_argument(
            "--warmup-seconds", type=float, metavar="X", help="A time budget instead of --graphs"
        )
        group.add_argument("--output", metavar="FILE", help="Where to write; none: print it")
    return made


def main(argv: list[str]) -> int:
    """Run one of the two; the exit status. Raises ConfigError for a wrong flag or file."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    action, *rest = argv
    if action not in ("show", "fit"):
        raise ConfigError(f"`gaudiserve buckets {action}` is no command; show and fit are")
    made = parser(action)
    found = made.parse_all(rest)
    if not (math.isfinite(found.seconds_per_graph) and found.seconds_per_graph > 0):
        raise ConfigError(f"seconds-per-graph is {found.seconds_per_graph}, it must be above 0")
    loaded = load(rest, default_model="none", parser=made)
    if action == "fit":
        return _fit(found, loaded.engine)
    table = planned_table(loaded.engine)
    # A table fitted to a traffic is shown on that one unless another is given.
    file = found.traffic or loaded.engine.buckets.traffic
    print(report(table, read_traffic(file) if file else None, found.seconds_per_graph))
    return 0


def _fit(found: argparse.Namespace, engine: EngineConfig) -> int:
    if found.traffic is None:
        raise ConfigError("`buckets fit` needs a traffic: --traffic FILE")
    graphs = _graphs(found, engine.buckets.num_graphs)
    table = fit_buckets(engine, found.traffic, graphs)
    text = bucket_file(table, f"Fitted to {Path(found.traffic).name}, {graphs} graphs at most.")
    if found.output is None:
        print(text, end="")
        return 0
    try:
        Path(found.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{found.output} cannot be written: {error}") from None
    print(report(table, read_traffic(found.traffic), found.seconds_per_graph))
    print(f"\nwritten to {found.output}; serve with --bucketing-file", file=sys.stderr)
    return 0


def _graphs(found: argparse.Namespace, default: int) -> int:
    if found.warmup_seconds is None:
        return default if found.graphs is None else int(found.graphs)
    if found.graphs is not None:
        raise ConfigError("--graphs and --warmup-seconds are two ways to say one thing; give one")
    within = found.warmup_seconds / found.seconds_per_graph
    if not math.isfinite(within) or within < 2:
        raise ConfigError(
            f"warmup-seconds is {found.warmup_seconds:g}, two graphs take "
            f"{2 * found.seconds_per_graph:g}"
        )
    return int(within)

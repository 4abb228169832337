"""`gaudiserve buckets show` and `gaudiserve buckets fit`: flags and output."""

import argparse
import sys
from pathlib import Path

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.parser import FlagParser, number
from config.loading.sources import load
from config.traffic import read_traffic
from engine.reports.bucket_plot import plot
from engine.reports.buckets import (
    SECONDS_PER_GRAPH,
    bucket_file,
    fit_buckets,
    planned_buckets,
    planned_table,
    report,
)
from server.cli.flags import command_parser

MAX_GRAPHS = 100
"""Default of `--graphs` if --bucketing-graphs is not set."""

USAGE = """\
usage: gaudiserve buckets show [flags]   print a strategy's table, and its padding for a traffic
       gaudiserve buckets fit --traffic FILE [--graphs N] [--output FILE] [flags]
                                         fit a table to a traffic, as a bucket file
"""


def add_graph_seconds(group: argparse._ArgumentGroup) -> None:
    """Add `--seconds-per-graph` of `buckets` and `plan` to a group of flags."""
    group.add_argument(
        "--seconds-per-graph",
        type=number(above=0),
        default=SECONDS_PER_GRAPH,
        metavar="X",
        help=f"Seconds of warm-up per graph, for the estimate [{SECONDS_PER_GRAPH:g}]",
    )


def buckets_parser(action: str) -> FlagParser:
    """Parser with the flags of `show` or `fit` and the flags of `serve`."""
    does = {
        "show": "Print the bucket table of a strategy, and its padding for a traffic.",
        "fit": "Fit a bucket table to a traffic, and write it as a bucket file.",
    }[action]
    parser = command_parser(
        f"gaudiserve buckets {action}", f"{does} Needs no model and no device.", has_model=False
    )
    parser.examples = {
        "show": ("gaudiserve buckets show --max-num-seqs 64 --max-model-len 8K",),
        "fit": ("gaudiserve buckets fit --traffic requests.jsonl --output buckets.txt",),
    }[action]
    group = parser.add_argument_group("This command")
    group.add_argument(
        "--traffic",
        metavar="FILE",
        help="Lengths of requests: JSONL, a /metrics page, or a request log",
    )
    add_graph_seconds(group)
    if action == "show":
        group.add_argument(
            "--plot", metavar="FILE", help="SVG file to write a plot of the buckets to"
        )
    if action == "fit":
        group.add_argument(
            "--graphs",
            type=number(int),
            metavar="N",
            help=f"Maximum number of buckets [{MAX_GRAPHS}]",
        )
        group.add_argument(
            "--warmup-seconds",
            type=number(),
            metavar="X",
            help="Maximum seconds of warm-up, instead of --graphs",
        )
        group.add_argument(
            "--output", metavar="FILE", help="File to write the table to [the table is printed]"
        )
    return parser


def main(argv: list[str]) -> int:
    """Run `show` or `fit`; returns the exit status. Raises ConfigError."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    action, *rest = argv
    if action not in ("show", "fit"):
        raise ConfigError(f"`gaudiserve buckets {action}` is not a command: use show or fit")
    loaded = load(rest, default_model="none", parser=buckets_parser(action))
    args = loaded.arguments
    if action == "fit":
        return _fit(args, loaded.engine)
    table = planned_table(loaded.engine)
    # Evaluate a fitted table on the traffic that it was fitted to, unless another traffic is given.
    traffic_file = args.traffic or loaded.engine.buckets.traffic
    traffic = read_traffic(traffic_file) if traffic_file else None
    strategy = planned_buckets(loaded.engine).strategy
    print(report(table, traffic, args.seconds_per_graph, strategy=strategy))
    if args.plot:
        _write(args.plot, plot(table, strategy))
        print(f"\nplot written to {args.plot}", file=sys.stderr)
    return 0


def _fit(args: argparse.Namespace, engine: EngineConfig) -> int:
    if args.traffic is None:
        raise ConfigError("`gaudiserve buckets fit` needs --traffic FILE")
    graphs = _graphs(args, engine.buckets.num_graphs or MAX_GRAPHS)
    table = fit_buckets(engine, args.traffic, graphs)
    text = bucket_file(table, f"Fitted to {Path(args.traffic).name}, {graphs} graphs at most.")
    if args.output is None:
        print(text, end="")
        return 0
    _write(args.output, text)
    print(report(table, read_traffic(args.traffic), args.seconds_per_graph))
    print(f"\nwritten to {args.output}; serve with --bucketing-file", file=sys.stderr)
    return 0


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _graphs(args: argparse.Namespace, default: int) -> int:
    if args.warmup_seconds is None:
        return default if args.graphs is None else int(args.graphs)
    if args.graphs is not None:
        raise ConfigError(
            "--graphs and --warmup-seconds both set the number of graphs; set only one"
        )
    num_graphs = args.warmup_seconds / args.seconds_per_graph
    if num_graphs < 2:
        raise ConfigError(
            f"--warmup-seconds is {args.warmup_seconds:g}, it must be at least "
            f"{2 * args.seconds_per_graph:g}, the time of 2 graphs"
        )
    return int(num_graphs)

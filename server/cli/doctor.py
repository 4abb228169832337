"""`gaudiserve doctor`: flags and output."""

import json

from config.loading.env import cache_home, environment
from config.loading.parser import FlagParser
from config.loading.sources import load
from engine.reports.doctor import as_json, as_text, diagnose, this_machine
from server.cli.flags import command_parser, log_notes


def doctor_parser() -> FlagParser:
    """Parser with the flags of the command and the flags of `serve`."""
    parser = command_parser(
        "gaudiserve doctor",
        "Check whether a server with these flags can run on this machine. Exit status: 0 if it "
        "can, 1 if not, 2 for wrong flags.",
        has_model=False,
    )
    parser.examples = (
        "gaudiserve doctor",
        "gaudiserve doctor --device hpu -tp 2",
    )
    parser.add_argument_group("This command").add_argument(
        "--json", action="store_true", help="Print JSON"
    )
    return parser


def main(argv: list[str]) -> int:
    """Print the report; returns 0 if a server can run, otherwise 1. Raises ConfigError."""
    loaded = load(argv, default_model="demo", parser=doctor_parser())
    log_notes(loaded)
    engine = loaded.engine
    report = diagnose(this_machine(environment()), engine, engine.cache_dir or cache_home())
    print(json.dumps(as_json(report), indent=2) if loaded.arguments.json else as_text(report))
    return 0 if report.can_serve else 1

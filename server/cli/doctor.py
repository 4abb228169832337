"""`gaudiserve doctor`: flags, and what is printed. Looks at nothing itself."""

import json

from config.loading.env import cache_home, environment
from config.loading.parser import Parser, server_parser
from config.loading.sources import load
from engine.reports.doctor import as_json, as_text, diagnose, this_machine


def parser() -> Parser:
    """A server's flags, and one more."""
    made = server_parser(
        "gaudiserve doctor", "Whether a server with these flags can run here; and if not, why."
    )
    made.add_argument_group("This command").add_argument(
        "--json", action="store_true", help="Print JSON"
    )
    return made


def main(argv: list[str]) -> int:
    """Print the report; 0 if a server can run, 1 if not. Raises ConfigError for a wrong flag."""
    made = parser()
    found = made.parse_all(argv)
    engine = load(argv, default_model="demo", parser=made).engine
    report = diagnose(this_machine(environment()), engine, engine.cache_dir or cache_home())
    print(json.dumps(as_json(report), indent=2) if found.json else as_text(report))
    return 0 if report.can_serve else 1

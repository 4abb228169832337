"""`gaudiserve selftest`: flags, output, and the settings that `serve` derives from the result."""

from collections.abc import Mapping
from pathlib import Path

from config.checkpoint.facts import engine_facts
from config.errors import ConfigError
from config.loading.env import environment
from config.loading.parser import FlagParser
from config.loading.sources import DEFAULT, Loaded, load
from config.model.model_config import ModelConfig
from config.whole_files import write_whole
from engine.reports.doctor import this_machine
from engine.selftest.fallbacks import line, shown
from engine.selftest.results import CheckResult
from engine.selftest.start import (
    check_place,
    choices_for,
    failure_report,
    identity_of,
    place_of,
    run_selftest,
    with_selftest,
)
from server.cli.flags import command_parser


def selftest_parser() -> FlagParser:
    """Parser with the flags of the command and the flags of `serve`."""
    parser = command_parser(
        "gaudiserve selftest",
        "Check on a Gaudi card the server's assumptions about the card and the vendor's software. "
        "Exit status: 0 if no check fails, 1 if a check fails or hangs, 2 if no check can run or a "
        "setting is wrong.",
        no_model="kernels are checked with default sizes",
    )
    parser.examples = (
        "gaudiserve selftest --quick",
        "gaudiserve selftest /data/model --json selftest.json",
    )
    group = parser.add_argument_group("This command")
    group.add_argument(
        "--quick",
        action="store_true",
        help="Run only the most important checks, in at most a minute if no check hangs",
    )
    group.add_argument(
        "--json",
        metavar="FILE",
        help="Write the result, versions and runtime variables to FILE, without secrets, to attach "
        "to an issue",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the checks and print a table; returns SelfTest.status. Raises ConfigError."""
    loaded = load(argv, default_model="demo", parser=selftest_parser())
    machine = this_machine(environment())
    check_place(loaded.engine, machine)
    print(f"Self-test of {identity_of(loaded.engine, machine)}", flush=True)
    found = run_selftest(
        loaded.engine,
        machine,
        place_of(loaded.engine, machine, _models(loaded)),
        is_quick=loaded.arguments.quick,
        on_result=lambda result: print(row(result), flush=True),
        on_wait=lambda what: print(f"  waiting for {what}", flush=True),
    )
    print(f"\n{found.summary}")
    for choice in choices_for(loaded, loaded, found):
        print(line(choice))
    if loaded.arguments.json:
        _write(Path(loaded.arguments.json), failure_report(found, machine))
    return found.status


def _models(loaded: Loaded) -> tuple[ModelConfig, ...]:
    """The model given by the user, whose sizes are used to check the kernels; empty if none is
    given."""
    return () if loaded.sources["model"][1] == DEFAULT else (engine_facts(loaded.engine),)


def row(result: CheckResult) -> str:
    """Output line of a check: status, name, time and details; for a failure, also the settings that
    avoid it."""
    text = f"  {result.status:<8} {result.name:<22} {result.seconds:7.2f} s  {result.detail}"
    words = [shown(fallback.setting, fallback.values[0]) for fallback in result.fallbacks]
    if result.is_wrong:
        text += f"\n{'':>11}fallback: {', '.join(words) or 'no setting avoids it'}"
    return text.rstrip()


def served(loaded: Loaded, given: Loaded, parser: FlagParser | None = None) -> Loaded:
    """`loaded` with the settings that the self-test of this card selected (see `with_selftest`).
    `parser`: parser of the command line of `loaded`; None: the parser of `serve`."""

    def change(flags: Mapping[str, str]) -> Loaded:
        words = [shown(name, value) for name, value in flags.items()]
        return load([*loaded.words, *words], default_model=loaded.engine.model, parser=parser)

    return with_selftest(loaded, given, this_machine(environment()), change)


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None

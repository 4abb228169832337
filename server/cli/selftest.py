"""`gaudiserve selftest`: flags and output; and the settings that `serve` takes from its result."""

from collections.abc import Mapping
from pathlib import Path

from config.checkpoint.facts import model_facts
from config.errors import ConfigError
from config.loading.env import environment
from config.loading.parser import Parser
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


def selftest_parser() -> Parser:
    """Parser with the flags of the command and the flags of `serve`."""
    parser = command_parser(
        "gaudiserve selftest",
        "Check on a Gaudi card what this server assumes of the card and of the vendor's software.",
        no_model="kernels are checked with sizes of no model",
    )
    parser.examples = (
        "gaudiserve selftest --quick",
        "gaudiserve selftest /data/model --json selftest.json",
    )
    group = parser.add_argument_group("This command")
    group.add_argument(
        "--quick", action="store_true", help="Only the checks that matter most, within a minute"
    )
    group.add_argument(
        "--json",
        metavar="FILE",
        help="Write the result, the versions and the runtime's variables to FILE, without secrets: "
        "for an issue",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the checks and print a table; returns 0 if no check fails or hangs, else 1. Raises
    ConfigError."""
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
    )
    print(f"\n{found.summary}")
    for choice in choices_for(loaded, loaded, found):
        print(line(choice))
    if loaded.arguments.json:
        _write(Path(loaded.arguments.json), failure_report(found, machine))
    return int(any(result.is_wrong for result in found.results))


def _models(loaded: Loaded) -> tuple[ModelConfig, ...]:
    """The model that is named, whose sizes the kernels are checked with; empty if there is none."""
    engine = loaded.engine
    if loaded.sources["model"][1] == DEFAULT:
        return ()
    facts = model_facts(
        engine.model,
        revision=engine.revision,
        cache_dir=engine.cache_dir,
        download_dir=engine.download_dir,
        hf_overrides=engine.hf_overrides,
    )
    return (facts,)


def row(result: CheckResult) -> str:
    """The line of a check: its outcome, what it found, and what avoids a failure."""
    text = f"  {result.status:<8} {result.name:<22} {result.seconds:7.2f} s  {result.detail}"
    words = [shown(fallback.setting, fallback.values[0]) for fallback in result.fallbacks]
    if result.is_wrong:
        text += f"\n{'':>11}fallback: {', '.join(words) or 'no setting avoids it'}"
    return text.rstrip()


def served(loaded: Loaded, given: Loaded, parser: Parser | None = None) -> Loaded:
    """`loaded` with the settings that the self-test of this card selects: see `with_selftest`.
    `parser`: reads the command line of `loaded`; None: the parser of `serve`."""

    def change(flags: Mapping[str, str]) -> Loaded:
        words = [shown(name, value) for name, value in flags.items()]
        return load([*loaded.words, *words], default_model=loaded.engine.model, parser=parser)

    return with_selftest(loaded, given, this_machine(environment()), change)


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None

"""`gaudiserve selftest`: flags and output; and the settings that `serve` takes from its result."""

import logging
from pathlib import Path

from config.checkpoint.facts import model_facts
from config.errors import ConfigError
from config.loading.env import environment, set_missing
from config.loading.parser import Parser, command_parser
from config.loading.sources import DEFAULT, Loaded, load
from config.model.model_config import ModelConfig
from config.whole_files import write_whole
from engine.reports.doctor import this_machine
from engine.selftest.fallbacks import line, shown
from engine.selftest.results import CheckResult, SelfTest
from engine.selftest.start import (
    at_start,
    check_place,
    choices_for,
    failure_report,
    identity_of,
    log_choices,
    place_of,
    run_selftest,
)

logger = logging.getLogger(__name__)


def selftest_parser() -> Parser:
    """Parser with the flags of the command and the flags of `serve`."""
    parser = command_parser(
        "gaudiserve selftest",
        "Check on a Gaudi card what this server assumes of the card and of the vendor's software.",
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


def with_selftest(loaded: Loaded, given: Loaded) -> Loaded:
    """Add the settings that the self-test of this card selects, with a log line for each. Without
    a stored result, the quick part runs first, on a card only. `given`: the settings of the user,
    to which `loaded` may have added a preset."""
    for found in at_start(loaded, this_machine(environment())):
        return _with_choices(loaded, given, found)
    return loaded


def _with_choices(loaded: Loaded, given: Loaded, found: SelfTest) -> Loaded:
    choices = choices_for(loaded, given, found)
    log_choices(choices)
    chosen = [choice for choice in choices if not choice.problem]
    set_missing({choice.setting: choice.value for choice in chosen if choice.setting.isupper()})
    flags = [
        shown(choice.setting, choice.value) for choice in chosen if not choice.setting.isupper()
    ]
    return load([*loaded.words, *flags], default_model=loaded.engine.model) if flags else loaded


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None

"""Runs, stores and loads the self-test of a server's card, and applies the settings that it
selects."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from config.devices.base import DEVICES
from config.engine import EXTERNAL_LAUNCHER, EngineConfig
from config.errors import ConfigError
from config.execution import RUNTIME_DISTRIBUTION
from config.loading import env
from config.loading.flags import FLAGS
from config.loading.sources import DEFAULT, Loaded
from config.model.model_config import ModelConfig
from config.version import VERSION
from engine.selftest.fallbacks import Choice, InUse, line, select
from engine.selftest.results import Identity, SelfTest, is_variable, read, write
from engine.selftest.runner import OnResult, OnWait, Place, Runner
from hpu.doctor.cards import find_cards
from hpu.doctor.machine import Machine
from hpu.doctor.preflight import check_start, preflight
from hpu.doctor.software import driver_version
from hpu.emulator.settings import EmulatorConfig
from hpu.selftest.base import UNKNOWN, ModelShape, Orders, all_checks

logger = logging.getLogger(__name__)

EMULATED = "emulated"
BUDGET_S, QUICK_BUDGET_S = 540.0, 55.0
"""Maximum time of all checks on a card, and of the quick checks, without checks that hang;
seconds."""
RELEASE_S = 5.0
"""Wait for the driver to release the card after the last child: a worker does not wait for the
card."""
UNSET = "unset"
"""Value that represents an unset variable; no fallback has this value."""
MODE = "execution-mode"
REPORTED_PACKAGES = ("torch", "habana-torch-plugin", "transformers", "numpy")
REPORTED_VARIABLES = re.compile(
    r"^(PT_|HABANA_VISIBLE|HLS_MODULE_ID|RUNTIME_SCALE|FUSER_|ENABLE_EXPERIMENTAL|LOG_LEVEL)"
)
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|AUTH", re.IGNORECASE)
MIN_SECRET = 6
"""Minimum length of a secret that is redacted in a report: a shorter word may occur in any text."""


Change = Callable[[Mapping[str, str]], Loaded]
"""Loads the configuration again, with other values of some flags."""


class FailureReport(NamedTuple):
    """Report that a user may attach to an issue: the result, and the software that produced it."""

    selftest: SelfTest
    python: str
    packages: Mapping[str, str]
    variables: Mapping[str, str]
    """Variables of the vendor's runtime."""


def is_gaudi(config: EngineConfig) -> bool:
    """Whether the server runs on a Gaudi card or its emulator."""
    return DEVICES[env.chosen_device(config.device)].is_gaudi


def check_place(config: EngineConfig, machine: Machine) -> None:
    """Raise ConfigError if no self-test can run."""
    if not is_gaudi(config):
        raise ConfigError(
            f"the self-test needs a Gaudi card, and the device is "
            f"{env.chosen_device(config.device)}: --device hpu-emulator runs it on an emulated card"
        )
    if env.chosen_device(config.device) == "hpu":
        check_start(machine)


def identity_of(config: EngineConfig, machine: Machine) -> Identity:
    """Card and software of `config`, for which a self-test result is valid."""
    if env.chosen_device(config.device) == "hpu-emulator":
        driver = " ".join((EMULATED, *sorted(config.emulator.faults)))
        return Identity(config.emulator.card, driver, EmulatorConfig().release, VERSION)
    cards = find_cards(machine).cards
    names = sorted({card.generation or card.name or "unknown" for card in cards})
    release = machine.version(RUNTIME_DISTRIBUTION) or ""
    return Identity(" ".join(names), driver_version(machine) or "", release, VERSION)


def shape_of(model_config: ModelConfig) -> ModelShape:
    """Sizes of a model that the checks use."""
    sizes = ModelShape(
        model_config.num_heads,
        model_config.num_kv_heads,
        model_config.head_dim,
        model_config.hidden_size,
    )
    if model_config.moe:
        sizes = msgspec.structs.replace(
            sizes,
            num_experts=model_config.moe.num_experts,
            experts_per_token=model_config.moe.top_k,
        )
    return sizes


def place_of(
    config: EngineConfig,
    machine: Machine,
    models: Sequence[ModelConfig] = (),
) -> Place:
    """Environment of the checks for a server with `config`, with the sizes of the first of
    `models`."""
    shape = shape_of(models[0]) if models else ModelShape()
    device = env.chosen_device(config.device)
    is_emulated = device == "hpu-emulator"
    software = EmulatorConfig().release if is_emulated else machine.version(RUNTIME_DISTRIBUTION)
    cards = EmulatorConfig().num_devices if is_emulated else len(find_cards(machine).cards)
    return Place(
        Orders(device, software or "", config.emulator, shape),
        partial(_environment, config),
        cards,
    )


def _environment(config: EngineConfig, is_lazy: bool, folder: str) -> dict[str, str]:
    tested = {
        fallback.setting
        for check in all_checks().values()
        for fallback in check.fallbacks
        if is_variable(fallback.setting)
    }
    return env.selftest_environment(config, f"{folder}/recipes", tested, is_lazy=is_lazy)


def run_selftest(
    config: EngineConfig,
    machine: Machine,
    place: Place,
    *,
    is_quick: bool,
    on_result: OnResult,
    on_wait: OnWait,
) -> SelfTest:
    """Run the checks at `place` and store the result for the card of `config`, unless no check
    could run."""
    checks = [check for check in all_checks().values() if check.is_quick or not is_quick]
    runner = Runner(place, QUICK_BUDGET_S if is_quick else BUDGET_S, on_result, on_wait)
    found = SelfTest(identity_of(config, machine), is_quick, tuple(runner.run(checks)))
    # If no check could run, store nothing, so that the next start tries again.
    if found.count(UNKNOWN) < len(found.results):
        write(env.selftest_file(config), found)
    return found


def stored(config: EngineConfig, machine: Machine) -> Sequence[SelfTest]:
    """The usable result of an earlier self-test; empty if there is none."""
    return read(env.selftest_file(config), identity_of(config, machine), all_checks())


def at_start(loaded: Loaded, machine: Machine) -> Sequence[SelfTest]:
    """The result that a server starts with: a stored result, else the result of the quick checks,
    which run now. Empty if the self-test is off or cannot run. By default the emulator uses only a
    stored result."""
    config = loaded.engine
    when = config.execution.selftest
    if not is_gaudi(config) or when == "off":
        return ()
    if found := stored(config, machine):
        return found
    is_card = env.chosen_device(config.device) == "hpu"
    if when == "auto" and not is_card:
        return ()
    if config.executor == EXTERNAL_LAUNCHER:
        # Each rank is a separate process, and other ranks use the other cards.
        return ()
    if is_card and preflight(machine).errors:
        # Start-up reports these errors in more detail.
        return ()
    logger.info(
        "No self-test of this card and software is stored: the quick part runs, at most %.0f s "
        "unless a check hangs; --selftest off skips it",
        QUICK_BUDGET_S,
    )
    place = place_of(config, machine)
    try:
        fresh = run_selftest(
            config,
            machine,
            place,
            is_quick=True,
            on_result=lambda result: None,
            on_wait=partial(logger.info, "Self-test: waiting for %s"),
        )
    except OSError as error:
        logger.warning("The self-test cannot run: %s", error)
        return ()
    logger.info("Self-test: %s", fresh.summary)
    if is_card:
        time.sleep(RELEASE_S)
    return (fresh,)


def choices_for(loaded: Loaded, given: Loaded, found: SelfTest) -> list[Choice]:
    """Settings to change because of failed checks in `found`. `given`: the user's settings;
    `loaded` may also contain a preset."""
    num_ranks = loaded.engine.parallel.world_size
    checks = all_checks()
    # Ignore checks that need more cards than the model uses.
    results = [result for result in found.results if checks[result.name].num_ranks <= num_ranks]
    named = {fallback.setting for result in results for fallback in result.fallbacks}
    return select(results, dict(_in_use(loaded, given, named)))


def with_selftest(loaded: Loaded, given: Loaded, machine: Machine, change: Change) -> Loaded:
    """Add the settings that the self-test of this card selects, with a log line for each. Without a
    stored result, the quick checks run first. `given`: the user's settings; `loaded` may also
    contain a preset."""
    for found in at_start(loaded, machine):
        choices = choices_for(loaded, given, found)
        for choice in choices:
            logger.warning("%s", line(choice))
        chosen = {choice.setting: choice.value for choice in choices if not choice.problem}
        flags = {name: value for name, value in chosen.items() if not is_variable(name)}
        env.set_missing({name: value for name, value in chosen.items() if name not in flags})
        return change(flags) if flags else loaded
    return loaded


def _in_use(loaded: Loaded, given: Loaded, named: set[str]) -> Iterator[tuple[str, InUse]]:
    flags = {flag.key: flag for flag in FLAGS}
    variables = env.environment()
    for name in named:
        if is_variable(name):
            yield name, InUse(variables.get(name, UNSET), name in variables)
        elif name in flags:
            is_users = given.sources[name][1] != DEFAULT
            shown = flags[name].shown(loaded.sources[name][0])
            if name == MODE:
                # PT_HPU_LAZY_MODE and --enforce-eager also determine the mode.
                shown = _mode(loaded)
                is_users |= "PT_HPU_LAZY_MODE" in variables
                is_users |= given.sources["enforce-eager"][1] != DEFAULT
            yield name, InUse(shown, is_users)


def _mode(loaded: Loaded) -> str:
    try:
        return env.hpu_mode(loaded.engine).mode
    except ConfigError:
        # The settings contradict each other; start-up reports the error.
        return loaded.engine.execution.mode


def failure_report(found: SelfTest, machine: Machine) -> bytes:
    """Report as JSON. Redacts the user's home folder, and the values of variables that match
    SECRET_NAMES and have at least MIN_SECRET characters."""
    packages = {name: machine.version(name) or "" for name in REPORTED_PACKAGES}
    variables = {
        name: word for name, word in machine.environment.items() if REPORTED_VARIABLES.match(name)
    }
    report = FailureReport(found, sys.version.split()[0], packages, variables)
    # Redact before encoding, since JSON escapes quotes and backslashes in a secret.
    fields = _redacted(msgspec.to_builtins(report._asdict()), _replacements(machine.environment))
    return msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n"


def _replacements(variables: Mapping[str, str]) -> dict[str, str]:
    """Replacements for secrets and the user's home folder in a report. A message may quote a value,
    so every spelling is replaced; longest first, since a secret may contain another secret."""
    secrets = {
        word
        for name, word in variables.items()
        if SECRET_NAMES.search(name) and len(word) >= MIN_SECRET
    }
    homes = {home for home in [variables.get("HOME", "")] if len(home) > 1}
    words = {
        spelling: shown
        for values, shown in ((homes, "~"), (secrets, "***"))
        for value in values
        for spelling in _spellings(value)
    }
    return {word: words[word] for word in sorted(words, key=len, reverse=True)}


def _spellings(value: str) -> set[str]:
    """Spellings of `value`: plain, JSON-escaped, as a Python literal, and JSON-escaped twice."""
    once = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return once | {repr(value)[1:-1]} | {json.dumps(word)[1:-1] for word in once}


def _redacted(value: object, replacements: Mapping[str, str]) -> object:
    if isinstance(value, dict):
        return {name: _redacted(entry, replacements) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(entry, replacements) for entry in value]
    if not isinstance(value, str):
        return value
    for word, shown_word in replacements.items():
        value = value.replace(word, shown_word)
    return value

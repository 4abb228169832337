"""Selects settings that avoid failed checks. Pure functions of the results and the current
settings."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engine.selftest.results import CheckResult, is_variable
from hpu.selftest.base import Check, all_checks


class InUse(NamedTuple):
    """Current value of a setting, and whether the user has set it."""

    value: str
    is_users: bool


class Choice(NamedTuple):
    """A setting that failed checks ask to change: its new value, or why it is not changed."""

    setting: str
    value: str
    """The value to set; empty with `problem`."""
    checks: tuple[str, ...]
    problem: str
    """Why the setting is not changed; empty if the setting is changed."""


def select(results: Iterable[CheckResult], in_use: Mapping[str, InUse]) -> list[Choice]:
    """Choices for the checks that fail or hang, without settings whose current value already avoids
    the failures.

    If several checks name a setting, its value must suit all of them, in the preference order of
    the first check. A setting that is missing in `in_use` does not exist.
    """
    wanted: dict[str, dict[str, tuple[str, ...]]] = {}
    for result in results:
        for fallback in result.fallbacks:
            wanted.setdefault(fallback.setting, {})[result.name] = fallback.values
    choices = []
    for setting, by_check in wanted.items():
        checks = tuple(by_check)
        accepted = [
            value
            for value in next(iter(by_check.values()))
            if all(value in values for values in by_check.values())
        ]
        current = in_use.get(setting)
        if current and current.value in accepted:
            continue
        problem = _problem(setting, accepted, current)
        choices.append(Choice(setting, "" if problem else accepted[0], checks, problem))
    return choices


def _problem(setting: str, accepted: list[str], current: InUse | None) -> str:
    if not current:
        return f"there is no setting {setting}"
    if current.is_users:
        return f"{shown(setting, current.value)} is your setting and is kept"
    if not accepted:
        return f"no value of {setting} avoids all failures"
    return ""


def shown(setting: str, value: str) -> str:
    """A setting in the form in which a user writes it."""
    if is_variable(setting):
        return f"{setting}={value}"
    if value in ("on", "off"):
        return f"--{'' if value == 'on' else 'no-'}{setting}"
    return f"--{setting}={value}"


def line(choice: Choice) -> str:
    """Log line with a choice and its reason."""
    names = ", ".join(choice.checks)
    verb = "fail" if len(choice.checks) > 1 else "fails"
    if choice.problem:
        return f"Self-test: {names} {verb}, and {choice.problem}"
    return f"Self-test: {names} {verb}: {shown(choice.setting, choice.value)}"


def checks_by_fallback() -> dict[str, list[Check]]:
    """Checks in the order of their names, by their fallbacks in the form of docs/selftest.md."""
    found: dict[str, list[Check]] = {}
    for check in sorted(all_checks().values(), key=lambda check: check.name):
        settings = [shown(entry.setting, entry.values[0]) for entry in check.fallbacks]
        found.setdefault(" ".join(f"`{setting}`" for setting in settings), []).append(check)
    return found

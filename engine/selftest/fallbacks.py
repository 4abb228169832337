"""Selects settings that avoid failed assumptions. Pure: the settings in use come in as facts."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engine.selftest.results import CheckResult, is_variable


class InUse(NamedTuple):
    """The value of a setting, and whether the user has chosen it."""

    value: str
    is_users: bool


class Choice(NamedTuple):
    """A setting that a failed check needs."""

    setting: str
    value: str
    """The value to set; empty with `problem`."""
    checks: tuple[str, ...]
    problem: str
    """Why the setting is not changed; empty if it is."""


def select(results: Iterable[CheckResult], in_use: Mapping[str, InUse]) -> list[Choice]:
    """Choices for the checks that fail or hang; a setting that already avoids them needs none.

    Several checks may name a setting: its value must suit all of them, and the first check's order
    decides. A setting that is not in `in_use` does not exist.
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
        return f"{shown(setting, current.value)} is your setting, and stays"
    if not accepted:
        return f"no value of {setting} avoids all of them"
    return ""


def shown(setting: str, value: str) -> str:
    """A setting as the user would write it."""
    if is_variable(setting):
        return f"{setting}={value}"
    if value in ("on", "off"):
        return f"--{'' if value == 'on' else 'no-'}{setting}"
    return f"--{setting}={value}"


def line(choice: Choice) -> str:
    """The line that says what was chosen, and why."""
    names = ", ".join(choice.checks)
    verb = "fail" if len(choice.checks) > 1 else "fails"
    if choice.problem:
        return f"Self-test: {names} {verb}, and {choice.problem}"
    return f"Self-test: {names} {verb}: {shown(choice.setting, choice.value)}"

"""Setting: help, flag names, variables, choices and range of a configuration field."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from config.errors import ConfigError

T = TypeVar("T")
_KEY = "setting"
MAX_DIGITS = 18
"""Maximum digits of an integer: every integer of this length fits 64 bits."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How users set a config field. Type and default come from the field."""

    help: str
    group: str = ""
    """Help group; empty: the group of the dataclass (config/loading/flags.py)."""
    name: str = ""
    """Flag name without the leading dashes; empty: the field's name with dashes for underscores."""
    aliases: tuple[str, ...] = ()
    switches: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    """Switch name -> (value that the switch sets, value that its `no-` form sets)."""
    variables: tuple[str, ...] = ()
    """Environment variables that are read if GAUDISERVE_<NAME> is not set."""
    switch_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that set a switch in `switches`; they win over `variables`."""
    choices: tuple[str, ...] = ()
    has_kinds: bool = False
    """Whether kinds defined in other packages are additional choices."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Alternative words for a choice, or for true and false of a switch."""
    minimum: float | None = None
    maximum: float | None = None
    is_secret: bool = False
    takes_several: bool = False
    """Whether the flag takes all words up to the next flag."""
    metavar: str = ""
    """Placeholder of the value in the help; empty: the choices, or the placeholder of the type."""


def metadata(help: str, **facts: Any) -> Mapping[str, Setting]:
    """Metadata of a dataclass field that has a Setting."""
    return {_KEY: Setting(help, **facts)}


def setting(default: T, help: str, **facts: Any) -> T:
    """A dataclass field with a default and a Setting."""
    value: T = field(default=default, metadata=metadata(help, **facts))
    return value


def settings_of(config: Any) -> dict[str, Setting]:
    """The settings of a dataclass or an instance: field name -> Setting, in field order."""
    return {
        setting.name: setting.metadata[_KEY]
        for setting in fields(config)
        if _KEY in setting.metadata
    }


def is_count(word: str) -> bool:
    """Whether a word is an unsigned integer of at most MAX_DIGITS digits."""
    word = word.strip()
    return word.isdecimal() and len(word) <= MAX_DIGITS


def check_settings(config: object) -> None:
    """Raise ConfigError for a field whose value is out of range or not among its choices. The
    choices of a field with `has_kinds` are not checked."""
    for name, facts in settings_of(config).items():
        value = getattr(config, name)
        if value is None:
            continue
        if facts.choices and not facts.has_kinds and value not in facts.choices:
            allowed = ", ".join(facts.choices)
            raise ConfigError(f"{name} is {value!r}, it must be one of {allowed}")
        below = facts.minimum is not None and value < facts.minimum
        if below or (facts.maximum is not None and value > facts.maximum):
            allowed = f"at least {facts.minimum}"
            if facts.maximum is not None:
                allowed = f"between {facts.minimum} and {facts.maximum}"
            raise ConfigError(f"{name} is {value}, it must be {allowed}")

"""Typed access to the JSON files of a checkpoint. Knows none of their fields."""

import json
from pathlib import Path
from typing import Any, TypeVar

from config.errors import ConfigError

T = TypeVar("T")
Json = dict[str, Any]


def read_json(file: Path) -> Json:
    """The object in `file`. ConfigError when it cannot be read, or holds something else."""
    value = read_any_json(file)
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a {type(value).__name__}, it must be an object")
    return value


def read_any_json(file: Path) -> Any:
    """What is in `file`. ConfigError when it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error


class Fields:
    """Typed access to a JSON object; an absent and a null field are the same."""

    def __init__(self, raw: Json, file: Path) -> None:
        self.raw = raw
        self.file = file

    def get(self, name: str, kind: type[T], default: T | None) -> Any:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{name} in {self.file} is {value!r}, it must be a {kind.__name__}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default it must be there."""
        value = self.get(name, int, default)
        if value is None:
            raise ConfigError(f"{self.file} has no {name}")
        if value < 1:
            raise ConfigError(f"{name} in {self.file} is {value}, it must be at least 1")
        return int(value)

    def number_or_none(self, name: str) -> float | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} in {self.file} is {value!r}, it must be a number")
        return float(value)

    def number(self, name: str, default: float) -> float:
        value = self.number_or_none(name)
        return default if value is None else value

    def numbers(self, name: str) -> tuple[float, ...]:
        values = self.get(name, list, [])
        if not all(isinstance(value, (int, float)) for value in values):
            raise ConfigError(f"{name} in {self.file} must hold numbers only")
        return tuple(float(value) for value in values)

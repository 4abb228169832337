"""Typed, bounded access to the JSON files of a checkpoint."""

import math
import reprlib
from pathlib import Path
from typing import Any, TypeVar

from config.errors import CheckpointError, ConfigError
from config.json_text import Json, parse_json
from config.whole_files import read_limited

T = TypeVar("T")

MAX_JSON_BYTES = 32 * 2**20
"""Maximum size of a JSON file. Published config files are below 2 MB; an index of 90,000 tensors is
below 10 MB."""
MAX_COUNT = 2**48
"""Maximum of integer fields; far above all published sizes."""
MAX_FLOAT32 = 3.4028234663852886e38
MAX_NUMBER = 65504.0
"""Maximum magnitude of numbers that are used in tensors, unless the field has another limit: the
largest number of float16, the narrowest model dtype. torch raises for a larger factor."""
MIN_NUMBER = 1e-30
"""Minimum magnitude of a nonzero number. The number and its reciprocal are well within float32."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 60


def shown(value: object) -> str:
    """The shortened repr of a value from a file, for error messages."""
    return _SHORT.repr(value)


def read_json(file: Path) -> Json:
    """The JSON object in `file`. Its finite numbers fit in float32. Raises ConfigError."""
    found = _object(read_any_json(file), file)
    _check_numbers(found, file)
    return found


def parse_json_object(data: bytes, file: str) -> Json:
    """The JSON object in `data`, which is read from `file`. Raises CheckpointError."""
    return _object(_parse(data, file), file)


def read_any_json(file: Path) -> Any:
    """The JSON value in `file`. Raises CheckpointError."""
    try:
        # A FIFO would block the start-up, or the thread that loads an adapter.
        data = read_limited(file, MAX_JSON_BYTES, takes_pipes=False)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return _parse(data, file)


def _object(value: object, file: object) -> Json:
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is a {type(value).__name__}, it must be a JSON object")
    return value


def _parse(data: bytes, file: object) -> Any:
    try:
        return parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error


def _check_numbers(found: Json, file: Path) -> None:
    """Raise ConfigError for a finite number, at any depth, that does not fit in float32. Fields
    that are read by name have tighter limits; libraries may convert the other fields to tensors.
    Infinity is allowed: published files have an infinite clamp limit, which torch accepts."""
    waiting: list[tuple[str, Any]] = [("", found)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.items())
        elif isinstance(value, list):
            waiting.extend((name, inner) for inner in value)
        elif isinstance(value, int | float) and MAX_FLOAT32 < abs(value) != math.inf:
            raise ConfigError(
                f"{shown(name)[1:-1]} in {file} is {shown(value)}, it must be from "
                f"{-MAX_FLOAT32:g} to {MAX_FLOAT32:g}"
            )


class Fields:
    """Typed access to a JSON object. A null field counts as absent."""

    def __init__(self, raw: Json, file: Path) -> None:
        self.raw = raw
        self.file = file

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fields) and (self.raw, self.file) == (other.raw, other.file)

    def get(self, name: str, kind: type[T], default: T | None) -> Any:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(
                f"{name} in {self.file} is {shown(value)}, it must be a {kind.__name__}"
            )
        return value

    def count(self, name: str, default: int | None = None, *, maximum: int = MAX_COUNT) -> int:
        """Integer field from 1 to `maximum`; required without a default."""
        value = self.count_or_none(name, maximum=maximum)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.file} has no {name}")
        return value

    def count_or_none(self, name: str, *, maximum: int = MAX_COUNT) -> int | None:
        """Integer field from 1 to `maximum`; None if absent."""
        value = self.get(name, int, None)
        if value is None:
            return None
        if value < 1:
            raise ConfigError(f"{name} in {self.file} is {shown(value)}, it must be at least 1")
        if value > maximum:
            raise ConfigError(
                f"{name} in {self.file} is {shown(value)}, it must be at most {maximum}"
            )
        return int(value)

    def integer(
        self, name: str, default: int, *, minimum: int = 0, maximum: int = MAX_COUNT
    ) -> int:
        """Integer field from `minimum` to `maximum`."""
        value: int = self.get(name, int, default)
        if not minimum <= value <= maximum:
            raise ConfigError(
                f"{name} in {self.file} is {shown(value)}, it must be from {minimum} to {maximum}"
            )
        return value

    def number_or_none(
        self,
        name: str,
        *,
        minimum: float = -MAX_NUMBER,
        above: float = -math.inf,
        maximum: float = MAX_NUMBER,
    ) -> float | None:
        """Finite number field that is at least `minimum`, above `above` and at most `maximum`; None
        if absent. Its magnitude must be at least MIN_NUMBER, or 0."""
        value = self.raw.get(name)
        if value is None:
            return None
        number = _finite(value)
        if number is None:
            raise ConfigError(
                f"{name} in {self.file} is {shown(value)}, it must be a finite number"
            )
        for is_wrong, allowed in (
            (number < minimum, f"at least {minimum:g}"),
            (number <= above, f"above {above:g}"),
            (number > maximum, f"at most {maximum:g}"),
            (0 < abs(number) < MIN_NUMBER, f"0, or at least {MIN_NUMBER:g} from 0"),
        ):
            if is_wrong:
                raise ConfigError(f"{name} in {self.file} is {number:g}, it must be {allowed}")
        return number

    def number(
        self, name: str, default: float, *, above: float = -math.inf, maximum: float = MAX_NUMBER
    ) -> float:
        value = self.number_or_none(name, above=above, maximum=maximum)
        return default if value is None else value

    def numbers(self, name: str, *, above: float = -math.inf) -> tuple[float, ...]:
        """List of numbers above `above`, each checked like `number`; empty if absent."""
        values = self.get(name, list, [])
        if None in values:
            raise ConfigError(f"{name} in {self.file} has null, it must contain only numbers")
        entries = (Fields({name: value}, self.file) for value in values)
        return tuple(entry.number(name, 0.0, above=above) for entry in entries)


def _finite(value: object) -> float | None:
    """`value` as a finite number, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None

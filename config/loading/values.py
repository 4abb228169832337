"""Converts given values (words, YAML values, keywords) to the type of a setting, and makes the
errors about them."""

import difflib
import json
import math
import os
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from config.errors import ConfigError
from config.json_text import parse_json
from config.loading.flags import Flag

_NUMBER = re.compile(r"^([+-]?\d[\d_]*(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?$")
# A lower-case unit is a power of 1000, a capital unit a power of 1024, as in vLLM.
UNITS = {
    letter: base ** (1 + power)
    for letters, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, letter in enumerate(letters)
}
_FLAG_NAME = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
_BOOLS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLS |= {"false": False, "no": False, "off": False, "0": False}
MAX_INTEGER = 2**63
MAX_MESSAGE_CHARACTERS = 2000
"""Characters of a message that `clipped` keeps."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 400
UNSET = ("auto", "none", "null")
"""Words that select the default of an optional setting."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value for a setting, as given by a source."""

    name: str
    """The flag's name or an alias of the flag."""
    value: object
    source: str
    """Source for error messages, such as flag --port or variable GAUDISERVE_PORT."""


def shown(value: object) -> str:
    """The shortened repr of a value, for error messages."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        return "an integer with more digits than Python prints"


def clipped(message: str) -> str:
    """`message`, shortened in the middle: it may quote a long value, and the allowed values are at
    the end."""
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    half = MAX_MESSAGE_CHARACTERS // 2
    return f"{message[:half]} [...] {message[-half:]}"


MAX_LISTED = 30
"""Maximum number of choices that an error lists."""
NUM_NEAREST = 3
"""Maximum number of near names in an error with more choices."""


def nearest(word: str, known: Collection[str]) -> str:
    """`; did you mean x?` if a known word is spelled similarly; otherwise empty, since a wrong hint
    is worse than none. The lengths may differ by 2, or by a quarter in long words, unless one word
    is a prefix of the other. If no word is similar, one word may also be the end of the other
    (--input-len and --random-input-len)."""
    alike = [
        other
        for other in known
        if abs(len(other) - len(word)) <= max(2, len(word) // 4)
        or other.startswith(word)
        or word.startswith(other)
    ]
    near = difflib.get_close_matches(word, alike, n=1, cutoff=0.8) or [
        other for other in known if _is_end(word, other) or _is_end(other, word)
    ]
    return f"; did you mean {near[0]}?" if near else ""


def _is_end(word: str, end: str) -> bool:
    """Whether `word` is `end` with another part in front; `end` must have at least two parts."""
    end = end.lstrip("-")
    return "-" in end and word.endswith(f"-{end}") and word.lstrip("-") != end


def joined(problems: Iterable[str]) -> str:
    """One message with all problems."""
    lines = list(dict.fromkeys(problems))
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} settings are invalid:" + "".join(f"\n  {line}" for line in lines)


def convert(flag: Flag, given: Given) -> object:
    """Convert a given value for the field of `flag`. Raises ConfigError."""
    switches = flag.all_switches
    accepts_auto = flag.kind in (int, float) or (
        flag.is_optional and (flag.kind is bool or bool(flag.setting.choices))
    )
    is_unset = given.value is None or (
        accepts_auto and isinstance(given.value, str) and given.value.lower() in UNSET
    )
    if given.name in switches and not (is_unset and flag.kind is bool and flag.is_optional):
        on, off = switches[given.name]
        return on if truth(given, flag.setting.spellings) else off
    if is_unset:
        if not flag.is_optional:
            raise wrong(
                given, "a value: it has no automatic default", is_secret=flag.setting.is_secret
            )
        return None
    if flag.kind is tuple:
        return _texts(given, is_secret=flag.setting.is_secret)
    if flag.kind is str:
        return _choice(flag, given)
    return _number(flag, given)


def truth(given: Given, spellings: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Whether a switch is on; `spellings`: additional words for true and false."""
    if isinstance(given.value, bool):
        return given.value
    word = (given.value if isinstance(given.value, str) else shown(given.value)).strip().lower()
    found = _BOOLS.get(spellings.get(word, word))
    if found is None:
        raise wrong(given, "true or false")
    return found


def wrong(given: Given, expected: str, *, is_secret: bool = False) -> ConfigError:
    """The error for a value that is not allowed."""
    text = "***" if is_secret else shown(given.value)
    return ConfigError(
        with_sources(f"--{given.name} is {text}, it must be {expected}", (given.source,))
    )


def with_sources(message: str, sources: Iterable[str]) -> str:
    """`message` with the sources of the invalid values, except flags that `message` names."""
    words = set(_FLAG_NAME.findall(message))
    left = [source for source in sources if source.removeprefix("flag ") not in words]
    return message + (f" (from {', '.join(left)})" if left else "")


def _number(flag: Flag, given: Given) -> int | float:
    whole = flag.kind is int
    expected = "a whole number" if whole else "a number"
    if whole and flag.setting.maximum is None:
        expected += " such as 8192 or 8K"
    if flag.is_optional:
        expected += ", or auto"
    value = given.value
    if isinstance(value, str):
        match = _NUMBER.match(value.strip())
        if match is None:
            value = _plain_float(value)
        else:
            digits, unit, _ = match.groups()
            value = _plain_number(digits)
            value = None if value is None else value * UNITS.get(unit, 1)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(given, expected)
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise wrong(given, "less than 2**63")
    if not math.isfinite(value):
        raise wrong(given, expected)
    if not whole:
        return float(value)
    if value != int(value):
        raise wrong(given, expected)
    return int(value)


def _plain_number(digits: str) -> int | float | None:
    """`digits` as a number; None for 1__0, and for more digits than Python converts."""
    try:
        return float(digits) if "." in digits else int(digits)
    except ValueError:
        return None


def _plain_float(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _choice(flag: Flag, given: Given) -> str:
    value = given.value
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping) and not flag.setting.choices:
        try:
            # YAML dates have no JSON representation.
            value = json.dumps(value, default=str)
        except (TypeError, ValueError):
            raise wrong(given, "a mapping of strings to values") from None
    if not isinstance(value, str):
        raise wrong(given, "a string (in quotes)", is_secret=flag.setting.is_secret)
    if not flag.setting.choices:
        return value
    word = flag.setting.spellings.get(value.lower(), value.lower())
    if word not in flag.setting.choices and not flag.setting.has_kinds:
        raise unknown_choice(given, flag.setting.choices)
    return word


def unknown_choice(given: Given, choices: Sequence[str]) -> ConfigError:
    """The error for a word that is not in `choices`."""
    word = str(given.value).lower()
    if len(choices) > MAX_LISTED:
        near = difflib.get_close_matches(word, choices, n=NUM_NEAREST)
        # A family may have longer names: qwen3 and qwen3_coder for qwen.
        near = near or [name for name in choices if word and name.startswith(word)][:NUM_NEAREST]
        names = f", the nearest: {', '.join(near)}" if near else ""
        return wrong(
            given,
            f"one of {len(choices)} names{names}; `gaudiserve serve --help={given.name}` lists all",
        )
    # All choices are listed, so the hint may be less similar: bf16 for bfloat16, but not hpu for
    # gpu.
    alike = [choice for choice in choices if choice[:1] == word[:1]]
    near = difflib.get_close_matches(word, alike, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return wrong(given, f"one of {', '.join(choices)}{hint}")


def _texts(given: Given, *, is_secret: bool) -> tuple[str, ...]:
    """Non-empty strings from a list, a JSON list, or one string. Commas separate the entries of a
    string, except in a secret or in a JSON object."""
    value = given.value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError:
            raise wrong(given, "a JSON list of strings", is_secret=is_secret) from None
    elif isinstance(value, str):
        value = (
            [value]
            if is_secret or value.lstrip().startswith("{")
            else [part.strip() for part in value.split(",")]
        )
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise wrong(given, "a string, or a list of strings (in quotes)", is_secret=is_secret)
    if not all(value):
        message = f"--{given.name} is empty, it must be left out or have a value"
        raise ConfigError(with_sources(message, (given.source,)))
    return tuple(value)

"""Converts vLLM's spellings of flags and of their values to spellings that the parser knows, for
example short forms, dotted flags and abbreviations."""

import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from config.errors import ConfigError
from config.json_text import Json, parse_json
from config.loading.flags import FLAGS
from config.loading.values import UNITS, Given
from config.loading.vllm_flags import ACCEPTED, SHORT_FORMS, absence

MAX_DOTS = 16
"""Maximum number of dots in a dotted flag; --speculative-config.method has one dot."""
MAX_SHOWN = 4
"""Maximum number of candidates in the error about an ambiguous abbreviation."""
_SHORT = re.compile(r"(-[a-zA-Z-]+)((?:[=.].*)?)$", re.DOTALL)
_DOTTED = re.compile(r"(--[a-zA-Z][\w-]*)\.([^=]+?)(\+?)(?:=(.*))?$", re.DOTALL)
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])$")
FIELD_FLAGS = {
    "rope-scaling": "hf-overrides.rope_scaling",
    "rope-theta": "hf-overrides.rope_theta",
}
"""Flags of older versions of vLLM, and the fields of config.json that they set. They are added to
the object of --hf-overrides, which they do not replace."""
_SWITCH_NAMES = {
    *(name for name, accepted in ACCEPTED.items() if accepted.is_switch),
    *(name for flag in FLAGS for name in flag.all_switches),
}
_SWITCHES = {"true": "--NAME", "false": "--no-NAME"}


class Spelled(NamedTuple):
    """A command line with vLLM's spellings converted."""

    words: list[str]
    notes: list[str]
    """Notes for the operator: each abbreviation and its full flag."""


def respelled(words: Iterable[str], known: Collection[str]) -> Spelled:
    """`words` with full flag names; `known`: the flags of the parser. Raises ConfigError."""
    notes: list[str] = []
    whole = []
    for word in _with_objects(map(_override, map(_long_form, map(with_dashes, words)))):
        name, equals, value = word.partition("=")
        meant = abbreviated(name, known)
        if len(meant) == 1:
            notes.append(f"{name} is read as {meant[0]}; write the whole name")
            word = meant[0] + equals + value
        whole.append(word)
    return Spelled(list(_with_plain_switches(whole)), notes)


def with_dashes(word: str) -> str:
    """`word` with dashes in the flag's name: --max-model-len for --max_model_len. The keys of a
    dotted flag are not changed."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name, dot, keys = name.partition(".")
    return name.replace("_", "-") + dot + keys + equals + value


def abbreviated(name: str, known: Collection[str]) -> list[str]:
    """Flags that `name` may abbreviate, a single name for each effect; empty for a full name, and
    for a vLLM flag that is not in this version."""
    if not re.match(r"--[a-z]", name) or name in known or absence(name):
        return []
    meant: dict[object, str] = {}
    for flag in known:
        if flag.startswith(name):
            meant.setdefault(_meaning(flag), flag)
    return list(meant.values())


def ambiguity(name: str, known: Collection[str]) -> str:
    """`; it may be ...` for an abbreviation of 2 to MAX_SHOWN flags, else empty."""
    meant = sorted(abbreviated(name, known))
    return f"; it may be {', '.join(meant)}" if 1 < len(meant) <= MAX_SHOWN else ""


_SETTINGS = {name: (flag.key, flag.all_switches.get(name)) for flag in FLAGS for name in flag.names}


def _meaning(flag: str) -> object:
    """A key that is equal for flag names with the same effect."""
    name = flag.lstrip("-")
    if name.startswith("no-") and name[3:] in _SETTINGS:
        key, states = _SETTINGS[name[3:]]
        return key, states and states[::-1]
    return _SETTINGS.get(name, name)


def _long_form(word: str) -> str:
    # -O may be followed directly by its value, as in a compiler's -O2.
    match = _SHORT.match(re.sub(r"^-O(?=\d)", "-O=", word))
    if match is None or match[1] not in SHORT_FORMS:
        return word
    return SHORT_FORMS[match[1]] + match[2]


def _override(word: str) -> str:
    name = re.split(r"[.=]", word, maxsplit=1)[0]
    field = FIELD_FLAGS.get(name.removeprefix("--"))
    return f"--{field}{word[len(name) :]}" if field else word


def _with_objects(words: Iterable[str]) -> list[str]:
    """`words` with dotted flags of the same name merged into one flag with a JSON object, at the
    end: --a.b.c 1 becomes --a '{"b": {"c": 1}}', --a.b+ 1,2 becomes --a '{"b": ["1", "2"]}'."""
    rest = deque(words)
    plain: list[str] = []
    objects: dict[str, Json] = {}
    while rest:
        word = rest.popleft()
        match = _DOTTED.match(word)
        if match is None:
            plain.append(word)
            continue
        name, path, plus, value = match.groups()
        if value is None:
            if not rest:
                raise ConfigError(f"{word} has no value, it must have one: {word} VALUE")
            value = rest.popleft()
        keys = path.split(".")
        if len(keys) > MAX_DOTS:
            raise ConfigError(f"{name} has {len(keys)} dots, it may have {MAX_DOTS}")
        set_entry(objects.setdefault(name, {}), keys, value.split(",") if plus else _value(value))
    for name, content in objects.items():
        if name == "--hf-overrides":
            content = {**_last_object(plain, name), **content}
        plain += [name, json.dumps(content)]
    return plain


def _last_object(words: list[str], name: str) -> dict[str, object]:
    """The JSON object that is the value of the last flag `name` in `words`; otherwise empty."""
    for index in range(len(words) - 1, -1, -1):
        flag, equals, value = words[index].partition("=")
        if flag == name:
            return _object(value if equals else "".join(words[index + 1 : index + 2]))
    return {}


def _object(value: object) -> dict[str, object]:
    """`value` if it is an object, or the JSON object in it; otherwise empty."""
    if isinstance(value, str):
        value = _value(value)
    return dict(value) if isinstance(value, dict) else {}


def with_objects_of_dots(content: Mapping[Any, Any]) -> list[tuple[Any, object]]:
    """The entries of a file or keywords, with dotted keys of the same name merged into an object at
    the end. Text values of dotted keys are parsed as on the command line."""
    plain: dict[Any, object] = {}
    objects: dict[str, Json] = {}
    for key, value in content.items():
        name, *keys = _path(key)
        if not keys or len(keys) > MAX_DOTS:
            plain[key] = value
            continue
        if isinstance(value, str):
            value = value.split(",") if keys[-1].endswith("+") else _value(value)
        set_entry(objects.setdefault(name, {}), [*keys[:-1], keys[-1].removesuffix("+")], value)
    for key in ("hf-overrides", "hf_overrides"):
        if "hf-overrides" in objects and (before := _object(plain.get(key))):
            del plain[key]
            objects["hf-overrides"] = {**before, **objects["hf-overrides"]}
    return [*plain.items(), *objects.items()]


def _path(key: object) -> list[str]:
    """(flag name, keys within its object) for a key of a file."""
    name, *keys = str(key).split(".")
    name = name.replace("_", "-")
    return [*FIELD_FLAGS.get(name, name).split("."), *keys]


MAX_OPTIMIZATION_LEVEL = 3
"""vLLM's highest optimization level."""
_LEVEL_FLAGS = ("compilation-config", "optimization-level")


def levels_of(given: Given) -> list[int]:
    """vLLM's optimization level in `given`, which is a number (-O0, --optimization-level 0) or an
    object with a level or mode (-O.level=0); empty if `given` sets no level. Mode NONE is level
    0."""
    if given.name not in _LEVEL_FLAGS:
        return []
    value = _value(given.value) if isinstance(given.value, str) else given.value
    if isinstance(value, Mapping):
        value = value.get("mode", value.get("level"))
    if isinstance(value, str) and value.upper() == "NONE":
        return [0]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def set_entry(target: Json, keys: list[str], value: object) -> None:
    """Set the entry at the path `keys`; lists are extended, objects merged."""
    *parents, last = keys
    for key in parents:
        if not isinstance(target.get(key), dict):
            target[key] = {}
        target = target[key]
    before = target.get(last)
    if isinstance(before, list) and isinstance(value, list):
        before += value
    elif isinstance(before, dict) and isinstance(value, dict):
        before.update(value)
    else:
        target[last] = value


def _value(word: str) -> Any:
    """JSON if it parses, else a number with a unit (80g), else text."""
    try:
        return parse_json(word)
    except ValueError:
        match = _WITH_UNIT.match(word)
        return word if match is None else int(float(match[1]) * UNITS[match[2]])


def _with_plain_switches(words: Iterable[str]) -> Iterator[str]:
    """`words` without the values that vLLM allows after switches, and without `--no-` flags of
    unsupported features."""
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        if name[2:] in _SWITCH_NAMES:
            if not equals and rest and rest[0].lower() in _SWITCHES:
                value = rest.popleft()
            word = _SWITCHES.get(value.lower(), word).replace("NAME", name[2:])
        # --no-enable-eplb turns on nothing, so it needs no support.
        if not (word.startswith("--no-") and absence(word)):
            yield word

"""GrammarSpec: the grammar of an output as given in a request, before it is compiled."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from config.errors import UserError, value_text
from config.json_text import parse_json

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
FREE = "free"
"""Any text, after reasoning with a token limit. Internal: requests cannot set it."""
NOUNS = {
    "json": "JSON schema",
    "json_object": "grammar of JSON objects",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
    "structural_tag": "structural tag",
    FREE: "limit of the reasoning",
}
"""Name of each kind in errors."""
MAX_CHARACTERS = 1 << 18
"""Maximum length of a spec in characters (256 Ki). Every sequence sends its spec to the engine."""
MAX_REQUEST_CHARACTERS = 1 << 24
"""Maximum length of a spec, times the sequences of its request."""
MAX_CHOICES = 10_000


class ThinkingSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reasoning before the grammar applies: from any tag in `opens` to any tag in `closes`."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    is_inside: bool
    """Whether the output starts inside the reasoning; otherwise it may start with any of
    `opens`."""
    skips_blanks: bool
    """Whether line breaks may separate the reasoning from the rest."""


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Grammar of an output, before compilation. `kind` is FREE or one of KINDS; `text` is JSON
    for json (a schema), choice (a list of strings) and structural_tag, the pattern or grammar for
    regex and grammar, and empty for json_object and FREE. Equal specs compile to the same
    grammar."""

    kind: str
    text: str = ""
    thinking: ThinkingSpec | None = None

    @property
    def noun(self) -> str:
        """Name of the kind in errors."""
        return NOUNS[self.kind]

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, FREE):
            raise _bad(f"a grammar of kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if len(self.text) > MAX_CHARACTERS:
            raise _bad(
                f"{self.kind} has {len(self.text)} characters, at most {MAX_CHARACTERS} are allowed"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise _bad(f"{self.kind} has a lone surrogate, it must be valid Unicode text") from None


def grammar_spec(fields: Mapping[str, Any], name: str | None = None) -> GrammarSpec | None:
    """The spec of a request's structured_outputs, `{kind: value}` with at most one kind set; None
    if no kind is set. Raises UserError. `name`: the field with the value, for errors."""
    named = {kind: value for kind, value in fields.items() if not _is_unset(kind, value)}
    strange = sorted(named.keys() - set(KINDS))
    if strange:
        raise _bad(f"structured_outputs has {strange[0][:40]!r}, it may have {', '.join(KINDS)}")
    if len(named) > 1:
        raise _bad(f"structured_outputs sets {' and '.join(sorted(named))}, it must set only one")
    for kind, value in named.items():
        return _SPECS[kind](name or f"structured_outputs.{kind}", value)
    return None


def fields_of(spec: GrammarSpec) -> dict[str, object]:
    """The structured_outputs of a request for the grammar of `spec`, without its reasoning; empty
    for any text. The inverse of `grammar_spec`."""
    if spec.kind == FREE:
        return {}
    if spec.kind == "json_object":
        return {spec.kind: True}
    is_text = spec.kind in ("regex", "grammar")
    return {spec.kind: spec.text if is_text else json.loads(spec.text)}


def _is_unset(name: str, value: object) -> bool:
    # A JSON schema may be false (nothing is valid), which is not the same as unset.
    return value is None or (value is False and name != "json")


def _json(name: str, value: object) -> GrammarSpec:
    value = _parsed(name, value)
    if not isinstance(value, (dict, bool)):
        raise _bad(f"{name} is {value_text(value)}, it must be an object")
    return GrammarSpec("json", _to_json(name, value))


def _json_object(name: str, value: object) -> GrammarSpec:
    if value is not True:
        raise _bad(f"{name} is {value_text(value)}, it must be true")
    return GrammarSpec("json_object")


def _text(kind: str, name: str, value: object) -> GrammarSpec:
    if not isinstance(value, str) or not value:
        raise _bad(f"{name} is {value_text(value)}, it must be a string that is not empty")
    return GrammarSpec(kind, value)


def _choice(name: str, value: object) -> GrammarSpec:
    if not isinstance(value, (list, tuple)) or not value:
        raise _bad(f"{name} is {value_text(value)}, it must be a list of at least 1 string")
    if len(value) > MAX_CHOICES:
        raise _bad(f"{name} has {len(value)} strings, at most {MAX_CHOICES} are allowed")
    for choice in value:
        if not isinstance(choice, str) or not choice:
            shown = value_text(choice)
            raise _bad(f"{name} has {shown}, it must have strings that are not empty")
    return GrammarSpec("choice", _to_json(name, list(value)))


def _structural_tag(name: str, value: object) -> GrammarSpec:
    value = _parsed(name, value)
    if not isinstance(value, dict):
        raise _bad(f"{name} is {value_text(value)}, it must be an object")
    return GrammarSpec("structural_tag", _to_json(name, value))


_SPECS: dict[str, Callable[[str, object], GrammarSpec]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": partial(_text, "regex"),
    "grammar": partial(_text, "grammar"),
    "choice": _choice,
    "structural_tag": _structural_tag,
}


def _parsed(name: str, value: object) -> object:
    """`value`; a string is parsed as JSON."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_CHARACTERS:
        raise _bad(f"{name} has {len(value)} characters, at most {MAX_CHARACTERS} are allowed")
    try:
        return parse_json(value, is_finite=True)
    except json.JSONDecodeError as error:
        raise _bad(
            f"{name} is a string that is not JSON, it must be an object, or its JSON: "
            f"{error.msg.lower()} at character {error.pos}"
        ) from None
    except ValueError as error:
        raise _bad(f"{name} is a string that is not JSON: {error}") from None


def _to_json(name: str, value: object) -> str:
    """Compact JSON in the given key order, which is the order of an object's properties. Raises
    UserError if `least_characters` exceeds MAX_CHARACTERS, and for a value that is not JSON, such
    as NaN."""
    try:
        if (least := least_characters(value)) > MAX_CHARACTERS:
            raise _bad(
                f"{name} has at least {least} characters as JSON, at most {MAX_CHARACTERS} are "
                "allowed"
            )
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        problem = _infinite_number(value) or str(error)
        raise _bad(f"{name} cannot be written as JSON: {problem}") from None


def _infinite_number(value: object) -> str:
    """Description of a NaN or infinite number in `value`; empty without such a number."""
    unread: list[tuple[object, object]] = [("", value)]
    while unread:
        key, entry = unread.pop()
        if isinstance(entry, float) and not math.isfinite(entry):
            return f"its {value_text(key)} is {entry}, it must be a finite number"
        if isinstance(entry, dict):
            unread += entry.items()
        elif isinstance(entry, (list, tuple)):
            unread += [(key, inner) for inner in entry]
    return ""


def least_characters(value: object) -> int:
    """Lower bound of the length of `value` as JSON. Counting stops beyond MAX_CHARACTERS."""
    count, unread = 0, [value]
    while unread:
        entry = unread.pop()
        if isinstance(entry, str):
            count += 2 + len(entry)
        elif isinstance(entry, (dict, list, tuple)):
            # Brackets and commas; for an object also the quotes and colons of its keys.
            count += 1 + len(entry) * (4 if isinstance(entry, dict) else 1)
        else:
            count += 1
        if count > MAX_CHARACTERS:
            break
        if isinstance(entry, dict):
            count += sum(len(name) for name in entry if isinstance(name, str))
            unread += entry.values()
        elif isinstance(entry, (list, tuple)):
            unread += entry
    return count


def _bad(message: str) -> UserError:
    return UserError(message, param="structured_outputs")

"""Lists and objects of bodies: how long they may be, and entries that are checked only up to the
first wrong one. By itself pydantic describes every wrong entry: of four millions in 15 s and 5 GB.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

MAX_TOKEN_IDS = 300_000
"""Of the vocabulary, in one field: more than any model has; each is looked at on the event loop."""
MAX_PROMPT_IDS = 2**22
MAX_STRINGS = 16_384
MAX_MESSAGES = 100_000
"""Or items of a response."""
MAX_PARTS = 16_384
"""Parts, blocks or calls of one message."""
MAX_TOOLS = 4_096
MAX_DOCUMENTS = 16_384
MAX_KEYS = 4_096
"""Of an object whose keys the caller chooses."""
_SHOWN = 40
_NAMES = {str: "a string", int: "an integer", float: "a number", dict: "an object"}
_KINDS: dict[type, tuple[type, ...]] = {float: (float, int)}
"""What is taken for what, by exact types: a boolean is no number."""


def whole(value: object) -> object:
    """3.0 is taken for 3; a number that no field could mean is refused before it is printed."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("Input should fit 64 bits")
    return value


def _check_length(value: list[Any] | dict[str, Any], most: int) -> None:
    if len(value) > most:
        raise ValueError(f"it has {len(value)} entries, at most {most} are taken")


def _wrong(place: object, value: object, kind: type) -> ValueError:
    shown = f"{value!r:.{_SHOWN}}" if isinstance(value, (bool, int, float)) else "none"
    if isinstance(value, str):
        shown = repr(value[:_SHOWN])
    return ValueError(f"entry {place} must be {_NAMES[kind]}, it is {shown}")


def _entries(kind: type, most: int) -> Callable[[object], object]:
    kinds = _KINDS.get(kind, (kind,))

    def check(value: object) -> object:
        if isinstance(value, list):
            _check_length(value, most)
            for place, one in enumerate(value):
                if type(one) not in kinds:
                    raise _wrong(place, one, kind)
        elif isinstance(value, dict):
            _check_length(value, most)
            for key, one in value.items():
                if type(one) not in kinds:
                    raise _wrong(repr(key[:_SHOWN]), one, kind)
        return value

    return check


def _integers(most: int, *, is_all: bool = False) -> Callable[[object], object]:
    """`is_all`: there is no check of pydantic's behind this one."""

    def check(value: object) -> object:
        if not isinstance(value, list):
            if is_all:
                raise ValueError("Input should be a valid list")
            return value
        _check_length(value, most)
        made = value
        for place, one in enumerate(value):
            if type(one) is not int or not -(2**63) <= one < 2**63:
                one = whole(one)
                if type(one) is not int:
                    raise _wrong(place, one, int)
                if made is value:
                    made = value.copy()
                made[place] = one
        return made

    return check


def _length(most: int) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, (list, dict)):
            _check_length(value, most)
        return value

    return check


TokenIds = Annotated[
    list[int], Field(max_length=MAX_TOKEN_IDS), BeforeValidator(_integers(MAX_TOKEN_IDS))
]
PromptIds = Annotated[
    list[int],
    # Not looked at again by pydantic, which would hold the GIL for all of them.
    PlainValidator(_integers(MAX_PROMPT_IDS, is_all=True)),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "maxItems": MAX_PROMPT_IDS}),
]
Strings = Annotated[
    list[str], Field(max_length=MAX_STRINGS), BeforeValidator(_entries(str, MAX_STRINGS))
]
Words = Annotated[
    list[str], Field(max_length=MAX_TOKEN_IDS), BeforeValidator(_entries(str, MAX_TOKEN_IDS))
]
"""As Strings, of which there may be as many as a vocabulary has."""
Documents = Annotated[
    list[dict[str, Any]],
    Field(max_length=MAX_DOCUMENTS),
    BeforeValidator(_entries(dict, MAX_DOCUMENTS)),
]
Biases = Annotated[
    dict[str, float],
    Field(max_length=MAX_TOKEN_IDS),
    BeforeValidator(_entries(float, MAX_TOKEN_IDS)),
]
Labels = Annotated[
    dict[str, str], Field(max_length=MAX_KEYS), BeforeValidator(_entries(str, MAX_KEYS))
]
Variables = Annotated[
    dict[str, Any], Field(max_length=MAX_KEYS), BeforeValidator(_length(MAX_KEYS))
]
Tools = Annotated[list[Any], Field(max_length=MAX_TOOLS), BeforeValidator(_length(MAX_TOOLS))]
Messages = Annotated[
    list[Any], Field(max_length=MAX_MESSAGES), BeforeValidator(_length(MAX_MESSAGES))
]
Blocks = Annotated[list[Any], Field(max_length=MAX_PARTS), BeforeValidator(_length(MAX_PARTS))]

"""Bounded field types for lists, objects and texts in request bodies, validated up to the first
invalid entry. pydantic alone would report every invalid entry: four million entries in 15 s and
5 GB. Also types for numbers in headers and query parameters."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from config.errors import value_text
from config.json_text import Json
from config.params.sampling import MAX_LISTED_BIASES, MAX_LISTED_TOKENS
from config.whole_files import MAX_PATH_CHARACTERS

MAX_TOKEN_IDS = MAX_LISTED_TOKENS
"""Maximum token ids of a field other than a prompt, and maximum texts of a list of words."""
MAX_PROMPT_IDS = 2**22
MAX_STRINGS = 16_384
MAX_MESSAGES = 100_000
"""Maximum messages of a conversation, or input items of a response."""
MAX_PARTS = 16_384
"""Maximum content parts, blocks or tool calls of a message."""
MAX_TOOLS = 4_096
MAX_DOCUMENTS = 16_384
MAX_KEYS = 4_096
"""Maximum keys of an object with arbitrary keys."""
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512
"""Limits of the OpenAI API on `metadata`."""
MAX_SAFETY_IDENTIFIER_CHARACTERS = 64
"""Limit of the OpenAI API on `safety_identifier`."""
MAX_LABEL_CHARACTERS = 512
"""Limit on short texts that the OpenAI API does not limit, such as user and service_tier."""
MAX_USER_ID_CHARACTERS = 256
"""Limit of the Messages API on `metadata.user_id`."""
MAX_FIELD_VALUES = 2**17
"""Maximum values in a field with arbitrary structure, such as tools. A JSON schema with more values
exceeds the character limit of a grammar."""
MAX_FIELD_CHARACTERS = 2**21
"""Default maximum of the characters of texts, keys and long integers in a field with arbitrary
structure."""
MAX_RENDERED_CHARACTERS = 2**24
"""Maximum characters in a field that only the chat template reads."""
IDS_AT_ONCE = 16_384
"""Integers checked in a single call, which holds the GIL for a millisecond."""
_BITS_PER_DIGIT = 3
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_SHOWN = 40
_NAMES = {str: "a string", int: "an integer", float: "a number", dict: "an object"}


def whole(value: object) -> object:
    """Convert integral floats below 2**63 in magnitude, such as 3.0, to int. Raises ValueError for
    integers beyond 64 bits, before an error message prints them."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"is {value_text(value)}, it must be between {-(2**63)} and {2**63 - 1}")
    return value


def _check_length(value: list[Any] | Json, max_length: int) -> None:
    if len(value) > max_length:
        raise ValueError(f"has {len(value)} entries, at most {max_length} are allowed")


def _invalid_entry(key: object, value: object, kind: type) -> ValueError:
    return ValueError(f"[{key}] is {value_text(value)}, it must be {_NAMES[kind]}")


def _entries(kind: type, max_length: int) -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, list):
            raise _not_a_list(value, kind)
        _check_length(value, max_length)
        for index, entry in enumerate(value):
            if type(entry) is not kind:
                raise _invalid_entry(index, entry, kind)
        return value

    return check


def _not_a_list(value: object, kind: type) -> ValueError:
    entries = f"{_NAMES[kind].partition(' ')[2]}s"
    return ValueError(f"is {value_text(value)}, it must be a list of {entries}")


def _check_biases(value: object) -> object:
    if isinstance(value, dict):
        _check_length(value, MAX_LISTED_BIASES)
        for key, bias in value.items():
            # A boolean is not a number.
            if type(bias) not in (int, float):
                raise _invalid_entry(repr(key[:_SHOWN]), bias, float)
    return value


def _integers(max_length: int) -> Callable[[object], list[int]]:
    def check(value: object) -> list[int]:
        if not isinstance(value, list):
            raise _not_a_list(value, int)
        _check_length(value, max_length)
        converted = value
        for start in range(0, len(value), IDS_AT_ONCE):
            part = value[start : start + IDS_AT_ONCE]
            if _are_integers(part):
                continue
            if converted is value:
                converted = value.copy()
            for index, entry in enumerate(part, start):
                converted[index] = _integer(index, entry)
        return converted

    return check


def _are_integers(values: list[Any]) -> bool:
    if not set(map(type, values)) <= {int}:
        return False
    try:
        np.fromiter(values, dtype=np.int64, count=len(values))
    except OverflowError:
        return False
    return True


def _integer(index: int, entry: object) -> int:
    try:
        entry = whole(entry)
    except ValueError as error:
        raise ValueError(f"[{index}] {error}") from None
    if type(entry) is not int:
        raise _invalid_entry(index, entry, int)
    return entry


def _text(max_length: int) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, str):
            _check_characters(value, max_length)
        return value

    return check


def _check_characters(text: str, max_length: int, what: str = "has") -> None:
    if len(text) > max_length:
        raise ValueError(f"{what} {len(text)} characters, at most {max_length} are allowed")


def _check_metadata(value: object) -> object:
    if isinstance(value, dict):
        _check_length(value, MAX_METADATA_PAIRS)
        for key, text in value.items():
            _check_characters(key, MAX_METADATA_KEY_CHARACTERS, "has a key of")
            if type(text) is not str:
                raise _invalid_entry(repr(key[:_SHOWN]), text, str)
            _check_characters(text, MAX_METADATA_VALUE_CHARACTERS, f"[{key!r}] has")
    return value


def _length(max_length: int) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, (list, dict)):
            _check_length(value, max_length)
        return value

    return check


def _structure(max_characters: int = MAX_FIELD_CHARACTERS) -> BeforeValidator:

    def check(value: object) -> object:
        _check_structure(value, max_characters)
        return value

    return BeforeValidator(check)


def _check_structure(value: object, max_characters: int) -> None:
    num_values = num_characters = 0
    pending: list[Any] = [[value]]
    while pending:
        container = pending.pop()
        num_values += len(container)
        if num_values > MAX_FIELD_VALUES:
            raise ValueError(
                f"has at least {num_values} values, at most {MAX_FIELD_VALUES} are allowed"
            )
        if isinstance(container, dict):
            num_characters += sum(map(len, container))
            container = container.values()
        for entry in container:
            if isinstance(entry, (list, dict)):
                pending.append(entry)
            elif isinstance(entry, str):
                num_characters += len(entry)
            elif isinstance(entry, int):
                num_characters += entry.bit_length() // _BITS_PER_DIGIT
        if num_characters > max_characters:
            raise ValueError(
                f"has at least {num_characters} characters, at most {max_characters} are allowed"
            )


def _id_schema(max_length: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "items": {"type": "integer"}, "maxItems": max_length})


# Not validated by pydantic, which holds the GIL for the whole list.
TokenIds = Annotated[list[int], PlainValidator(_integers(MAX_TOKEN_IDS)), _id_schema(MAX_TOKEN_IDS)]
PromptIds = Annotated[
    list[int], PlainValidator(_integers(MAX_PROMPT_IDS)), _id_schema(MAX_PROMPT_IDS)
]
Strings = Annotated[
    list[str], Field(max_length=MAX_STRINGS), BeforeValidator(_entries(str, MAX_STRINGS))
]
Words = Annotated[
    list[str], Field(max_length=MAX_TOKEN_IDS), BeforeValidator(_entries(str, MAX_TOKEN_IDS))
]
"""Like Strings, with up to MAX_TOKEN_IDS entries."""
Documents = Annotated[
    list[Json],
    Field(max_length=MAX_DOCUMENTS),
    BeforeValidator(_entries(dict, MAX_DOCUMENTS)),
    _structure(MAX_RENDERED_CHARACTERS),
]
Biases = Annotated[
    dict[str, float],
    Field(max_length=MAX_LISTED_BIASES),
    BeforeValidator(_check_biases),
]
Metadata = Annotated[
    dict[str, str], Field(max_length=MAX_METADATA_PAIRS), BeforeValidator(_check_metadata)
]
SafetyIdentifier = Annotated[
    str,
    Field(max_length=MAX_SAFETY_IDENTIFIER_CHARACTERS),
    BeforeValidator(_text(MAX_SAFETY_IDENTIFIER_CHARACTERS)),
]
Label = Annotated[
    str, Field(max_length=MAX_LABEL_CHARACTERS), BeforeValidator(_text(MAX_LABEL_CHARACTERS))
]
PathText = Annotated[
    str, Field(max_length=MAX_PATH_CHARACTERS), BeforeValidator(_text(MAX_PATH_CHARACTERS))
]
UserId = Annotated[
    str, Field(max_length=MAX_USER_ID_CHARACTERS), BeforeValidator(_text(MAX_USER_ID_CHARACTERS))
]
Variables = Annotated[
    Json,
    Field(max_length=MAX_KEYS),
    BeforeValidator(_length(MAX_KEYS)),
    _structure(MAX_RENDERED_CHARACTERS),
]
Tools = Annotated[
    list[Any],
    Field(max_length=MAX_TOOLS),
    BeforeValidator(_length(MAX_TOOLS)),
    _structure(),
]
ToolChoice = Annotated[Any, _structure()]
Schema = Annotated[Json, _structure()]
"""A JSON schema, or an object that contains a JSON schema."""
SchemaOrText = Annotated[Json | str | bool, _structure()]
TagOrText = Annotated[Json | str, _structure()]
Messages = Annotated[
    list[Any], Field(max_length=MAX_MESSAGES), BeforeValidator(_length(MAX_MESSAGES))
]
Blocks = Annotated[list[Any], Field(max_length=MAX_PARTS), BeforeValidator(_length(MAX_PARTS))]


# Numbers in headers and query parameters


def decimal_number(text: str) -> float:
    """Parse a number of ASCII digits. Raises ValueError, also for 1_0, blanks, nan, and digits of
    other scripts, which `float` accepts."""
    if not _DECIMAL.fullmatch(text):
        raise ValueError(f"{text[:_SHOWN]!r} is not a decimal number")
    return float(text)


def _spelled(value: object) -> object:
    if isinstance(value, str) and not _INTEGER.fullmatch(value):
        raise ValueError("Input should be an integer of at most 18 digits")
    return value


QueryInteger = Annotated[int, BeforeValidator(_spelled)]
"""Integer query parameter. pydantic alone accepts 1_0, blanks and 3.0."""

"""Lists that may have entries of unknown types: the prompt leaves out such entries, and the
response names them as ignored."""

from collections.abc import Callable, Iterator
from typing import Any

from config.errors import value_text, wrong_field

MAX_TYPE_CHARACTERS = 40


def type_of(entry: Any) -> str | None:
    """The type of an entry; None for an entry without a type."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    return kind if isinstance(kind, str) and kind else None


def untyped(entry: object, where: str, example: str) -> str:
    """The message about an entry without a type."""
    if isinstance(entry, dict):
        return wrong_field(entry, "type", where, f"a string such as {example!r}")
    return f"{where} is {value_text(entry)}, it must be an object with a type, such as {example!r}"


def ignored_entries(name: str, entries: Any, is_ignored: Callable[[Any], bool]) -> Iterator[str]:
    """`name[3]:type` of each ignored entry of the list `name`."""
    if isinstance(entries, list):
        for place, entry in enumerate(entries):
            if is_ignored(entry):
                yield f"{name}[{place}]:{str(type_of(entry))[:MAX_TYPE_CHARACTERS]}"

"""ParserKind: what a format's file says about its parser besides the format, and the search for the
parser of a chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

F = TypeVar("F")
F_co = TypeVar("F_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ParserKind(Generic[F_co]):
    """A tool or reasoning parser. A file lists its parsers in TOOL_PARSERS or REASONING_PARSERS,
    which `by_name` makes."""

    names: tuple[str, ...]
    """Values of --tool-call-parser or --reasoning-parser. The first name is the name that `auto`
    finds."""
    format: F_co
    example: str
    """What the model writes, in Markdown, for the table in docs/tools.md."""
    marks: tuple[str, ...] = ()
    """Texts in the chat templates of models that write this format."""
    rank: int = 0
    """Parsers of lower rank are searched first: the marks of a higher rank are also in templates of
    other formats."""


def by_name(*parsers: ParserKind[F]) -> dict[str, ParserKind[F]]:
    """Each name of each parser -> the parser."""
    return {name: parser for parser in parsers for name in parser.names}


def distinct(parsers: Mapping[str, ParserKind[F]]) -> list[ParserKind[F]]:
    """The values of `parsers` without repetitions, sorted by rank and then by name."""
    found = {parser.names[0]: parser for parser in parsers.values()}
    return sorted(found.values(), key=lambda parser: (parser.rank, parser.names))


def of_template(parsers: Mapping[str, ParserKind[F]], template: str) -> str | None:
    """The name of the parser with a mark in a chat template; None if no mark is in it."""
    for parser in distinct(parsers):
        if any(mark in template for mark in parser.marks):
            return parser.names[0]
    return None


def formats_of(parsers: Mapping[str, ParserKind[F]]) -> dict[str, F]:
    """Name of each parser -> its format."""
    return {name: parser.format for name, parser in parsers.items()}

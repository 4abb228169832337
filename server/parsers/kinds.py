"""Registry entries of output parsers, and selection of a parser by chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

F = TypeVar("F")
F_co = TypeVar("F_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ParserKind(Generic[F_co]):
    """Registry entry of a tool or reasoning parser. A file with parsers lists their entries in
    TOOL_PARSERS, REASONING_PARSERS or both, created with `by_name`."""

    names: tuple[str, ...]
    """Values of --tool-call-parser or --reasoning-parser. `auto` selects the first name."""
    format: F_co
    example: str
    """Example or description of the model output in Markdown, for the list in docs/tools.md."""
    marks: tuple[str, ...] = ()
    """Substrings of chat templates that identify models with this format."""
    rank: int = 0
    """Search order; lower ranks are searched first, because the marks of higher ranks also occur in
    templates of other formats."""


def by_name(*parsers: ParserKind[F]) -> dict[str, ParserKind[F]]:
    """Name -> parser, for all names of the parsers."""
    return {name: parser for parser in parsers for name in parser.names}


def distinct(parsers: Mapping[str, ParserKind[F]]) -> list[ParserKind[F]]:
    """The parsers without duplicates, sorted by rank and then by name."""
    found = {parser.names[0]: parser for parser in parsers.values()}
    return sorted(found.values(), key=lambda parser: (parser.rank, parser.names))


def of_template(parsers: Mapping[str, ParserKind[F]], template: str) -> str | None:
    """Name of the first parser with a mark that occurs in a chat template; None if there is
    none."""
    for parser in distinct(parsers):
        if any(mark in template for mark in parser.marks):
            return parser.names[0]
    return None


def formats_of(parsers: Mapping[str, ParserKind[F]]) -> dict[str, F]:
    """Parser name -> format."""
    return {name: parser.format for name, parser in parsers.items()}

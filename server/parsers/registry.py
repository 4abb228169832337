"""All parsers by the names of --tool-call-parser and --reasoning-parser. Resolves `auto` from the
chat template."""

from dataclasses import fields

from config.kinds import Kinds
from server.parsers.kinds import ParserKind, formats_of, of_template
from server.parsers.reasoning.tags import ReasoningFormat
from server.parsers.tool.base import ToolCallFormat, ToolCallReader

TOOL_PARSERS = Kinds[ParserKind[ToolCallFormat]]("server.parsers", "TOOL_PARSERS", "tool parser")
REASONING_PARSERS = Kinds[ParserKind[ReasoningFormat]](
    "server.parsers", "REASONING_PARSERS", "reasoning parser"
)
TOOL_CALL_FORMATS = formats_of(TOOL_PARSERS.all)
REASONING_FORMATS = formats_of(REASONING_PARSERS.all)

GENERIC_TOOL_PARSER = "hermes"
"""Parser of the call format that server/text/tool_template.py describes to the model."""


def tool_parser_of(template: str) -> str | None:
    """Name of the tool parser for a chat template; None if the template is not recognised."""
    return of_template(TOOL_PARSERS.all, template)


def reasoning_parser_of(template: str) -> str | None:
    """Name of the reasoning parser for a chat template; None if the template is not recognised."""
    return of_template(REASONING_PARSERS.all, template)


def words_of(form: ToolCallReader | ReasoningFormat) -> frozenset[str]:
    """Non-empty strings in the fields of `form` and of the readers in it, which a parser with
    `form` may search for. Some of them may be special tokens."""
    values = [getattr(form, field.name) for field in fields(form)]
    inner = [words_of(value) for value in values if isinstance(value, ToolCallReader)]
    words = [word for value in values for word in (value if isinstance(value, tuple) else (value,))]
    return frozenset(word for word in words if isinstance(word, str) and word).union(*inner)

"""Calls of Hunyuan 3. The tags have a suffix in the published checkpoints, and no suffix in other
checkpoints."""

from dataclasses import dataclass, fields
from typing import Any

from server.parsers.kinds import ParserKind, by_name
from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.text_stream import Source, Steps
from server.parsers.tool.base import ToolCallFormat
from server.parsers.tool.structural_tag import Functions, ToolCallGrammar
from server.parsers.tool.xml import Tags
from server.parsers.tool.xml_families import HUNYUAN

SUFFIX = ":opensource"


@dataclass(frozen=True, slots=True, kw_only=True)
class EitherTags(ToolCallFormat):
    """Calls with the tags of either family; the marker selects the family."""

    first: Tags
    second: Tags

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        family = self.first if marker in self.first.markers else self.second
        yield from family.read(marker, source, output, tools)

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        grammars = [family.grammar(functions) for family in (self.first, self.second)]
        by_marker = {**grammars[0].by_marker, **grammars[1].by_marker}
        return ToolCallGrammar(by_marker, self.ignored_markers)


def with_suffix(family: Tags, suffix: str) -> Tags:
    """The tags of `family` with `suffix` before each closing bracket."""

    def renamed(value: object) -> Any:
        if isinstance(value, tuple):
            return tuple(renamed(word) for word in value)
        return value.replace(">", f"{suffix}>") if isinstance(value, str) else value

    return Tags(**{field.name: renamed(getattr(family, field.name)) for field in fields(family)})


_SUFFIXED = with_suffix(HUNYUAN, SUFFIX)
HY3 = EitherTags(
    first=_SUFFIXED,
    second=HUNYUAN,
    markers=(*_SUFFIXED.markers, *HUNYUAN.markers),
    ignored_markers=(*_SUFFIXED.ignored_markers, *HUNYUAN.ignored_markers),
    section=_SUFFIXED.section,
    ends=(*_SUFFIXED.ends, *HUNYUAN.ends),
)

TOOL_PARSERS = by_name(
    ParserKind(
        ("hy_v3",),
        HY3,
        "`<tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>x</arg_value></tool_call>`",
        marks=("<arg_key{}>", ":opensource>"),
    ),
)

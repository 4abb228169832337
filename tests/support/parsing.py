"""Results of a parser, which must not depend on how the text is split."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from server.parsers.output_parser import OutputParser
from server.parsers.registry import TOOL_CALL_FORMATS
from server.parsers.stream.base import (
    Parser,
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Tools,
)
from server.parsers.tool.base import ToolCallParser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = {"get_weather": WEATHER, "now": {}}


def parser_of(name: str, max_calls: int | None = None, tools: Tools = TOOLS) -> OutputParser:
    """The tool parser of a format, as used for an answer."""
    return OutputParser(
        None, ToolCallParser(TOOL_CALL_FORMATS[name], tools), lambda: "ID", max_calls
    )


def read(make: Callable[[], Parser], pieces: Iterable[str], *, is_cut: bool = False) -> Any:
    """(reasoning, text, calls as [name, arguments, id], indices of calls without valid JSON)."""
    parser = make()
    events: list[ParserEvent] = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(is_cut=is_cut)
    thought, text = "", ""
    calls: list[list[Any]] = []
    for event in events:
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, ReasoningDelta):
            thought += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append([event.name, "", event.id])
        else:
            assert isinstance(event, ToolCallArguments)
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    broken = [place for place, call in enumerate(calls) if not is_json(call[1])]
    return thought, text, calls, broken


def read_every_way(make: Callable[[], Parser], text: str, *, is_cut: bool = False) -> Any:
    """The result of `read`, which must be the same for every split in two and for single
    characters."""
    whole = read(make, [text], is_cut=is_cut)
    for place in range(len(text)):
        assert read(make, [text[:place], text[place:]], is_cut=is_cut) == whole, (place, text)
    assert read(make, list(text), is_cut=is_cut) == whole
    return whole


def good_calls(found: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of the valid calls."""
    _, _, calls, broken = found
    return [(c[0], json.loads(c[1])) for i, c in enumerate(calls) if i not in broken]


def is_json(text: str) -> bool:
    """Whether `text` is valid JSON."""
    try:
        json.loads(text, parse_constant=int)
    except ValueError:
        return False
    return True

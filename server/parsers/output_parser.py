"""Output parser of a choice: separates reasoning, text and tool calls."""

from collections.abc import Callable

from server.parsers.stream.base import (
    EventBuffer,
    ParserEvent,
    ReasoningDelta,
    ReasoningParser,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from server.parsers.stream.text_stream import Trimmed
from server.parsers.tool.base import ToolCallParser, ToolCallReader


class OutputParser:
    """Chains a reasoning parser and a tool parser, which gets the text from the reasoning parser.

    Every call gets an id; calls beyond `max_calls` are dropped. If there are calls, trailing
    whitespace of the text is dropped, and leading whitespace of text that starts after a call.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tool_parser: ToolCallParser | None,
        new_id: Callable[[], str],
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tool_parser = tool_parser
        self._text_parser = tool_parser
        if reasoning is not None and tool_parser is None:
            self._text_parser = ToolCallParser(ToolCallReader(), {})
        self._new_id = new_id
        self._max_calls = max_calls
        self._output = EventBuffer()
        self._trimmed = Trimmed(self._add_text)
        self._has_text = False
        self._has_calls = False

    def feed(self, text: str) -> list[ParserEvent]:
        if self._reasoning is None:
            return self._cleaned(self._parse_calls(text))
        return self._cleaned(self._parse_text(self._reasoning.feed(text)))

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        events: list[ParserEvent] = []
        if self._reasoning is not None:
            events += self._parse_text(self._reasoning.finish(is_cut=is_cut))
        if self._text_parser is not None:
            events += self._text_parser.finish(is_cut=is_cut)
        cleaned = self._cleaned(events)
        trailing = self._trimmed.take_trailing()
        if trailing and not self._has_calls:
            cleaned.append(TextDelta(trailing))
        return cleaned

    def _parse_text(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self._text_parser is not None and self._reasoning is not None:
            self._text_parser.ignore(self._reasoning.late_end_tags)
        parsed: list[ParserEvent] = []
        for event in events:
            parsed += self._parse_calls(event.text) if isinstance(event, TextDelta) else [event]
        return parsed

    def _parse_calls(self, text: str) -> list[ParserEvent]:
        if self._text_parser is None:
            return [TextDelta(text)] if text else []
        return self._text_parser.feed(text)

    def _cleaned(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self._tool_parser is None:
            return events
        parsed: list[ParserEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._trimmed(event.text)
                parsed += self._output.drain()
            elif isinstance(event, ReasoningDelta):
                parsed.append(event)
            elif self._max_calls is None or event.index < self._max_calls:
                parsed.append(self._with_id(event))
        return parsed

    def _add_text(self, text: str) -> None:
        if self._has_calls and not self._has_text:
            text = text.lstrip()
        self._has_text = True
        self._output.add_text(text)

    def _with_id(self, event: ToolCallStart | ToolCallArguments) -> ParserEvent:
        if not isinstance(event, ToolCallStart):
            return event
        self._has_calls = True
        return ToolCallStart(event.index, event.name, event.id or self._new_id())

"""Output parser of a choice: reasoning first, then text and tool calls."""

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
        self._trailing_space = ""
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
        if self._trailing_space and not self._has_calls:
            cleaned.append(TextDelta(self._trailing_space))
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
        output = EventBuffer()
        parsed: list[ParserEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._add_text(event.text, output)
                parsed += output.drain()
            elif isinstance(event, ReasoningDelta):
                parsed.append(event)
            elif self._max_calls is None or event.index < self._max_calls:
                parsed.append(self._with_id(event))
        return parsed

    def _add_text(self, text: str, output: EventBuffer) -> None:
        whole = self._trailing_space + text
        ready = whole.rstrip()
        self._trailing_space = whole[len(ready) :]
        if ready and self._has_calls and not self._has_text:
            ready = ready.lstrip()
        self._has_text = self._has_text or bool(ready)
        output.add_text(ready)

    def _with_id(self, event: ToolCallStart | ToolCallArguments) -> ParserEvent:
        if not isinstance(event, ToolCallStart):
            return event
        self._has_calls = True
        return ToolCallStart(event.index, event.name, event.id or self._new_id())

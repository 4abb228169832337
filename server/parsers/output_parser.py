"""The answer of one choice: thinking first, then text and calls. Knows no family, and no tokens."""

from collections.abc import Callable

from server.parsers.base import (
    EventBuffer,
    Parser,
    ParserEvent,
    ReasoningDelta,
    ReasoningParser,
    TextDelta,
    ToolCallArguments,
    ToolCallRetracted,
    ToolCallStart,
)


class OutputParser:
    """A Parser over two: what is no thinking is searched for calls.

    Every call gets an id. With `max_calls`, calls beyond it are dropped. Beside calls, blanks at
    the beginning and the end of the text are dropped.
    """

    def __init__(
        self,
        thinking: ReasoningParser | None,
        calls: Parser | None,
        new_id: Callable[[], str],
        max_calls: int | None = None,
    ) -> None:
        self._thinking = thinking
        self._calls = calls
        self._new_id = new_id
        self._max_calls = max_calls
        self._blanks = ""
        self._has_text = False
        self._has_calls = False

    def feed(self, text: str) -> list[ParserEvent]:
        if self._thinking is None:
            return self._tidied(self._searched(text))
        return self._tidied(self._sorted(self._thinking.feed(text)))

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        events: list[ParserEvent] = []
        if self._thinking is not None:
            events += self._sorted(self._thinking.finish(is_cut=is_cut))
        if self._calls is not None:
            events += self._calls.finish(is_cut=is_cut)
        tidied = self._tidied(events)
        if self._blanks and not self._has_calls:
            tidied.append(TextDelta(self._blanks))
        return tidied

    def _sorted(self, events: list[ParserEvent]) -> list[ParserEvent]:
        made: list[ParserEvent] = []
        for event in events:
            made += self._searched(event.text) if isinstance(event, TextDelta) else [event]
        return made

    def _searched(self, text: str) -> list[ParserEvent]:
        if self._calls is None:
            return [TextDelta(text)] if text else []
        return self._calls.feed(text)

    def _tidied(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self._calls is None:
            return events
        output = EventBuffer()
        made: list[ParserEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._take_text(event.text, output)
                made += output.drain()
            elif isinstance(event, ReasoningDelta):
                made.append(event)
            elif self._max_calls is None or event.index < self._max_calls:
                made.append(self._with_id(event))
        return made

    def _take_text(self, text: str, output: EventBuffer) -> None:
        whole = self._blanks + text
        ready = whole.rstrip()
        self._blanks = whole[len(ready) :]
        if ready and self._has_calls and not self._has_text:
            ready = ready.lstrip()
        self._has_text = self._has_text or bool(ready)
        output.add_text(ready)

    def _with_id(self, event: ToolCallStart | ToolCallArguments | ToolCallRetracted) -> ParserEvent:
        if not isinstance(event, ToolCallStart):
            return event
        self._has_calls = True
        return ToolCallStart(event.index, event.name, event.id or self._new_id())

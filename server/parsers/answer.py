"""The answer of one choice: thinking first, then text and calls. Knows no family, and no tokens."""

from collections.abc import Callable

from server.parsers.base import (
    CallArguments,
    CallBegun,
    CallBroken,
    Event,
    Output,
    Parser,
    Text,
    Thought,
    ThoughtParser,
)


class AnswerParser:
    """A Parser over two: what is no thinking is searched for calls.

    Every call gets an id. With `max_calls`, calls beyond it are dropped. Beside calls, blanks at
    the beginning and the end of the text are dropped.
    """

    def __init__(
        self,
        thinking: ThoughtParser | None,
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

    def feed(self, text: str) -> list[Event]:
        if self._thinking is None:
            return self._tidied(self._searched(text))
        return self._tidied(self._sorted(self._thinking.feed(text)))

    def finish(self, *, is_cut: bool) -> list[Event]:
        events: list[Event] = []
        if self._thinking is not None:
            events += self._sorted(self._thinking.finish(is_cut=is_cut))
        if self._calls is not None:
            events += self._calls.finish(is_cut=is_cut)
        tidied = self._tidied(events)
        if self._blanks and not self._has_calls:
            tidied.append(Text(self._blanks))
        return tidied

    def _sorted(self, events: list[Event]) -> list[Event]:
        made: list[Event] = []
        for event in events:
            made += self._searched(event.text) if isinstance(event, Text) else [event]
        return made

    def _searched(self, text: str) -> list[Event]:
        if self._calls is None:
            return [Text(text)] if text else []
        return self._calls.feed(text)

    def _tidied(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        output = Output()
        made: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                self._take_text(event.text, output)
                made += output.drain()
            elif isinstance(event, Thought):
                made.append(event)
            elif self._max_calls is None or event.index < self._max_calls:
                made.append(self._with_id(event))
        return made

    def _take_text(self, text: str, output: Output) -> None:
        whole = self._blanks + text
        ready = whole.rstrip()
        self._blanks = whole[len(ready) :]
        if ready and self._has_calls and not self._has_text:
            ready = ready.lstrip()
        self._has_text = self._has_text or bool(ready)
        output.text(ready)

    def _with_id(self, event: CallBegun | CallArguments | CallBroken) -> Event:
        if not isinstance(event, CallBegun):
            return event
        self._has_calls = True
        return CallBegun(event.index, event.name, event.id or self._new_id())

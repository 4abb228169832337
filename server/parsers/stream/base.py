"""Interfaces of the output parsers: text in pieces in, events out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from server.parsers.stream.text_stream import Source, Steps

Tools = Mapping[str, Mapping[str, Any]]
"""The functions of a request: name to JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of call number `index`, from 0. `id` is None if the model writes none."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; the pieces joined are the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallRetracted:
    """The call that was started cannot be parsed: all of it follows as text."""

    index: int


ParserEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallRetracted


class Parser(Protocol):
    """Incremental parser of one choice.

    Never raises, and gives the same events (adjacent pieces joined) however the text is split.
    Buffers only what may still be a marker or the name of a call.
    """

    def feed(self, text: str) -> list[ParserEvent]:
        """The events that `text` completes."""
        ...

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        """The rest, when no text follows. `is_cut`: the answer was cut by its length, so an open
        call counts as a call."""
        ...


class EventBuffer:
    """Collects events and joins adjacent pieces."""

    def __init__(self) -> None:
        self._events: list[ParserEvent] = []
        self._num_calls = 0
        self.has_open_call = False
        """Whether a call has started and not ended."""

    def add_text(self, piece: str) -> None:
        """Add text of the answer."""
        last = self._events[-1] if self._events else None
        if isinstance(last, TextDelta):
            self._events[-1] = TextDelta(last.text + piece)
        elif piece:
            self._events.append(TextDelta(piece))

    def add_reasoning(self, piece: str) -> None:
        """Add reasoning."""
        last = self._events[-1] if self._events else None
        if isinstance(last, ReasoningDelta):
            self._events[-1] = ReasoningDelta(last.text + piece)
        elif piece:
            self._events.append(ReasoningDelta(piece))

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Start a call."""
        self._events.append(ToolCallStart(self._num_calls, name, call_id))
        self._num_calls += 1
        self.has_open_call = True

    def add_arguments(self, piece: str) -> None:
        """Add to the open call's arguments."""
        index = self._num_calls - 1
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallArguments) and last.index == index:
            self._events[-1] = ToolCallArguments(index, last.text + piece)
        else:
            self._events.append(ToolCallArguments(index, piece))

    def end_call(self) -> None:
        """The open call is complete."""
        self.has_open_call = False

    def retract_call(self, raw: str) -> None:
        """Treat what looked like a call, `raw`, as text."""
        if self.has_open_call:
            self._events.append(ToolCallRetracted(self._num_calls - 1))
        self.has_open_call = False
        self.add_text(raw)

    def drain(self) -> list[ParserEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


class StreamParser:
    """A Parser whose work is a generator, which yields when it needs more text."""

    def __init__(self) -> None:
        self._source = Source()
        self._output = EventBuffer()
        self._is_cut = False
        self._steps: Steps[None] | None = self._run()

    def feed(self, text: str) -> list[ParserEvent]:
        self._source.push(text)
        return self._advance()

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        self._is_cut = is_cut
        self._source.has_ended = True
        return self._advance()

    def _run(self) -> Steps[None]:
        """Reads the source into the output."""
        raise NotImplementedError

    def _advance(self) -> list[ParserEvent]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        return self._output.drain()


class ReasoningParser(StreamParser):
    """Splits reasoning from the rest, which it gives as text."""

    def __init__(self, *, is_inside: bool) -> None:
        super().__init__()
        self.is_done = False
        """Whether no reasoning can follow."""
        self.has_reasoning = is_inside
        """Whether reasoning has started."""

"""Interfaces of the output parsers, which convert text deltas to events."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from server.parsers.stream.text_stream import Source, Steps

Tools = Mapping[str, Mapping[str, Any]]
"""The functions of a request: name -> JSON schema of the arguments."""
MAX_HELD_CHARACTERS = 256
"""Maximum characters of arguments that are buffered before their first value."""
_FIRST_VALUE = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\S', re.DOTALL)


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
    """Start of call number `index`, from 0. `id`: None if the model did not write an id;
    OutputParser then adds an id."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments. The joined pieces are a JSON object, unless the answer
    was truncated or the model wrote arguments that cannot be parsed."""

    index: int
    text: str


ParserEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class Parser(Protocol):
    """Incremental parser for a choice. Never raises. Returns the same events (adjacent pieces
    joined) for any chunking of the text. Buffers only text whose meaning is still open, such as the
    start of a marker or of a call."""

    def feed(self, text: str) -> list[ParserEvent]:
        """The events that `text` completes."""
        ...

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        """The remaining events at the end of the text. `is_cut`: the answer was truncated (finish
        reason length), so an open call counts as a call."""
        ...


class EventBuffer:
    """Collects events and joins adjacent pieces. A call is buffered until its first value starts,
    its arguments exceed MAX_HELD_CHARACTERS, or the call ends, because text that only starts like a
    call may still turn out to be text. After that it remains a call."""

    def __init__(self) -> None:
        self._events: list[ParserEvent] = []
        self.num_calls = 0
        """Number of emitted calls."""
        self._held: ToolCallStart | None = None
        self._held_arguments = ""
        self.has_open_call = False
        """Whether an emitted call is still open."""

    def add_text(self, piece: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, TextDelta):
            self._events[-1] = TextDelta(last.text + piece)
        elif piece:
            self._events.append(TextDelta(piece))

    def add_reasoning(self, piece: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, ReasoningDelta):
            self._events[-1] = ReasoningDelta(last.text + piece)
        elif piece:
            self._events.append(ReasoningDelta(piece))

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Start a call."""
        self._held = ToolCallStart(self.num_calls, name, call_id)
        self._held_arguments = ""

    def add_arguments(self, piece: str) -> None:
        """Append to the arguments of the current call."""
        if self._held is not None:
            self._held_arguments += piece
            is_long = len(self._held_arguments) > MAX_HELD_CHARACTERS
            if is_long or _FIRST_VALUE.match(self._held_arguments):
                self.release_call()
            return
        index = self.num_calls - 1
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallArguments) and last.index == index:
            self._events[-1] = ToolCallArguments(index, last.text + piece)
        elif piece:
            self._events.append(ToolCallArguments(index, piece))

    def end_call(self) -> None:
        """End the current call."""
        self.release_call()
        self.has_open_call = False

    def release_call(self) -> None:
        """Emit the buffered call, if any. It can no longer be dropped."""
        if self._held is None:
            return
        held, self._held = self._held, None
        self._events.append(held)
        self.num_calls += 1
        self.has_open_call = True
        self.add_arguments(self._held_arguments)

    def drop_call(self) -> None:
        """Discard the buffered call, which turned out to be text."""
        self._held = None

    def drain(self) -> list[ParserEvent]:
        """Return and clear the events since the last `drain`."""
        events, self._events = self._events, []
        return events


class StreamParser:
    """A Parser implemented by a generator, which yields when it needs more text."""

    def __init__(self) -> None:
        self._source = Source()
        self._output = EventBuffer()
        self._steps: Steps[None] | None = self._run()

    def feed(self, text: str) -> list[ParserEvent]:
        self._source.push(text)
        return self._advance()

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        self._source.has_ended, self._source.is_cut = True, is_cut
        return self._advance()

    def _run(self) -> Steps[None]:
        """Parse the source and write events to the output."""
        raise NotImplementedError

    def _advance(self) -> list[ParserEvent]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        return self._output.drain()


class ReasoningParser(StreamParser):
    """Splits reasoning from the rest of an answer, which it emits as text."""

    def __init__(self, *, is_inside: bool) -> None:
        super().__init__()
        self.is_done = False
        """Whether the reasoning at the start of the answer has ended; True if there is none."""
        self.has_reasoning = is_inside
        """Whether reasoning has started."""
        self.call_marker = ""
        """Marker of the call that ended the reasoning; otherwise empty."""
        self.late_end_tags: tuple[str, ...] = ()
        """End tags that may be repeated after the reasoning; they are dropped."""

"""Interfaces of the output parsers: text in pieces in, events out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from server.parsers.stream.text_stream import Source, Steps

Tools = Mapping[str, Mapping[str, Any]]
"""The functions of a request: name to JSON schema of the arguments."""
MAX_HELD_CHARACTERS = 256
"""Arguments before their first value that are held back."""
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
    """The start of call number `index`, from 0. `id` is None if the model writes none."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments. The pieces joined are the text of a JSON object, unless
    the answer was cut or the model wrote arguments that cannot be parsed."""

    index: int
    text: str


ParserEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


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
    """Collects events and joins adjacent pieces.

    A call is held until its first value begins or it ends: text that only begins like a call can
    still become text. From then on it stays a call.
    """

    def __init__(self) -> None:
        self._events: list[ParserEvent] = []
        self.num_calls = 0
        """Calls that were sent."""
        self._held: ToolCallStart | None = None
        self._held_arguments = ""
        self.has_open_call = False
        """Whether a call was sent and has not ended."""

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
        self._held = ToolCallStart(self.num_calls, name, call_id)
        self._held_arguments = ""

    def add_arguments(self, piece: str) -> None:
        """Add to the started call's arguments."""
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
        """The started call is complete."""
        self.release_call()
        self.has_open_call = False

    def release_call(self) -> None:
        """Send the held call, if any; it stays a call."""
        if self._held is None:
            return
        held, self._held = self._held, None
        self._events.append(held)
        self.num_calls += 1
        self.has_open_call = True
        self.add_arguments(self._held_arguments)

    def drop_call(self) -> None:
        """Drop the held call: it is text."""
        self._held = None

    def drain(self) -> list[ParserEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


class StreamParser:
    """A Parser whose work is a generator, which yields when it needs more text."""

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
        self.call_marker = ""
        """The marker of the call that ended the reasoning, if a call did."""
        self.late_end_tags: tuple[str, ...] = ()
        """End tags that may come again after the reasoning; they are no text."""

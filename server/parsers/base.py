"""What parsers of answers take and give: text in pieces, events out. Knows no family of models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Mapping[str, Mapping[str, Any]]
"""The functions a request offers: their names, each with the JSON schema of its arguments."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What the caller reads as the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What the model wrote while it was thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call, counted from 0. `id` is None where the model gives none."""

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
    """The call that was begun is none: all that the model wrote of it follows as text."""

    index: int


ParserEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallRetracted


class Parser(Protocol):
    """Reads the answer of one choice, once, from its beginning.

    Never raises, whatever the text, and gives the same events (adjacent pieces joined) however the
    text is cut. Holds back no more than what may still be a marker, or the name of a call.
    """

    def feed(self, text: str) -> list[ParserEvent]:
        """What `text` makes certain."""
        ...

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        """The rest, when nothing can follow. `is_cut`: the answer was cut by its length, so that a
        call may have an end that was not written."""
        ...


class ReasoningParser(Parser, Protocol):
    """A parser that tells thinking from the rest, which it gives as text."""

    @property
    def is_done(self) -> bool:
        """Whether the answer itself has begun."""
        ...

    @property
    def has_reasoning(self) -> bool:
        """Whether thinking was begun."""
        ...


class ReasoningFormat(Protocol):
    """How one family of models marks thinking."""

    @property
    def start_tags(self) -> tuple[str, ...]:
        """The marks that begin it."""
        ...

    @property
    def end_tags(self) -> tuple[str, ...]:
        """The marks that end it."""
        ...

    @property
    def answer_start_tags(self) -> tuple[str, ...]:
        """The marks that end it and begin the answer, behind which a form may be held."""
        ...

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether an answer to `prompt` goes on with thinking that the prompt began."""
        ...

    def ends_with_start_tag(self, prompt: str) -> bool:
        """Whether the end of `prompt` is an opening mark."""
        ...

    def ends_with_end_tag(self, prompt: str) -> bool:
        """Whether the end of `prompt` is a mark behind which the answer stands."""
        ...

    def has_unclosed_reasoning(self, text: str) -> bool:
        """Whether `text`, the beginning of an answer, has thinking that it does not close."""
        ...

    def parser(self, *, is_inside: bool, keeps_whitespace: bool = False) -> ReasoningParser:
        """A parser of one answer. `keeps_whitespace`: all that follows the reasoning is text,
        whitespace too."""
        ...


class EventBuffer:
    """Collects events; adjacent pieces are joined."""

    def __init__(self) -> None:
        self._events: list[ParserEvent] = []
        self._num_calls = 0
        self.has_open_call = False
        """Whether a call has been begun and has not ended."""

    def add_text(self, piece: str) -> None:
        """A piece of the answer."""
        last = self._events[-1] if self._events else None
        if isinstance(last, TextDelta):
            self._events[-1] = TextDelta(last.text + piece)
        elif piece:
            self._events.append(TextDelta(piece))

    def add_reasoning(self, piece: str) -> None:
        """A piece of thinking."""
        last = self._events[-1] if self._events else None
        if isinstance(last, ReasoningDelta):
            self._events[-1] = ReasoningDelta(last.text + piece)
        elif piece:
            self._events.append(ReasoningDelta(piece))

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """A call begins."""
        self._events.append(ToolCallStart(self._num_calls, name, call_id))
        self._num_calls += 1
        self.has_open_call = True

    def add_arguments(self, piece: str) -> None:
        """A piece of the open call's arguments."""
        index = self._num_calls - 1
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallArguments) and last.index == index:
            self._events[-1] = ToolCallArguments(index, last.text + piece)
        else:
            self._events.append(ToolCallArguments(index, piece))

    def end_call(self) -> None:
        """The open call is whole."""
        self.has_open_call = False

    def retract_call(self, raw: str) -> None:
        """What seemed to be a call, written as `take_recorded`, is text."""
        if self.has_open_call:
            self._events.append(ToolCallRetracted(self._num_calls - 1))
        self.has_open_call = False
        self.add_text(raw)

    def drain(self) -> list[ParserEvent]:
        """What has come since the last time."""
        events, self._events = self._events, []
        return events

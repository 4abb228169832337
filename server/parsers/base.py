"""What parsers of answers take and give: text in pieces, events out. Knows no family of models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Mapping[str, Mapping[str, Any]]
"""The functions a request offers: their names, each with the JSON schema of its arguments."""


@dataclass(frozen=True, slots=True)
class Text:
    """What the caller reads as the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model wrote while it was thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call, counted from 0. `id` is None where the model gives none."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; the pieces joined are the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call that was begun is none: all that the model wrote of it follows as text."""

    index: int


Event = Text | Thought | CallBegun | CallArguments | CallBroken


class Parser(Protocol):
    """Reads the answer of one choice, once, from its beginning.

    Never raises, whatever the text, and gives the same events (adjacent pieces joined) however the
    text is cut. Holds back no more than what may still be a marker, or the name of a call.
    """

    def feed(self, text: str) -> list[Event]:
        """What `text` makes certain."""
        ...

    def finish(self, *, is_cut: bool) -> list[Event]:
        """The rest, when nothing can follow. `is_cut`: the answer was cut by its length, so that a
        call may have an end that was not written."""
        ...


class ThoughtParser(Parser, Protocol):
    """A parser that tells thinking from the rest, which it gives as text."""

    @property
    def is_over(self) -> bool:
        """Whether the answer itself has begun."""
        ...

    @property
    def has_thought(self) -> bool:
        """Whether thinking was begun."""
        ...


class ThoughtForm(Protocol):
    """How one family of models marks thinking."""

    @property
    def opens(self) -> tuple[str, ...]:
        """The marks that begin it."""
        ...

    @property
    def closes(self) -> tuple[str, ...]:
        """The marks that end it."""
        ...

    @property
    def leads(self) -> tuple[str, ...]:
        """The marks that end it and begin the answer, behind which a form may be held."""
        ...

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to `prompt` goes on with thinking that the prompt began."""
        ...

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the end of `prompt` is an opening mark."""
        ...

    def is_closed_by(self, prompt: str) -> bool:
        """Whether the end of `prompt` is a mark behind which the answer stands."""
        ...

    def is_open(self, text: str) -> bool:
        """Whether `text`, the beginning of an answer, has thinking that it does not close."""
        ...

    def parser(self, *, is_inside: bool, is_exact: bool = False) -> ThoughtParser:
        """What reads an answer. `is_exact`: all that follows the thinking is text, blanks too."""
        ...


class Output:
    """Collects events; adjacent pieces are joined."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_calls = 0
        self.is_open = False
        """Whether a call has been begun and has not ended."""

    def text(self, piece: str) -> None:
        """A piece of the answer."""
        last = self._events[-1] if self._events else None
        if isinstance(last, Text):
            self._events[-1] = Text(last.text + piece)
        elif piece:
            self._events.append(Text(piece))

    def thought(self, piece: str) -> None:
        """A piece of thinking."""
        last = self._events[-1] if self._events else None
        if isinstance(last, Thought):
            self._events[-1] = Thought(last.text + piece)
        elif piece:
            self._events.append(Thought(piece))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call begins."""
        self._events.append(CallBegun(self._num_calls, name, call_id))
        self._num_calls += 1
        self.is_open = True

    def arguments(self, piece: str) -> None:
        """A piece of the open call's arguments."""
        index = self._num_calls - 1
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments) and last.index == index:
            self._events[-1] = CallArguments(index, last.text + piece)
        else:
            self._events.append(CallArguments(index, piece))

    def end(self) -> None:
        """The open call is whole."""
        self.is_open = False

    def fail(self, raw: str) -> None:
        """What seemed to be a call, written as `raw`, is text."""
        if self.is_open:
            self._events.append(CallBroken(self._num_calls - 1))
        self.is_open = False
        self.text(raw)

    def drain(self) -> list[Event]:
        """What has come since the last time."""
        events, self._events = self._events, []
        return events

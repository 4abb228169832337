"""Text that arrives in pieces, and readers that wait for more of it. Knows no calls.

A reader is a generator: it yields where it needs more text, and goes on when there is some. What
it decides depends on the text alone, never on where the text was cut.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader that gives a T."""
Sink = Callable[[str], object]
"""Takes text piece by piece."""

BLANKS = " \t\r\n"


class ParseError(Exception):
    """The text is not what a reader was to read."""


class UnexpectedEnd(ParseError):
    """The text ended before it was whole."""


class Source:
    """Text not read yet, and since when it is to be remembered."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._seen: list[str] | None = None
        self.has_ended = False

    def push(self, text: str) -> None:
        """More text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def start_recording(self, text: str = "") -> None:
        """`text`, just taken, is the first of what `take_recorded` gives."""
        self._seen = [text]

    def stop_recording(self) -> None:
        """Remember nothing any more."""
        self._seen = None

    def take_recorded(self) -> str:
        """All that was taken since `start_recording`, and the rest once the text has ended. Stops
        the recording."""
        if self.has_ended:
            self.take(len(self._text) - self._at)
        seen, self._seen = self._seen, None
        return "".join(seen or ())

    @property
    def is_empty(self) -> bool:
        """Whether all that has come was taken."""
        return self._at >= len(self._text)

    def take(self, count: int) -> str:
        """The next `count` characters, which are there."""
        piece = self._text[self._at : self._at + count]
        self._at += count
        if self._seen is not None:
            self._seen.append(piece)
        return piece

    def peek(self) -> Steps[str]:
        """The next character, left where it is. Raises UnexpectedEnd at the end."""
        while self._at >= len(self._text):
            if self.has_ended:
                raise UnexpectedEnd
            yield
        return self._text[self._at]

    def peek_many(self, count: int) -> Steps[str]:
        """The next `count` characters, left where they are. Raises UnexpectedEnd."""
        while len(self._text) - self._at < count:
            if self.has_ended:
                raise UnexpectedEnd
            yield
        return self._text[self._at : self._at + count]

    def expect(self, character: str) -> Steps[None]:
        """Take `character`. Raises Unreadable if another follows."""
        if (yield from self.peek()) != character:
            raise ParseError
        self.take(1)

    def skip_blanks(self, more: str = "") -> Steps[str]:
        """Take blanks, and characters of `more`, as far as they go."""
        taken = []
        while True:
            end = self._at
            while end < len(self._text) and (self._text[end] in BLANKS or self._text[end] in more):
                end += 1
            taken.append(self.take(end - self._at))
            if self._at < len(self._text) or self.has_ended:
                return "".join(taken)
            yield

    def peek_run(self, pattern: "re.Pattern[str]", most: int) -> Steps[str]:
        """What `pattern` (a run of characters) matches, left where it is. Raises Unreadable for
        more than `most`."""
        while True:
            found = pattern.match(self._text, self._at, self._at + most + 1)
            assert found is not None, "a run may be empty"
            if len(found[0]) > most:
                raise ParseError
            if found.end() < len(self._text) or self.has_ended:
                return found[0]
            yield

    def take_run(self, pattern: "re.Pattern[str]", sink: Sink) -> None:
        """Take what `pattern` matches of the text that is there."""
        found = pattern.match(self._text, self._at)
        if found is not None and found[0]:
            sink(self.take(len(found[0])))

    def take_all(self, sink: Sink) -> None:
        """Take all the text that is there."""
        if not self.is_empty:
            sink(self.take(len(self._text) - self._at))

    def accept(self, *words: str) -> Steps[str]:
        """Take the longest of `words` that the text goes on with; "" if it does with none."""
        for word in sorted(words, key=len, reverse=True):
            while True:
                there = self._text[self._at : self._at + len(word)]
                if there == word:
                    return self.take(len(word))
                if self.has_ended or not word.startswith(there):
                    break
                yield
        return ""

    def read_until(
        self, words: tuple[str, ...], sink: Sink, *, most: int | None = None, leave: bool = False
    ) -> Steps[str]:
        """Take text up to the first of `words`, and take that unless it is to `leave`.

        Gives the word, "" if the text ended without one. No word may begin another. Raises
        Unreadable when more than `most` characters come before it.
        """
        pattern, beginnings, longest = _wanted(words)
        while True:
            found = pattern.search(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            if found is None and not self.has_ended:
                first = max(self._at, end - longest + 1)
                end = next((i for i in range(first, end) if self._text[i:] in beginnings), end)
            if most is not None and end - self._at > most:
                self.take(most)
                raise ParseError
            piece = self.take(end - self._at)
            if most is not None:
                most -= len(piece)
            if piece:
                sink(piece)
            if found is not None:
                return found[0] if leave else self.take(len(found[0]))
            if self.has_ended:
                return ""
            yield

    def collect_until(
        self, words: tuple[str, ...], *, most: int, leave: bool = False
    ) -> Steps[tuple[str, str]]:
        """(text before the first of `words`, that word). Raises UnexpectedEnd if none comes."""
        pieces: list[str] = []
        word = yield from self.read_until(words, pieces.append, most=most, leave=leave)
        if not word:
            raise UnexpectedEnd
        return "".join(pieces), word


class StreamReader:
    """Runs a reader over a source, each time as far as the text goes."""

    def __init__(self, source: Source, steps: Steps[None]) -> None:
        self._source = source
        self._steps: Steps[None] | None = steps

    def push(self, text: str) -> None:
        """More text."""
        self._source.push(text)
        self._step()

    def end(self) -> None:
        """No text can follow."""
        self._source.has_ended = True
        self._step()

    def _step(self) -> None:
        if self._steps is None:
            return
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None


@lru_cache(maxsize=256)
def _wanted(words: tuple[str, ...]) -> "tuple[re.Pattern[str], frozenset[str], int]":
    """(finds the first of `words`, all their beginnings, length of the longest)."""
    pattern = re.compile("|".join(map(re.escape, words)) or "(?!)")
    beginnings = frozenset(word[:end] for word in words for end in range(1, len(word)))
    return pattern, beginnings, max(map(len, words), default=1)

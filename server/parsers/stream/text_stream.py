"""Incremental text, and parsers that wait for more of it.

A parser is a generator that yields when it needs more text. Its result depends only on the text,
not on the chunking.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parser that returns a value of type T."""
Sink = Callable[[str], object]
"""Function that receives pieces of text."""

WHITESPACE = " \t\r\n"
MAX_REREAD_CHARACTERS = 1024
"""Maximum characters of a failed call that are parsed again as text, and of text that is examined
to decide whether a marker in reasoning starts a call."""
MAX_BLANKS = 64
"""Maximum whitespace before the text that decides whether a quote or a tag ends a value."""
MAX_LOOKAHEAD = 4096
"""Maximum characters that are searched to decide whether a tag ends a value."""


class ParseError(Exception):
    """The text does not match the expected format."""


class UnexpectedEnd(ParseError):
    """The text ended too early."""


class Source:
    """Text that has not been consumed yet, and a recording of consumed text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None
        self.has_ended = False
        self.is_cut = False
        """Whether the answer was truncated (finish reason length)."""

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def start_recording(self, text: str = "") -> None:
        """Record all text that is consumed from now on. The recording starts with `text`, which was
        just consumed."""
        self._recorded = [text]

    def stop_recording(self) -> None:
        """Discard the recording."""
        self._recorded = None

    def rewind(self, count: int) -> str:
        """Return the first `count` recorded characters, and put the others back in front of the
        text. A recording longer than MAX_REREAD_CHARACTERS is returned as a whole. Stops
        recording."""
        recorded, self._recorded = "".join(self._recorded or ()), None
        if len(recorded) > MAX_REREAD_CHARACTERS:
            return recorded
        self.push_back(recorded[count:])
        return recorded[:count]

    def push_back(self, text: str) -> None:
        """Insert `text` in front of the remaining text."""
        self._text, self._at = text + self._text[self._at :], 0

    @property
    def is_empty(self) -> bool:
        """Whether all text pushed so far has been consumed."""
        return self._at >= len(self._text)

    def take(self, count: int) -> str:
        """Consume and return the next `count` characters, which must be available."""
        piece = self._text[self._at : self._at + count]
        self._at += count
        if self._recorded is not None:
            self._recorded.append(piece)
        return piece

    def peek(self) -> Steps[str]:
        """The next character, without consuming it. Raises UnexpectedEnd."""
        while self._at >= len(self._text):
            if self.has_ended:
                raise UnexpectedEnd
            yield
        return self._text[self._at]

    def peek_many(self, count: int) -> Steps[str]:
        """The next `count` characters, without consuming them. Raises UnexpectedEnd."""
        while len(self._text) - self._at < count:
            if self.has_ended:
                raise UnexpectedEnd
            yield
        return self._text[self._at : self._at + count]

    def peek_until(self, words: tuple[str, ...], skip: int, most: int) -> Steps[str | None]:
        """The text between the next `skip` characters and the first of `words`, without consuming
        it. None if no word follows within `most` characters and the length of a word."""
        pattern, _, longest = _word_search(words)
        while True:
            start = self._at + skip
            match = pattern.search(self._text, start, start + most + longest)
            if match is not None:
                return self._text[start : match.start()]
            if self.has_ended or len(self._text) - start >= most + longest:
                return None
            yield

    def find_next(self, words: tuple[str, ...], skip: int) -> Steps[str]:
        """The first of `words` in the MAX_LOOKAHEAD characters after the next `skip` characters; ""
        if no word is found."""
        pattern, _, longest = _word_search(words)
        while True:
            start = self._at + skip
            match = pattern.search(self._text, start, start + MAX_LOOKAHEAD + longest)
            if match is not None:
                return match[0]
            if self.has_ended or len(self._text) - start >= MAX_LOOKAHEAD + longest:
                return ""
            yield

    def is_followed_by(self, words: tuple[str, ...], skip: int) -> Steps[bool]:
        """Whether any of `words`, or the end of the text, follows the next `skip` characters and
        at most MAX_BLANKS whitespace characters."""
        while True:
            rest = self._text[self._at + skip : self._at + skip + MAX_BLANKS + max(map(len, words))]
            following = rest.lstrip(WHITESPACE)
            if following.startswith(words):
                return True
            if len(rest) - len(following) > MAX_BLANKS:
                return False
            if self.has_ended:
                return not following
            if not any(word.startswith(following) for word in words):
                return False
            yield

    def expect(self, character: str) -> Steps[None]:
        """Consume `character`. Raises ParseError if another character comes next."""
        if (yield from self.peek()) != character:
            raise ParseError
        self.take(1)

    def skip_whitespace(self, more: str = "") -> Steps[str]:
        """Consume and return whitespace and characters of `more`."""
        taken = []
        while True:
            end = self._at
            while end < len(self._text) and (
                self._text[end] in WHITESPACE or self._text[end] in more
            ):
                end += 1
            taken.append(self.take(end - self._at))
            if self._at < len(self._text) or self.has_ended:
                return "".join(taken)
            yield

    def peek_run(self, pattern: "re.Pattern[str]", most: int) -> Steps[str]:
        """The match of `pattern` (a run of characters), without consuming it. Raises ParseError for
        more than `most` characters."""
        while True:
            match = pattern.match(self._text, self._at, self._at + most + 1)
            assert match is not None, "a run may be empty"
            if len(match[0]) > most:
                raise ParseError
            if match.end() < len(self._text) or self.has_ended:
                return match[0]
            yield

    def take_run(self, pattern: "re.Pattern[str]", sink: Sink) -> None:
        """Consume the match of `pattern` in the available text, and pass it to `sink`."""
        match = pattern.match(self._text, self._at)
        if match is not None and match[0]:
            sink(self.take(len(match[0])))

    def take_all(self, sink: Sink) -> None:
        """Consume all available text, and pass it to `sink`."""
        if not self.is_empty:
            sink(self.take(len(self._text) - self._at))

    def accept(self, *words: str) -> Steps[str]:
        """Consume and return the longest of `words` that comes next; "" if no word does."""
        return self.take(len((yield from self.peek_word(*words))))

    def peek_word(self, *words: str) -> Steps[str]:
        """The longest of `words` that comes next, without consuming it; "" if no word does."""
        for word in sorted(words, key=len, reverse=True):
            while True:
                following = self._text[self._at : self._at + len(word)]
                if following == word:
                    return word
                if self.has_ended or not word.startswith(following):
                    break
                yield
        return ""

    def peek_piece(self, start: int, end: int) -> str:
        """The available characters from offset `start` to offset `end`, without consuming them."""
        return self._text[self._at + start : self._at + end]

    def peek_at(self, offset: int) -> Steps[str]:
        """The character after the next `offset` characters, without consuming it; "" if the text
        has ended."""
        while len(self._text) - self._at <= offset and not self.has_ended:
            yield
        return self._text[self._at + offset : self._at + offset + 1]

    def read_until(
        self, words: tuple[str, ...], sink: Sink, *, most: int | None = None, leave: bool = False
    ) -> Steps[str]:
        """Pass text to `sink` up to the first of `words`, and take the word too unless `leave`.
        Returns the word; "" if the text ended first. Unless `leave`, no word may be a prefix of
        another word. Raises ParseError if more than `most` characters precede the word."""
        pattern, prefixes, longest = _word_search(words)
        while True:
            match = pattern.search(self._text, self._at)
            end = len(self._text) if match is None else match.start()
            if match is None and not self.has_ended:
                first = max(self._at, end - longest + 1)
                end = next((i for i in range(first, end) if self._text[i:] in prefixes), end)
            if most is not None and end - self._at > most:
                self.take(most)
                raise ParseError
            piece = self.take(end - self._at)
            if most is not None:
                most -= len(piece)
            if piece:
                sink(piece)
            if match is not None:
                return match[0] if leave else self.take(len(match[0]))
            if self.has_ended:
                return ""
            yield

    def collect_until(
        self, words: tuple[str, ...], *, most: int, leave: bool = False
    ) -> Steps[str]:
        """The text before the first of `words`. Raises UnexpectedEnd if the text ends first, and
        ParseError like `read_until`."""
        pieces: list[str] = []
        if not (yield from self.read_until(words, pieces.append, most=most, leave=leave)):
            raise UnexpectedEnd
        return "".join(pieces)


class Trimmed:
    """Passes text to `sink`, without trailing whitespace."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._trailing: list[str] = []

    def __call__(self, piece: str) -> None:
        ready = piece.rstrip()
        if ready:
            self._sink(self.take_trailing() + ready)
        self._trailing.append(piece[len(ready) :])

    def take_trailing(self) -> str:
        """Remove and return the whitespace at the end of the text."""
        # A list: joining all of it for each piece would take quadratic time.
        trailing, self._trailing = "".join(self._trailing), []
        return trailing


@lru_cache(maxsize=256)
def _word_search(words: tuple[str, ...]) -> "tuple[re.Pattern[str], frozenset[str], int]":
    """(pattern that finds the first of `words`, their proper prefixes, length of the longest
    word)."""
    pattern = re.compile("|".join(map(re.escape, words)) or "(?!)")
    prefixes = frozenset(word[:end] for word in words for end in range(1, len(word)))
    return pattern, prefixes, max(map(len, words), default=1)
